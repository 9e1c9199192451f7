"""Writes a first configuration for a model and a card, or from another toolkit's file, that `flowrl plan` accepts."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.config.base import card_memory
from flowrl.config.overrides import Typed, value_text
from flowrl.config.strict_yaml import dotted_items
from flowrl.config.train import TrainConfig, is_here, load_config
from flowrl.migrating.answers import FIRST
from flowrl.migrating.imported import describe_import, import_foreign, settled, text_of_import
from flowrl.planning.bases import Wish, configs_of
from flowrl.planning.light_libraries import light_libraries
from flowrl.planning.written import text_of
from flowrl.runtime.files import refuse_unwritable, write_atomically
from flowrl.runtime.public import public

if TYPE_CHECKING:
    from flowrl.planning.gather import Plan
    from flowrl.planning.refusals import Obstacles
import csv
import json

from flowrl.config.prompt_sets import PROMPT_SETS
from flowrl.prompts.foreign_rows import PROMPTS
from flowrl.prompts.prompt_files import SEPARATOR
from flowrl.runtime.files import read_text

SHARE = 10
"""One prompt in so many is held out."""
LEAST, MOST = 4, 64
"""Bounds of the number of held-out prompts: with fewer, none are held out; more cost time and tell little."""


def hold_out(prompts: str) -> tuple[str, str] | None:
    """Splits prompts (a .txt, .jsonl or .csv, or asset:NAME) into those to train on and every tenth; None if too few.

    They lie beside it, so that images in its lines are found. A repeated prompt is on one side only. Shipped prompts
    ship in pairs. Raises ValueError: one of the two exists with other contents, or the folder cannot be written.
    """
    for found in PROMPT_SETS.values():
        if found.ships is not None and found.ships[0] == prompts:
            return found.ships
    path = Path(prompts).expanduser()
    if path.suffix not in (".txt", ".jsonl", ".csv") or not path.is_file():
        return None
    texts = split_lines(path)
    if texts is None:
        return None
    files = {path.with_name(f"{path.stem}_{side}{path.suffix}"): text for side, text in texts.items()}
    for file, text in files.items():
        if file.exists() and file.read_text(encoding="utf-8") != text:
            raise ValueError(f"{file} exists already with other prompts: move it away, or name `eval_prompts`")
    for file, text in files.items():
        try:
            write_atomically(file, text)
        except OSError as error:
            raise ValueError(f"held-out prompts cannot be written to {file} ({error}): name `eval_prompts`") from error
    train, held_out = map(str, files)
    return train, held_out


def split_lines(path: Path) -> dict[str, str] | None:
    """Lines (of a .csv header and rows) to train on and held-out ones, each prompt on one side; None if too few."""
    head, keys = list[str](), dict[str, str]()
    if path.suffix == ".csv":
        head, keys = csv_rows(path)
        lines = list(keys)
    else:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        keys = {line: prompt_of(line, path.suffix) for line in lines}
    distinct = list(dict.fromkeys(keys.values()))
    step = max(SHARE, -(-len(distinct) // MOST))
    held = set(distinct[step - 1 :: step])
    if len(held) < LEAST:
        return None
    sides = {"train": [line for line in lines if keys[line] not in held]}
    sides["heldout"] = [line for line in keys if keys[line] in held]
    return {side: "\n".join([*head, *kept, ""]) for side, kept in sides.items()}


def csv_rows(path: Path) -> tuple[list[str], dict[str, str]]:
    """The lines of the header, and the text of each different row, which may go over several lines, with its prompt."""
    lines = read_text(path).rstrip("\n").split("\n")
    marked = SEPARATOR.match(f"{lines[0]}\n")
    first = 1 if marked else 0
    reader = csv.reader(lines[first:], delimiter=marked[1] if marked else ",", skipinitialspace=True)
    begins, names, rows = first, list[str](), dict[str, str]()
    head = list[str]()
    for row in reader:
        text, begins = "\n".join(lines[begins : first + reader.line_num]), first + reader.line_num
        if not any(cell.strip() for cell in row):
            continue
        if not names:
            names, head = [name.strip() for name in row], [*lines[:first], text]
            place = next((names.index(one) for one in ("prompt", *PROMPTS) if one in names), 0)
        else:
            rows[text] = row[place].strip() if place < len(row) else text
    return head, rows


def prompt_of(line: str, suffix: str) -> str:
    """The key of a line: its prompt, without blanks around it."""
    if suffix == ".jsonl":
        try:
            return str(json.loads(line)["prompt"]).strip()
        except (ValueError, KeyError, TypeError):  # which reading the file refuses, with the line
            pass
    return line.strip()


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstConfig:
    """The written configuration."""

    path: Path
    """The YAML file."""
    base: str
    """The configuration that it builds on."""
    notes: tuple[str, ...]
    """What became of your arguments or of another toolkit's keys, and what you have to put in place."""
    card: int | None
    """Memory of the card in GB; None if you named none."""

    @property
    def text(self) -> str:
        """The text of the file."""
        return self.path.read_text(encoding="utf-8")

    @property
    def next_commands(self) -> tuple[str, str]:
        """The commands that plan it and train it."""
        quoted = shlex.quote(str(self.path))
        return f"flowrl plan {quoted}{f' --card {self.card}' if self.card else ''}", f"flowrl train {quoted}"


