"""The question of a sweep, settings and rewards by role, and its models and prompts; checked before weights load."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from flowrl.config.locations import at_revision
from flowrl.config.options import unknown_name
from flowrl.config.train import TrainConfig, load_config, resolve_path
from flowrl.generation.generate import choose
from flowrl.generation.models import (
    EMBEDDED,
    Source,
    Words,
    check_lora,
    check_source,
    find_source,
    several,
)
from flowrl.generation.named_rewards import reward_specs
from flowrl.generation.rlg import Numbers, numbers
from flowrl.generation.sampling_options import SamplingOptions
from flowrl.pipelines.places.lora_places import folder_of_lora, lora_files
from flowrl.prompts.identity import keys_of
from flowrl.prompts.loading import Prompt, load_prompts
from flowrl.rewards import REWARDS
from flowrl.rewards.base.specs import validate_reward_specs
from flowrl.samplers.guidance import network_rows
from flowrl.samplers.search import Pruning, pruning
from flowrl.training.model_files import MODEL

Kind = Literal["rlg", "best_of", "prune", "run"]
Role = Literal["target", "heldout"]

EMBEDDED_REWARDS = "target=geneval:official,heldout=attributes,target=geneval:graded"
EMBEDDED_SELECT = "geneval:graded"  # a verdict alone ties too often: search would take the first of many equal ones
StripRows = list[tuple[str, list[tuple["Setting", Path]]]]
"""One prompt per row: its text, and the image of every setting."""
SINGLE = Pruning(num_candidates=1)
SEARCH_STEPS = re.compile(r"(\d+)@(\d+(?:,\d+)*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One way to make an image."""

    kind: Kind
    """RLG alone, with best of N or pruning on top, or another run unchanged."""
    scale: float = 1.0
    """Scale of RLG; 1 is the tuned model."""
    plan: Pruning = SINGLE
    """Candidates and cuts; one candidate if there is no search."""
    run: str = ""

    @property
    def key(self) -> str:
        """Name of its files."""
        if self.kind == "run":
            return f"run_{self.run}"
        cuts = "".join(f"_{step + 1}-{kept}" for step, kept in self.plan.cuts)
        search = f"{self.kind}_{self.plan.num_candidates}{cuts}_" if self.kind != "rlg" else ""
        return f"{search}rlg_{self.scale:g}"

    def evaluations(self, num_steps: int, guidance: float, base_guidance: float) -> int:
        """Network evaluations per kept image. A guided model (scale not 1) takes 2 a step; RLG takes both models'."""
        rows = network_rows([self.scale], base_guidance_scale=base_guidance, rl_guidance_scale=guidance)
        return self.plan.evaluations(num_steps) * rows

    @property
    def label(self) -> str:
        """What the page calls it."""
        if self.kind == "run":
            return self.run
        if self.kind == "rlg":
            return {0.0: "base", 1.0: "tuned"}.get(self.scale, f"RLG {self.scale:g}")
        counts = [self.plan.num_candidates, *(kept for _, kept in self.plan.cuts)]
        what = f"best of {counts[0]}" if self.kind == "best_of" else " \u2192 ".join(map(str, counts))
        if self.kind == "prune":
            what = f"pruned {what} at {', '.join(str(step + 1) for step, _ in self.plan.cuts)}"
        return what if self.scale == 1 else f"{what}, {'base' if self.scale == 0 else f'RLG {self.scale:g}'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """A reward, or a sub-score of one, and its role."""

    role: Role
    reward: str
    part: str | None = None

    @property
    def name(self) -> str:
        """As it was written: NAME or NAME:PART."""
        return self.reward if self.part is None else f"{self.reward}:{self.part}"

    @property
    def column(self) -> str:
        """Where its values are kept: NAME or NAME/PART."""
        return self.reward if self.part is None else f"{self.reward}/{self.part}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepQuestion:
    """The whole question: settings in drawing order (scales, searches, other runs), the other runs by name, rewards by
    role, and the reward by which search chooses (None without a search)."""

    settings: tuple[Setting, ...]
    others: tuple[tuple[str, Path], ...]
    measures: tuple[Measure, ...]
    select: Measure | None
    specs: tuple[dict[str, Any], ...]


def ask(
    *,
    rlg: Numbers,
    best_of: Numbers | None,
    prune: str | Sequence[str],
    keep: float,
    select: str | None,
    search_rlg: Numbers,
    also: Words,
    rewards: str | None,
    options: Mapping[str, object] | Sequence[str],
    samples: int,
    num_prompts: int,
    embedded: bool,
    num_steps: int,
) -> SweepQuestion:
    """Reads scales, searches, other runs and rewards, as `flowrl.comparing.sweep.sweep.sweep` takes them. An `embedded`
    base has rewards by default; pruning must fit into `num_steps`."""
    scales = _rising(rlg, "`rlg`", "0,0.5,1,1.5,2,3")
    if not 0 < keep < 1:
        raise ValueError(f"`keep` is the share that a pruning keeps, between 0 and 1, got {keep:g}: 0.5 halves")
    for name, value, why in (
        ("samples", samples, "diversity compares images of one prompt"),
        ("num_prompts", num_prompts, "intervals are over them"),
    ):
        if value < 2:
            raise ValueError(f"`{name}` must be at least 2, got {value}: {why}.")
    searches = _searches(best_of, several(prune), keep, num_steps, search_rlg)
    others = _others(list(map(str, several(also))))
    measures = parse_measures(rewards, embedded=embedded)
    if select is None and embedded and rewards is None:
        select = EMBEDDED_SELECT
    by = _criterion(measures, select) if searches else None
    wanted = list(dict.fromkeys(measure.reward for measure in (*measures, by) if measure is not None))
    texts = [f"{key}={value}" for key, value in options.items()] if isinstance(options, Mapping) else list(options)
    for text in texts:
        if text.partition("=")[0].partition(".")[0] not in wanted:
            raise ValueError(f"`options` {text}: begin with the reward that it is of, such as {wanted[0]}.KEY=VALUE.")
    specs = reward_specs(",".join(wanted), texts)
    validate_reward_specs(specs)
    settings = [Setting(kind="rlg", scale=scale) for scale in scales]
    settings += [*searches, *(Setting(kind="run", run=name) for name, _ in others)]
    return SweepQuestion(
        settings=tuple(dict.fromkeys(settings)), others=others, measures=measures, select=by, specs=tuple(specs)
    )


def check_cache(settings: Sequence[Setting], threshold: float) -> None:
    """Refuses settings that First-Block Cache, above 0, cannot draw: it keeps blocks of one network and one batch."""
    for one in settings if threshold > 0 else ():
        if one.kind == "prune" or one.scale not in (0, 1):
            why = "drops images on the way" if one.kind == "prune" else "mixes networks"
            raise ValueError(
                f"`first_block_cache` keeps the blocks of one network and one batch, and {one.label!r} {why}: leave it "
                "out, or `prune`, and give scales 0 and 1 alone"
            )


def _rising(given: Numbers, option: str, example: str) -> tuple[float, ...]:
    """Numbers in ascending order, each once."""
    return tuple(sorted({value + 0.0 for value in numbers(given, option, example)}))  # + 0.0: -0 is 0


def _searches(
    best_of: Numbers | None, prune: Sequence[str], keep: float, num_steps: int, search_rlg: Numbers
) -> list[Setting]:
    """Best of N and prunings, at each scale of the searches."""
    plans: list[tuple[Kind, Pruning]] = []
    if best_of is not None and not (isinstance(best_of, str) and not best_of.strip()):
        counts = _rising(best_of, "`best_of`", "1,2,4,8")
        if any(value < 1 or not value.is_integer() for value in counts):
            raise ValueError(f"`best_of` takes whole numbers from 1 on, such as 1,2,4,8, got {best_of!r}.")
        plans += [("best_of", Pruning(num_candidates=int(value))) for value in counts]
    plans += [("prune", _pruning(text, keep, num_steps)) for text in prune]
    scales = _rising(search_rlg, "`search_rlg`", "1") if plans else ()
    return [Setting(kind=kind, scale=scale, plan=plan) for scale in scales for kind, plan in plans]


def _criterion(measures: Sequence[Measure], select: str | None) -> Measure:
    """The reward by which search chooses: the named one, or the first target if none is named."""
    if select is not None:
        return _measure(select.strip(), "target", "`select`")
    return next(measure for measure in measures if measure.role == "target")


def _pruning(text: str, keep: float, num_steps: int) -> Pruning:
    match = SEARCH_STEPS.fullmatch(text.replace(" ", ""))
    if match is None:
        raise ValueError(f"`prune` takes N@STEPS, 8@3,6 for 8 images pruned after steps 3 and 6, got {text!r}.")
    after = [int(step) for step in match[2].split(",")]
    if after != sorted(set(after)) or not 1 <= after[0] <= after[-1] < num_steps:
        raise ValueError(
            f"`prune` {text}: steps rise from 1 to at most {num_steps - 1}, the last before the end of {num_steps}."
        )
    try:
        return pruning(int(match[1]), [step - 1 for step in after], keep)
    except ValueError as error:
        raise ValueError(f"`prune` {text}: {error}") from error


def _others(given: Sequence[str]) -> tuple[tuple[str, Path], ...]:
    """Names of other runs: those of their folders, with the parent folder if two are equal."""
    folders = [Path(text) for text in given]
    names = [folder.resolve().name for folder in folders]
    named = []
    for folder, name in zip(folders, names, strict=True):
        full = folder.resolve()
        unique = name if names.count(name) == 1 and name != "lora" else f"{full.parent.name}-{name}"
        named.append((re.sub(r"[^\w.+-]", "_", unique), folder))
    if len({name for name, _ in named}) < len(named):
        raise ValueError(f"`also` names one run twice, or two of one name: {', '.join(given)}.")
    return tuple(named)


def parse_measures(text: str | None, *, embedded: bool) -> tuple[Measure, ...]:
    """Parses rewards by role, such as "target=geneval:official,heldout=hps"; None takes the embedded model's. Raises
    ValueError: no list although the model has no default, no target, an unknown role or reward, or one twice."""
    if text is None:
        if not embedded:
            raise ValueError(
                "`rewards` is missing: name what was trained on and what was not, such as "
                "`rewards` target=pick_score,heldout=aesthetic; only the embedded model has rewards by default."
            )
        text = EMBEDDED_REWARDS
    measures = []
    for entry in text.split(","):
        role, equals, name = (part.strip() for part in entry.partition("="))
        role = role.replace("held-out", "heldout")
        if not equals or role not in ("target", "heldout"):
            raise ValueError(f"`rewards`: write target=NAME or heldout=NAME, got {entry.strip()!r}.")
        measures.append(_measure(name, "target" if role == "target" else "heldout", "`rewards`"))
    names = [measure.name for measure in measures]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"`rewards` names {twice} twice: a reward is either a target or held out.")
    if all(measure.role != "target" for measure in measures):
        raise ValueError("`rewards` needs a target, the reward that was trained on: target=NAME.")
    return tuple(measures)


def _measure(text: str, role: Role, option: str) -> Measure:
    name, colon, part = text.partition(":")
    if name not in REWARDS:
        raise ValueError(f"{option}: {unknown_name('reward', name, REWARDS)}")
    if colon and not part:
        raise ValueError(f"{option}: {text!r} names no sub-score behind the colon.")
    return Measure(role=role, reward=name, part=part or None)


def trained_on(rewards: Sequence[Mapping[str, Any]], measure: Measure) -> bool:
    """Whether a run was trained on a measure; for GenEval, on the kind of credit that the measure names."""
    entries = [entry for entry in rewards if entry.get("name") == measure.reward and entry.get("weight", 1.0)]
    credits = {(entry.get("options") or {}).get("credit", "graded") for entry in entries}
    return bool(entries) and (measure.reward != "geneval" or measure.part is None or measure.part in credits)


EMBEDDED_PROMPTS = "asset:prompts/world_heldout.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPlan:
    """A requested sweep: `source` is base and LoRA, `config` is None if only a LoRA was given, `name` is the name on
    the page, `features` are compared for diversity besides pixels, `samples` is the number of images per prompt."""

    question: SweepQuestion
    source: Source
    config: TrainConfig | None
    name: str
    base_guidance: float
    features: str
    prompts: tuple[Prompt, ...]
    samples: int
    seed: int
    batch_size: int
    device: torch.device
    folder: Path

    @property
    def loras(self) -> dict[str, Path]:
        """LoRA folders: that of the swept model under "", those of other runs under their names."""
        assert self.source.lora is not None
        return {"": self.source.lora, **{name: lora_of(folder) for name, folder in self.question.others}}

    @property
    def rows(self) -> dict[str, Prompt]:
        """The prompts by their keys in the journals."""
        return dict(zip(keys_of(self.prompts), self.prompts, strict=True))

    def evaluations(self, setting: Setting) -> int:
        """Network evaluations for each image that is kept."""
        return setting.evaluations(self.source.num_steps, self.source.guidance_scale, self.base_guidance)


def config_of(folder: Path) -> TrainConfig | None:
    """The configuration of a run folder, or of the run that a LoRA folder belongs to; None for any other LoRA."""
    lora_of(folder)
    files = [path / "config.yaml" for path in (folder, folder.resolve().parent)]
    return next((load_config(file) for file in files if file.is_file()), None)


def tuned_source(folder: Path, base: str | None, sampling: SamplingOptions, config: TrainConfig | None) -> Source:
    """The base model with the LoRA; a given base and given sampling options win. Raises ValueError: the LoRA does not
    name its model, or the model is missing or makes videos."""
    lora = lora_of(folder)
    if config is None and base is not None:
        source = find_source(base, lora=lora, sampling=sampling)
    else:
        try:
            source = find_source(str(folder), sampling=sampling)
        except ValueError as error:
            if config is not None or "LoRA" not in str(error):
                raise
            raise ValueError(
                f"{lora} is a LoRA that does not name its base model: give `base` MODEL, such as `base` {EMBEDDED}."
            ) from error
        source = replace(source, model=base or source.model, lora=lora)
    check_source(source, judging="flowrl sweep")
    return source


def lora_of(folder: Path) -> Path:
    """The LoRA of a run folder, or the folder or file itself. Raises ValueError: there is none."""
    if (folder / MODEL / "model_index.json").is_file():
        raise ValueError(
            f"the run {folder} trained all weights, and 'flowrl sweep' guides by LoRAs beside one base: give a run "
            "with policy.train=lora, or compare the run's images by 'flowrl eval'."
        )
    lora_files(folder)
    return folder_of_lora(folder)


def check_other(name: str, folder: Path, source: Source) -> None:
    """Refuses another run that a sweep cannot draw with its own. Raises ValueError: its base or LoRA does not fit."""
    config = config_of(folder)
    if config is not None and at_revision(config.pipeline.model, config.pipeline.revision) != source.model:
        raise ValueError(
            f"`also` {folder}: {name} was trained on {config.pipeline.model}, this sweep is of {source.model}."
        )
    check_lora(lora_of(folder), source)


def spread_prompts(
    given: str | Path | None, number: int, config: TrainConfig | None, *, negative: str, embedded: bool
) -> tuple[Prompt, ...]:
    """Prompts spread evenly over a file, else the run's or the world's. Raises ValueError: none, or too few."""
    own = config.prompts.eval if config is not None else None
    name = given or own or (EMBEDDED_PROMPTS if embedded else None)
    if name is None:
        raise ValueError("which prompts? No run names any for evaluation: give `prompts` FILE (.txt or .jsonl).")
    chosen = tuple(choose(load_prompts(str(name), negative, resolve=resolve_path), number))
    if len(chosen) < 2:
        raise ValueError(f"{name} holds {len(chosen)} prompt: intervals are over prompts, give at least 2.")
    return chosen
