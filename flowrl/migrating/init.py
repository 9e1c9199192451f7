"""A first configuration for a model and a card, or of another toolkit's file, as `flowrl plan` accepts it."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from flowrl.config.train import TrainConfig, is_here, load_config
from flowrl.migrating.bases import EVERYDAY, EVERYDAY_EVAL, Wish, base_for, prompts_are_here
from flowrl.migrating.imported import describe_import, import_foreign, text_of_import
from flowrl.migrating.written import text_of
from flowrl.planning.light_libraries import import_lightly, without_compiler
from flowrl.runtime.files import write_atomically
from flowrl.runtime.public import public


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstConfig:
    """The written configuration.

    Attributes:
        path: the YAML file.
        base: the configuration that it builds on.
        notes: what became of your arguments or of another toolkit's keys, and what you have to put in place.
        card: memory of the card in GB; None if you named none.
    """

    path: Path
    base: str
    notes: tuple[str, ...]
    card: int | None

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
    model: str | None = None, card: int | None = None, *, reward: str | None = None, prompts: str | Path | None = None,
    eval_prompts: str | Path | None = None, source: str | Path | None = None, out: str | Path = "my.yaml",
) -> FirstConfig:  # fmt: skip
    """Writes a first configuration that `plan` accepts.

    Args:
        model: a published checkpoint, a diffusers folder or asset:tiny-sd3.
        card: memory of one card in GB.
        reward: one that ships, or your FILE.py:FUNCTION; None keeps that of the configuration it builds on.
        prompts: file of training prompts, a line each, or JSON lines.
        eval_prompts: file of held-out prompts; without it the run does not evaluate on prompts of yours.
        source: a configuration to translate, of flow_grpo (FILE.py:FUNCTION), Flow-Factory (YAML), verl-omni or
            DanceGRPO (shell script).
        out: file to write.

    Raises:
        FlowrlError: the file exists, nothing ships for the model, no setting fits the card, or the arguments contradict
            each other. Nothing was written.
    """
    path = Path(out)
    if path.exists():
        raise ValueError(f"{path} exists already: name another file with `out`, or move it away")
    if source is not None:
        for name, given in (("prompts", prompts), ("eval_prompts", eval_prompts)):
            if given is not None:
                raise ValueError(f"`{name}` is not read with `source`: change the written file's prompts")
        text, base, notes = _translate(str(source), model, card, reward, path)
    else:
        if model is None or card is None:
            raise ValueError("`model` and `card` are needed, such as stabilityai/stable-diffusion-3.5-medium and 24")
        texts = [None if one is None else str(one) for one in (prompts, eval_prompts)]
        wish = Wish(model=model, card=card, reward=reward, prompts=texts[0], eval_prompts=texts[1])
        text, base, notes = _build(wish, path)
    config = _load(text, path)
    write_atomically(path, text)
    if config.prompts.train.startswith(EVERYDAY):
        notes.append("its prompts are everyday ones that ship: name yours with `prompts`")
    elif not is_here(config.prompts.train):
        notes.append(f"its prompts have to be put at {config.prompts.train} first")
    return FirstConfig(path=path, base=base, notes=tuple(notes), card=card)


def _build(wish: Wish, path: Path) -> tuple[str, str, list[str]]:
    """The text of what is wished for, the base, and what is said of them.

    Where the base's prompts are not here, plain ones that ship stand in, unless its prompts have to say more.
    """
    with nullcontext() if ".py" in (wish.reward or "") else _light_imports():  # such a reward may import anything
        base = base_for(wish)
        found = None
        if wish.prompts is None and not prompts_are_here(base):
            plain = replace(wish, prompts=EVERYDAY, eval_prompts=wish.eval_prompts or EVERYDAY_EVAL)
            try:
                found = _size(_load(text_of(plain, base, ()), path), path.stem, wish.card)
                wish = plain
            except ValueError:
                pass
        overrides, why = found or _size(_load(text_of(wish, base, ()), path), path.stem, wish.card)
    return (
        text_of(wish, base, _fitting(wish.model, overrides, why)),
        base,
        [f"wrote {path}, which builds on {base}: {why}"],
    )


def _translate(
    source: str, model: str | None, card: int | None, reward: str | None, path: Path
) -> tuple[str, str, list[str]]:
    """As `_build`, of another toolkit's configuration."""
    from flowrl.session.preflight import look

    with _light_imports():
        found = import_foreign(source, model, reward)
        try:
            config = _load(text_of_import(found, ()), path)
            overrides, why = _size(config, path.stem, card, with_prompts=False)
            # prompts that are here may be the base's, and are changed
            misfits = look(config, here=False, only_here=True).of_prompts
        except ValueError as error:
            raise ValueError(f"{source} says what is refused here: {error}") from None
    text = text_of_import(found, _fitting(found.done.keys["pipeline.model"], overrides, why))
    said = f"{describe_import(found)}\nwrote {path}, which builds on {found.base}{f': {why}' if why else ''}"
    return text, found.base, [said, *(f"look: other prompts are needed: {one}" for one in misfits)]


@contextmanager
def _light_imports() -> Iterator[None]:
    import_lightly()
    with without_compiler():
        yield


def _fitting(model: str, overrides: tuple[str, ...] | None, why: str) -> tuple[str, ...]:
    if overrides is None:
        raise ValueError(f"{model} {why}; nothing was written: name a larger card, or see docs/memory.md")
    return overrides


def _load(text: str, path: Path) -> TrainConfig:
    """The configuration that a text is, checked as `flowrl plan` checks its file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / path.name
        file.write_text(text, encoding="utf-8")
        try:
            return load_config(file)
        except ValueError as error:
            raise ValueError(str(error).replace(str(file), str(path))) from None


def _size(
    config: TrainConfig, name: str, card: int | None, *, with_prompts: bool = True
) -> tuple[tuple[str, ...] | None, str]:
    """What the plan would change for the card, and its verdict in words; None where nothing will do.

    Without a card it is only looked whether a plan takes the configuration; without `with_prompts` whatever its prompts
    are.

    Raises:
        ValueError: a plan refuses the configuration.
    """
    from flowrl.planning.fits import fit
    from flowrl.planning.gather import gather
    from flowrl.planning.refusals import obstacles
    from flowrl.planning.throughput import pace
    from flowrl.planning.verdict import in_the_way
    from flowrl.planning.words import in_bytes
    from flowrl.training.parts import model_family

    family = model_family(config.pipeline)
    found = obstacles(config, family, 1)
    refused = [fault for fault in found.refused if with_prompts or fault not in found.of_prompts]
    if refused:
        raise ValueError("; ".join(refused))
    plan = gather(config, name, family, processes=1, pace=pace(config, None), processor="GPU")
    if card is None:
        return (), ""
    if plan.facts is None:
        return (), f"whether it fits {card} GB is not known: {plan.unknown}"
    fitted = fit(plan.facts, plan.settings, plan.choices, card)
    if fitted.overrides is None:
        return None, f"does not fit {card} GB with any setting, because {in_the_way(fitted)}"
    return fitted.overrides, f"at most {in_bytes(fitted.memory.peak)} of a card of {card} GB by the plan"