@public
def init(
    model: str | None = None, card: int | str | None = None, *, reward: str | None = None,
    prompts: str | Path | None = None, eval_prompts: str | Path | None = None, hours: float | None = None,
    source: str | Path | None = None, out: str | Path = FIRST, **settings: Any,
) -> FirstConfig:  # fmt: skip
    """Writes a first configuration that `plan` accepts: the recommended recipe, measured before and after.

    Args:
        model: a published checkpoint, a diffusers folder or asset:tiny-sd3.
        card: memory of one card in GB, or its name, such as "4090".
        reward: a built-in reward, or your FILE.py:FUNCTION; None keeps that of the configuration it builds on.
        prompts: file of training prompts, one per line, or JSON lines; None takes the configuration's, or shipped ones
            if those are not here.
        eval_prompts: file of held-out prompts; None holds out a tenth of `prompts`, in two files beside it.
        hours: hours after which the run ends on such a card; None is 10, an evening.
        source: a configuration to translate, from flow_grpo or DiffusionNFT (FILE.py:FUNCTION), Flow-Factory or UniRL
            (YAML), verl-omni, DanceGRPO or MixGRPO (shell script).
        out: file to write.
        **settings: replace the written values, as in `train`.

    Raises:
        FlowrlError: the file exists, nothing ships for the model, no setting fits the card or ends in time, or the
            arguments contradict each other. No configuration was written.
    """
    path, card = Path(out), card_memory(card)
    if hours is not None and not hours > 0:
        raise ValueError(f"`hours` must be above 0, got {hours:g}")
    if path.exists():
        raise ValueError(f"{path} exists already: name another file with `out`, or move it away")
    refuse_unwritable(path.parent)  # now, not after a plan
    if source is not None:
        for name, given in (("prompts", prompts), ("eval_prompts", eval_prompts)):
            if given is not None:
                raise ValueError(f"`{name}` is not read with `source`: change the written file")
        if hours is not None and card is None:
            raise ValueError(f"how long {hours:g} hours are depends on the card: give `card`, such as 24")
        text, base, notes = _translate(str(source), (model, reward), (card, hours), path, settings)
        config = _load(text, path)
        if not is_here(config.prompts.train):
            notes.append(f"put its prompts at {config.prompts.train} first; 'flowrl data list' names published ones")
    else:
        if model is None or card is None:
            raise ValueError("`model` and `card` are needed, such as stabilityai/stable-diffusion-3.5-medium and 24")
        files = [None if one is None else str(one) for one in (prompts, eval_prompts)]
        wish = Wish(model=model, card=card, reward=reward, prompts=files[0], eval_prompts=files[1], recommended=True)
        text, base, notes = _build(wish, path, 10.0 if hours is None else hours, settings)
        _load(text, path)
    write_atomically(path, text)
    return FirstConfig(path=path, base=base, notes=tuple(notes), card=card)


