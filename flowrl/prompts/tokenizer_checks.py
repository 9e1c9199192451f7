"""Whether a tokenizer tells texts apart: libraries make an empty one where the files with its words are missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_WORDS = ("tokenizer.json", "vocab.txt", "vocab.json", "tekken.json")
_WORD_ENDINGS = (".model", ".tiktoken")
_WORDLESS = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")
"""Classes whose tokens are bytes or characters, which need no file of words."""
_HANDFUL = 8
_LARGE = 1 << 16  # bytes of a tokenizer.json that has many words for certain
_TEXTS = ("a red circle", "two blue squares")
_TRIED = 8


def check_tokenizer_files(folder: Path, advice: str) -> None:
    """Refuses the folder of a tokenizer, or of a processor with one, without its words, as far as names and small files
    tell; the message ends with `advice`."""
    names = {path.name for path in folder.glob("*")} | {path.name for path in folder.glob("tokenizer/*")}
    kind = _read(folder / "tokenizer_config.json").get("tokenizer_class")
    if kind in _WORDLESS:
        return
    whole = folder / "tokenizer.json"
    few = False
    if whole.is_file() and whole.stat().st_size < _LARGE:
        model = _read(whole).get("model")
        entries = model.get("vocab") if isinstance(model, dict) else None
        few = entries is not None and len(entries) <= _HANDFUL
    words = {name for name in names if name in _WORDS or name.endswith(_WORD_ENDINGS)}
    if few or not words:
        what = "tokenizer.json has no words" if few else "it has none of tokenizer.json, vocab.json, vocab.txt, *.model"
        raise ValueError(f"{folder} is a tokenizer without words: {what}, and all prompts would be the same; {advice}")
    if words == {"vocab.json"} and "merges.txt" not in names:
        raise ValueError(
            f"{folder} has vocab.json and no merges.txt (or tokenizer.json, which holds both): its words would be read "
            f"letter by letter; {advice}"
        )


def check_tokenizer(tokenizer: Any, place: str, advice: str) -> None:
    """Refuses a loaded tokenizer that gives different texts the same tokens.

    Special tokens do not count. Texts are two of words and some that its own entries stand for.

    Args:
        tokenizer: of transformers.
        place: where it is from, for the message.
        advice: what to do, for the message.
    """
    special, size = {*tokenizer.all_special_ids, tokenizer.unk_token_id}, len(tokenizer)
    own = [tokenizer.decode([one]) for one in range(0, size, max(1, size // _TRIED)) if one not in special]
    found = {frozenset(tokenizer(text)["input_ids"]) - special for text in (*_TEXTS, *filter(str.strip, own))}
    if len(found - {frozenset()}) < 2:
        raise ValueError(
            f"{place} is a tokenizer of {size} entries, which gives {_TEXTS[0]!r} and {_TEXTS[1]!r} the same tokens: "
            f"its tokenizer.json, or vocab.json and merges.txt, or .model file, is missing or empty; {advice}"
        )


def check_fits(tokenizer: Any, encoder: Any, place: str) -> None:
    """Refuses a tokenizer whose tokens an encoder has no embeddings of, at once and for every prompt to come.

    Args:
        tokenizer: of transformers.
        encoder: the text encoder beside it, which keeps watch over its own input from here on.
        place: where the tokenizer is from, for the message.
    """
    table = encoder.get_input_embeddings()
    rows = vars(table).get("num_embeddings")
    if rows is None:
        return
    _refuse_beyond(place, rows, max((one for text in _TEXTS for one in tokenizer(text)["input_ids"]), default=0))
    positions = vars(encoder.config).get("max_position_embeddings")
    if "CLIPText" in type(encoder).__name__ and positions is not None and tokenizer.model_max_length > positions:
        raise ValueError(
            f"{place} pads prompts to {tokenizer.model_max_length} tokens (model_max_length in its "
            f"tokenizer_config.json), and its text encoder has {positions} positions: set model_max_length to that"
        )

    def watch(table: Any, given: tuple[Any, ...]) -> None:
        if given and given[0].numel():
            _refuse_beyond(place, table.num_embeddings, int(given[0].max()))

    for module in encoder.modules():  # T5 has its table twice, and reads the one that is not given above
        if vars(module).get("num_embeddings") == rows and module.weight is table.weight:
            module.register_forward_pre_hook(watch)


def _refuse_beyond(place: str, rows: int, highest: int) -> None:
    if highest >= rows:
        raise ValueError(
            f"{place} gives token {highest}, and the text encoder beside it has {rows} embeddings: it is the tokenizer "
            "of another model, or had tokens added that the encoder was not trained on; take the one that belongs to it"
        )


def _read(path: Path) -> dict[str, Any]:
    """A small JSON object; empty of what is no such, which the library itself refuses."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
