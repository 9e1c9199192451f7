"""The question of a comparison: methods, seeds and budget. A method is a configuration, named after its file."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flowrl.config.base import read_with_base
from flowrl.config.rewards import each_once, unique_keys
from flowrl.config.spelling import closest
from flowrl.config.train import TrainConfig, find_config, load_config
from flowrl.rewards import aspects_of
from flowrl.runtime.files import is_taken, read_json

JOURNAL = "compare.json"
BUDGETS = {"nfe": "nfe/total", "images": "images", "seconds": "seconds/total"}
"""Unit of a budget -> the column of `metrics.jsonl` that counts it."""
SEEDS = 5  # by default: with three the test over seeds finds only large differences
NO_LIMIT = 100_000  # iterations; the budget ends a run before
OWN_KEYS = ("out", "seed", "resume", "budget", "progress", "eval.initial")


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonQuestion:
    """The methods, seeds and budget of a comparison."""

    methods: dict[str, str]
    """Name -> the configuration file as given."""
    settings: dict[str, Any]
    """Name -> contents of that file, as nested mappings and lists."""
    seeds: int
    """Number of seeds, counted from 0."""
    budget: str
    """Unit of the budget: "nfe", "seconds" or "images"."""
    limit: float
    """The budget of each run, in this unit."""
    evals: int
    """Number of evaluations spread over the budget, in addition to the one before training."""
    overrides: tuple[str, ...]
    """`key=value` settings of every run."""

    @property
    def runs(self) -> list[tuple[str, int]]:
        """(method, seed) of every run, seed by seed, so that all methods have early results."""
        return [(method, seed) for seed in range(self.seeds) for method in self.methods]


def ask(
    words: Sequence[str], known: Mapping[str, Any], *, budget: str | None, num_seeds: int | None, evals: int | None
) -> ComparisonQuestion:
    """The question of a call, joined with the one in the folder, whose values stand for those that are None.

    Args:
        words: configurations, and `key=value` settings of all runs.
        known: the folder's journal.
        evals: evaluations spread over the budget.

    Raises ValueError: an option is missing or wrong, or the two questions differ in more than added methods or seeds.
    """
    overrides = tuple(text for text in words if "=" in text)
    files = [text for text in words if "=" not in text]
    asked = known.get("question")
    if asked is not None:
        asked = ComparisonQuestion(**{**asked, "overrides": tuple(asked["overrides"])})
    if budget is not None:
        unit, limit = parse_budget(budget)
    elif asked is not None:
        unit, limit = asked.budget, asked.limit
    else:
        raise ValueError("give a budget: `budget` nfe=200000, `budget` seconds=600 or `budget` images=5000")
    seeds, evals = num_seeds or (asked.seeds if asked else SEEDS), evals or (asked.evals if asked else 2)
    if asked is not None and not files and not overrides:  # the folder says it all, but for more seeds
        return _join(asked, replace(asked, seeds=seeds, evals=evals, budget=unit, limit=limit))
    methods = _find_methods(files, overrides)
    question = ComparisonQuestion(
        methods=methods,
        settings={stem: read_with_base(find_config(name)) for stem, name in methods.items()},
        seeds=seeds,
        budget=unit,
        limit=limit,
        evals=evals,
        overrides=overrides,
    )
    return question if asked is None else _join(asked, question)


def _find_methods(files: Sequence[str], overrides: Sequence[str]) -> dict[str, str]:
    """The configurations by name; refuses settings that a comparison sets itself, and two files with one name."""
    if not files:
        given = f" ({overrides[0]} is a setting of all runs)" if overrides else ""
        raise ValueError(f"give the configurations to compare{given}, for instance: flowrl compare A.yaml B.yaml ...")
    for text in overrides:
        if text.startswith(tuple(f"{key}=" for key in OWN_KEYS)) or text.startswith("budget."):
            raise ValueError(f"{text!r}: flowrl compare sets {text.partition('=')[0]} of every run itself; remove it")
    methods: dict[str, str] = {}
    for name in files:
        path = find_config(name)
        if path.stem in methods:
            raise ValueError(f"{methods[path.stem]} and {name} are both called {path.stem}: copy one to another name")
        methods[path.stem] = name
    return methods


def parse_budget(text: str) -> tuple[str, float]:
    """Parses a budget: "nfe=2e5" gives ("nfe", 2e5). Raises ValueError: another unit, or not positive."""
    kind, _, amount = text.partition("=")
    try:
        limit = float(amount)
    except ValueError:
        limit = 0.0
    if kind not in BUDGETS or not 0 < limit < float("inf"):
        raise ValueError(f"`budget` {text!r}: give nfe=NUMBER, seconds=NUMBER or images=NUMBER, such as nfe=200000")
    return kind, limit


def overrides_of(question: ComparisonQuestion, seed: int, threads: int = 1) -> list[str]:
    """The settings that `flowrl train` gets in addition to the configuration; yours come last and win."""
    amount = f"{question.limit:g}" if question.budget == "seconds" else f"{round(question.limit)}"
    return [
        f"seed={seed}",
        f"budget.{question.budget}={amount}",
        f"budget.evals={question.evals}",
        f"num_iterations={NO_LIMIT}",
        "progress=false",
        f"threads={threads}",
        "logging.tensorboard=false",
        *question.overrides,
    ]


def settings_of(question: ComparisonQuestion, method: str, seed: int) -> TrainConfig:
    """The resolved configuration of a run."""
    return load_config(find_config(question.methods[method]), overrides_of(question, seed))


def evaluated_rewards(config: TrainConfig) -> tuple[str, ...]:
    """Names of a run's `flowrl.training.parts.evaluation_rewards`; the second of one name gets a number."""
    trained = [entry for entry in config.rewards if "groups" not in aspects_of(entry.name)]
    entries = each_once([*trained, *config.eval.rewards])
    found = unique_keys([entry.called for entry in entries])
    own_name = {"geneval"} & {entry.name for entry in entries}  # of its score, whatever the reward's label is
    return (*found, *own_name.difference(found))


