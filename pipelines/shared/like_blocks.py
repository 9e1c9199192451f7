"""Blocks of a denoiser that are alike: how many there are of each kind, and configurations with fewer of them.

The cost of one evaluation is linear in the number of blocks of a kind, once the network's ends are in: a first block,
whose input needs no gradient, and a last one, whose other outputs are not read. So two networks that differ by one
block show a block's cost, and a few small networks that of a large one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_COUNTS = ("num_layers", "num_single_layers", "n_layers")
"""Entries of a denoiser's configuration that count blocks, in the order in which the blocks are called."""
_DUAL = "dual_attention_layers"
"""Blocks of SD3.5-M with a second attention: the first ones, so that they are a kind of their own."""
_STACKS = "transformer_layers_per_block"
"""Transformer blocks of each attention of a UNet, level by level."""
_BETWEEN = ("vace_layers", "inject_face_latents_blocks", "num_decoder_layers")
"""Of Wan VACE and Animate: blocks behind which the answer of a control block, or of a face, is added. Of Motif-Video:
how many of the last blocks read the others' answers in the place of the text."""
_ONE_BLOCK = re.compile(r"(?:^|blocks\.|layers\.)\d+\.")


def block_kinds(config: Mapping[str, Any]) -> dict[str, int]:
    """Kind of block -> how many there are, of a configuration with the class's defaults; none where they are not alike.

    Kinds are in the order of calls. Those of `num_layers` with a second attention are `dual_attention_layers`, and are
    not counted as `num_layers`. Levels of a UNet are kinds of their own. Answers of control blocks are held all at once
    and memory without gradient grows with their number, and a face is read after some blocks: none is like another.
    """
    if any(config.get(key) for key in _BETWEEN):
        return {}
    stacks = config.get(_STACKS)
    if isinstance(stacks, list | tuple) and all(isinstance(count, int) for count in stacks):
        return {f"{_STACKS}.{level}": count for level, count in enumerate(stacks) if count > 1}
    kinds = {key: int(config[key]) for key in _COUNTS if isinstance(config.get(key), int)}
    dual = list(config.get(_DUAL) or ())
    if not dual:
        return kinds
    if dual != list(range(len(dual))) or "num_layers" not in kinds:
        return {}
    kinds = {_DUAL: len(dual), **kinds, "num_layers": kinds["num_layers"] - len(dual)}
    return {kind: count for kind, count in kinds.items() if count}


def with_blocks(config: Mapping[str, Any], kinds: Mapping[str, int]) -> dict[str, Any]:
    """A configuration with so many blocks of each kind, `block_kinds` of it; everything else stays."""
    if any(kind.startswith(_STACKS) for kind in kinds):
        stacks = enumerate(config[_STACKS])
        return {**config, _STACKS: [kinds.get(f"{_STACKS}.{level}", count) for level, count in stacks]}
    dual = kinds.get(_DUAL)
    changed: dict[str, Any] = {key: kinds[key] for key in _COUNTS if key in kinds}
    if dual is not None:
        changed |= {_DUAL: list(range(dual)), "num_layers": dual + kinds.get("num_layers", 0)}
    return {**config, **changed}


def fewest(kinds: Mapping[str, int]) -> dict[str, int]:
    """As few blocks of each kind as still have the network's first one and its last one among them. Of two kinds the
    first one is of the one, the last one of the other; no level of a UNet has the network's ends."""
    least = 2 if len(kinds) == 1 and not any(kind.startswith(_STACKS) for kind in kinds) else 1
    return {kind: min(count, least) for kind, count in kinds.items()}


def names_a_block(targets: Sequence[str]) -> bool:
    """Whether a LoRA target means one block of several, such as "transformer_blocks.3.attn.to_q"."""
    return any(_ONE_BLOCK.search(target) for target in targets)