def _build(wish: Wish, path: Path, hours: float, settings: Mapping[str, Any]) -> tuple[str, str, list[str]]:
    """The text of the wished configuration, its base, and notes; holds prompts out if you name no held-out ones."""
    if "recipe" in settings:
        named = str(settings["recipe"]).rpartition("=")[2]
        raise ValueError(
            f"without `source` a first configuration has the recommended recipe, and `recipe` is {named}: start "
            f"from one that ships for it ({', '.join(configs_of(named)) or 'there is none'}), by a file that says "
            "'base: NAME' above your own keys"
        )
    own, kept = None, list[str]()
    if wish.prompts is not None and wish.eval_prompts is None:
        own = hold_out(wish.prompts)
        kept = ["nothing is evaluated: too few prompts to hold some out; name `eval_prompts`"]
    if own is not None:
        wish = replace(wish, prompts=own[0], eval_prompts=own[1])
        kept = [f"held-out prompts: {own[1]}, training prompts: {own[0]}"]
    with nullcontext() if ".py" in (wish.reward or "") else light_libraries(None):  # such a reward may import anything
        from flowrl.planning.first_run import first_run
        from flowrl.planning.outlook import outlook_of, outlook_words
        from flowrl.planning.plan import SMALLER_RANKS, in_time, make_plan

        first = first_run(wish, settings)
        config, words = in_time(first.config, wish.model, wish.card, hours, ranks=SMALLER_RANKS)
        made, _ = make_plan(config, path.stem, 1)
        outlook = outlook_of(made, wish.card)
    sized = {word.partition("=")[0] for word in words}
    told = outlook_words(made, outlook)
    head = [
        f"Written by flowrl init for {wish.model} on one card of {wish.card} GB, to end within {hours:g} h.",
        f"It builds on {first.base}, which says what is not here; 'flowrl list keys' names all keys.",
        *told,
        *first.notes,
    ]
    said = [f"wrote {path}, which builds on {first.base}", *told, *first.notes, *kept]
    if smaller := sorted(word for word in words if word.startswith("policy.lora_rank")):
        said.append(f"{smaller[0]}, because nothing else makes it fit")
    return text_of(config, first.base, head, sized), first.base, said


def _translate(
    source: str, chosen: tuple[str | None, ...], size: tuple[int | None, float | None], path: Path, settings: Any
) -> tuple[str, str, list[str]]:
    """As `_build`, from another toolkit's file, with the chosen model and reward, for a card and hours."""
    card, hours = size
    own = [
        str(value) if isinstance(value, Typed) else f"{key}={value_text(key, value)}"
        for key, value in dotted_items(settings)
    ]
    with light_libraries(None):
        from flowrl.planning.outlook import outlook_of, outlook_words
        from flowrl.planning.plan import in_time

        found = import_foreign(source, *chosen)
        try:
            found = settled(found, own)
            config, words = _load(text_of_import(found, own), path), list[str]()
            if card is not None:
                config, words = in_time(config, config.pipeline.model, card, hours, make=_plan_but_for_prompts)
            made, obstacles = _plan_but_for_prompts(config, path.stem, 1)
        except ValueError as error:
            raise ValueError(f"what {source} says is not valid here, so replace it by key=value: {error}") from None
    told = outlook_words(made, outlook_of(made, card))
    notes = [f"{describe_import(found)}\nwrote {path}, which builds on {found.base}", *told]
    misfits = [one for one in obstacles.of_prompts if one not in obstacles.absent]
    notes += [f"look: other prompts are needed: {one}" for one in misfits]  # they may be the base's
    return text_of_import(found, [*own, *words]), found.base, notes


def _load(text: str, path: Path) -> TrainConfig:
    """Loads a configuration from text, with the checks of `flowrl plan`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / path.name
        file.write_text(text, encoding="utf-8")
        try:
            return load_config(file)
        except ValueError as error:
            raise ValueError(str(error).replace(str(file), str(path))) from None


def _plan_but_for_prompts(config: TrainConfig, name: str, processes: int) -> tuple[Plan, Obstacles]:
    """A plan that does not depend on the prompts. Raises ValueError: a plan refuses the configuration."""
    from flowrl.planning.gather import gather
    from flowrl.planning.refusals import obstacles
    from flowrl.planning.throughput import pace
    from flowrl.training.parts import model_family

    family = model_family(config.pipeline)
    found = obstacles(config, family, processes)
    if refused := [fault for fault in found.refused if fault not in found.of_prompts]:
        raise ValueError("; ".join(refused))
    made = gather(config, name, family, processes=processes, pace=pace(config, None))
    return made, found