def base_key(config: TrainConfig) -> str:
    """All that the evaluation before training depends on. Runs with equal keys share it: a LoRA starts at zero."""
    pipeline, settings, sampler = config.pipeline, config.eval, config.sampler
    scale = sampler.guidance_scale if settings.guidance_scale is None else settings.guidance_scale
    return json.dumps([
        pipeline.name, pipeline.model, pipeline.dtype, pipeline.height, pipeline.width, pipeline.max_sequence_length,
        pipeline.num_frames, pipeline.fps, pipeline.options, config.policy.init_lora, config.prompts.eval,
        config.prompts.negative, settings.num_prompts, settings.samples_per_prompt, settings.seed, settings.height,
        settings.width, settings.num_steps or sampler.num_steps, settings.grid or sampler.grid, settings.shift,
        sampler.shift, scale, [asdict(reward) for reward in config.rewards],
        [asdict(reward) for reward in settings.rewards],
        *(text for text in (pipeline.revision, pipeline.variant) if text is not None),
    ])  # fmt: skip


def run_name(method: str, seed: int) -> str:
    """Folder of a run inside the comparison's."""
    return f"{method}-s{seed}"


def is_finished(run: Path) -> bool:
    """Whether a run has finished."""
    return (run / "summary.json").is_file()


def read_journal(folder: Path) -> dict[str, Any]:
    """The folder's journal; empty if there is none. Raises ValueError: unreadable, or the folder holds other files."""
    path = folder / JOURNAL
    if not path.exists():
        if is_taken(folder):
            raise ValueError(f"{folder} is not empty and holds no comparison ({JOURNAL}): give `out` another folder")
        return {}
    try:
        journal = read_json(path)
        ComparisonQuestion(**journal["question"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): restore it, or give `out` another folder") from error
    return journal


def command(question: ComparisonQuestion, folder: Path, jobs: int = 1) -> str:
    """The command that asks this question."""
    limit = f"{question.budget}={question.limit:g}"
    if float(limit.partition("=")[2]) != question.limit:
        limit = f"{question.budget}={question.limit!r}"
    flags = {"num-seeds": question.seeds, "budget": limit, "evals": question.evals, "jobs": jobs, "out": folder}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return shlex.join(["flowrl", "compare", *question.methods.values(), *words, *question.overrides])


def _join(asked: ComparisonQuestion, given: ComparisonQuestion) -> ComparisonQuestion:
    """Adds methods and seeds to the question. Raises ValueError: anything else differs; the message says what."""
    differences = []
    if (asked.budget, asked.limit) != (given.budget, given.limit):
        differences.append(f"the budget was {asked.budget}={asked.limit:g}, not {given.budget}={given.limit:g}")
    if asked.evals != given.evals:
        differences.append(f"`evals` was {asked.evals}, not {given.evals}")
    if asked.overrides != given.overrides:
        was, now = (" ".join(overrides) or "none" for overrides in (asked.overrides, given.overrides))
        differences.append(f"the overrides were {was}, not {now}")
    if given.seeds < asked.seeds:
        differences.append(f"it has {asked.seeds} seeds, not {given.seeds}")
    for method, settings in asked.settings.items():
        if method not in given.methods:
            near = closest(method, [name for name in given.methods if name not in asked.methods])
            differences.append(f"{method} is missing" + (f" (did you mean it by {near}?)" if near else ""))
        elif settings != given.settings[method]:
            differences.append(f"{method} had other settings: {_first_difference(settings, given.settings[method])}")
    if differences:
        raise ValueError(
            f"the folder holds another comparison: {'; '.join(differences)}. Methods and seeds may be added, nothing "
            "else: give `out` another folder, or no configurations at all to continue with what it holds"
        )
    methods, settings = {**asked.methods, **given.methods}, {**asked.settings, **given.settings}
    return replace(given, methods=methods, settings=settings)


def _first_difference(was: Any, now: Any, key: str = "") -> str:
    """Where two nests first differ, as "optim.lr was 0.001, not 0.002"."""
    if isinstance(was, dict) and isinstance(now, dict):
        for name in dict.fromkeys([*was, *now]):
            if was.get(name) != now.get(name):
                return _first_difference(was.get(name), now.get(name), f"{key}.{name}" if key else str(name))
    return f"{key} was {json.dumps(was)}, not {json.dumps(now)}"
