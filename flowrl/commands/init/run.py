"""`flowrl init`: a first configuration for a model and a card."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from flowrl.commands.init.questions import QUESTIONS, ask, card_fault
from flowrl.config.train import TrainConfig, is_here, load_config
from flowrl.migrating.bases import EVERYDAY, EVERYDAY_EVAL, Wish, base_for, prompts_are_here
from flowrl.migrating.imported import imported, text_of_import, told
from flowrl.migrating.written import text_of
from flowrl.planning.light_libraries import import_lightly, without_compiler
from flowrl.runtime.files import write_atomically
from flowrl.runtime.scrubbing import say as print


def run(parsed: argparse.Namespace) -> int:
    """Writes the file and says what comes next.

    Raises:
        ValueError: a flag is missing where nobody can be asked, the file exists, nothing ships for the model, no
            setting fits the card, or the settings contradict each other.
    """
    path: Path = parsed.out
    if path.exists():
        raise ValueError(f"{path} exists already: name another file with --out, or move it away")
    text, said, card = _of_answers(parsed, path) if parsed.source is None else _of_file(parsed, path)
    config = _loaded(text, path)
    write_atomically(path, text)
    print(said)
    _say_prompts(config)
    quoted = shlex.quote(str(path))
    print(f"next: flowrl plan {quoted}{f' --card {card}' if card else ''}\nthen: flowrl train {quoted}")
    return 0


def _of_answers(parsed: argparse.Namespace, path: Path) -> tuple[str, str, int | None]:
    """The text of what flags and answers ask for, what is said of it, and the card."""
    wish = _wish(parsed)
    with nullcontext() if ".py" in (wish.reward or "") else _lightly():  # what such a reward imports is not known
        wish, base, overrides, why = _made(wish, path)
    text = text_of(wish, base, _fitting(wish.model, overrides, why))
    return text, f"wrote {path}, which builds on {base}: {why}", wish.card


def _of_file(parsed: argparse.Namespace, path: Path) -> tuple[str, str, int | None]:
    """As `_of_answers`, of another toolkit's configuration."""
    for name in ("prompts", "eval_prompts"):
        if getattr(parsed, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} is not read with --from: change the written file's prompts")
    with _lightly():
        found = imported(parsed.source, parsed.model, parsed.reward)
        try:
            config = _loaded(text_of_import(found, ()), path)
            overrides, why = _sized(config, path.stem, parsed.card, with_prompts=False)
            misfits = _misfits(config)
        except ValueError as error:
            raise ValueError(f"{parsed.source} says what is refused here: {error}") from None
    text = text_of_import(found, _fitting(found.done.keys["pipeline.model"], overrides, why))
    said = f"{told(found)}\nwrote {path}, which builds on {found.base}{f': {why}' if why else ''}"
    return text, "\n".join([said, *(f"look: other prompts are needed: {one}" for one in misfits)]), parsed.card


@contextmanager
def _lightly() -> Iterator[None]:
    import_lightly()
    with without_compiler():
        yield


def _fitting(model: str, overrides: tuple[str, ...] | None, why: str) -> tuple[str, ...]:
    """The settings that make a run fit.

    Raises:
        ValueError: there are none.
    """
    if overrides is None:
        raise ValueError(f"{model} {why}; nothing was written: name a larger card, or see docs/memory.md")
    return overrides


def _say_prompts(config: TrainConfig) -> None:
    if config.prompts.train.startswith(EVERYDAY):
        print("its prompts are everyday ones that ship: name yours with --prompts")
    elif not is_here(config.prompts.train):
        print(f"its prompts have to be put at {config.prompts.train} first")


def _made(wish: Wish, path: Path) -> tuple[Wish, str, tuple[str, ...] | None, str]:
    """The wish, with prompts that are here where the base's are not and plain ones will do; what came of it."""
    base = base_for(wish)
    if wish.prompts is None and not prompts_are_here(base):
        try:
            plain = replace(wish, prompts=EVERYDAY, eval_prompts=wish.eval_prompts or EVERYDAY_EVAL)
            return plain, base, *_sized(_loaded(text_of(plain, base, ()), path), path.stem, wish.card)
        except ValueError:  # the prompts have to say more than these do
            pass
    return wish, base, *_sized(_loaded(text_of(wish, base, ()), path), path.stem, wish.card)


def _wish(parsed: argparse.Namespace) -> Wish:
    given = ask({name: getattr(parsed, name) for name in QUESTIONS})
    if given["model"] is None or given["card"] is None:
        raise ValueError(
            "--model and --card are needed where nobody can be asked, such as "
            "'flowrl init --model stabilityai/stable-diffusion-3.5-medium --card 24'"
        )
    if (fault := card_fault(str(given["card"]))) is not None:
        raise ValueError(fault)
    return Wish(model=given["model"], card=int(given["card"]), reward=given["reward"], prompts=given["prompts"],
                eval_prompts=parsed.eval_prompts)  # fmt: skip


def _loaded(text: str, path: Path) -> TrainConfig:
    """The configuration that a text is, checked as `flowrl plan` checks its file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / path.name
        file.write_text(text, encoding="utf-8")
        try:
            return load_config(file)
        except ValueError as error:
            raise ValueError(str(error).replace(str(file), str(path))) from None


def _misfits(config: TrainConfig) -> list[str]:
    """What prompts that are here lack for model and rewards: of an import they may be the base's, and are changed."""
    from flowrl.session.preflight import look

    return look(config, here=False, only_here=True).of_prompts


def _sized(
    config: TrainConfig, name: str, card: int | None, *, with_prompts: bool = True
) -> tuple[tuple[str, ...] | None, str]:
    """What `flowrl plan` would change for the card, and its verdict in words; None where nothing will do.

    Without a card it is only looked whether `flowrl plan` takes the configuration; without `with_prompts` whatever its
    prompts are.

    Raises:
        ValueError: `flowrl plan` refuses the configuration.
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
