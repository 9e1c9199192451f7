"""All settings of a run: frozen dataclasses, one strict loader, and the geometry that follows.

A configuration is a YAML file plus ``key=value`` overrides. Nothing is repaired: two settings that contradict each
other are refused with the numbers and with what to change. Derived quantities are properties, never written back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from flowrl.config.base import SETTINGS, find_config, read_with_base
from flowrl.config.bounds import IMAGES, check_most
from flowrl.config.building import build
from flowrl.config.foreign import foreign_words
from flowrl.config.locations import at_revision, is_path
from flowrl.config.methods import (
    BudgetConfig,
    CreditConfig,
    CurriculumConfig,
    DmdConfig,
    ObjectiveConfig,
    RewardMapConfig,
    ShapingConfig,
    SlotsConfig,
    TimesConfig,
)
from flowrl.config.overrides import Settings, apply_settings
from flowrl.config.prompt_sets import advice_on
from flowrl.config.rewards import RewardConfig, check_rewards
from flowrl.config.sections import (
    EvalConfig,
    LoggingConfig,
    OptimConfig,
    ParallelConfig,
    PipelineConfig,
    PolicyConfig,
    Precision,
    PromptsConfig,
    SamplerConfig,
    WorkersConfig,
    at_least,
    positive,
    share,
)
from flowrl.config.spelling import closest
from flowrl.config.strict_yaml import ConfigError, ConfigSource, all_at_once, dotted_keys, dump, parse_yaml, refuse

__all__ = ["ConfigError", "PromptsConfig", "TrainConfig", "find_config", "load_config", "resolve_path", "to_yaml"]

BATCH_LIMIT = 24
"""Upper bound of batch sizes that you do not set, in images."""
REMEDY = "'base: tiny_recommended' takes over what a shipped one says; 'flowrl init --from FILE' reads other toolkits"
"""Remedy for a file without required keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """How one process splits its images of an iteration."""

    images_per_process: int
    rollout_batch_size: int
    micro_batch_size: int
    micro_batches_per_update: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """One training run."""

    recipe: Literal["grpo", "forward", "preference", "backprop", "visited"] = "grpo"
    """Algorithm: policy gradient on trajectories, matching on noised images, pairs, gradients of the reward, or what
    teachers answer at visited states."""
    out: str | None = None
    """Run folder; null takes the first free ``runs/<config>-<n>``."""
    resume: str | None = None
    """Run folder to continue."""
    resume_changed: bool = False
    """Continue even if prompts, rewards, model or settings have changed; the manifest records the changes."""
    seed: int = 0
    """Seed: every random number is a function of this and of counters."""
    num_iterations: int
    """Number of iterations: each is a rollout, its rewards, and ``updates_per_rollout`` optimizer updates."""
    prompts_per_step: int
    """Prompts per iteration, over all processes."""
    group_size: int
    """Images per prompt; rewards are compared within this group. At least 2, but 1 with ``policy.teachers``."""
    updates_per_rollout: int = 1
    """Optimizer updates per iteration; the images are split evenly between them."""
    micro_batch_size: int | None = None
    """Upper bound of images per backward pass, lowered until it divides an update's images on a process. Null is 24."""
    rollout_batch_size: int | None = None
    """Upper bound of images sampled at once, lowered until it divides a process's images. Null is 24."""
    keep_graphs: bool | Literal["gradients"] = False
    """Keep the graphs of the rollout's evaluations, so that the update evaluates nothing again: the same numbers bit
    for bit in about two thirds of the time, but memory for every trained step of every image of a process at once. For
    small models and one update per iteration. ``gradients`` walks each graph back as it is drawn, and keeps the LoRA's
    gradient of every image on the host instead (of each step, if steps are credited separately): equal to rounding."""
    clip_range: float | tuple[float, float] = 1e-4
    """PPO clip range of the ratio: one number, or a pair [low, high] for 1 - low and 1 + high."""
    adv_std: Literal["group", "global", "none"] = "group"
    """Divisor of the rewards: the group's standard deviation, that of all images, or nothing."""
    adv_baseline: Literal["mean", "leave_one_out"] = "mean"
    """Baseline to subtract: the mean of the group, or of its other images."""
    adv_clip_range: float = 5.0
    """Advantages are clipped to plus or minus this."""
    adv_eps: float = 1e-4
    """Added to the standard deviation."""
    adv_correction: int = 0
    """0: population standard deviation; 1: sample standard deviation."""
    adv_min_std: float = 0.0
    """Groups whose rewards have a smaller standard deviation count as equal, because a tiny ``adv_eps`` would blow up
    differences by rounding. 1e-6 is BranchGRPO's."""
    adv_virtual_max: float | None = None
    """Highest possible reward; it joins every group as one more member (NGRPO), which pushes equal failures away."""
    reward_aggregation: Literal["sum", "each", "gdpo", "log_tame", "geometric", "harmonic"] = "sum"
    """How to combine rewards: sum by weight, then normalise; normalise each, then sum; the same, whitened (GDPO); sum
    after taming those that vary most (PaCo); or a weighted geometric or harmonic mean."""
    reward_partial: Literal["drop", "renormalise"] = "drop"
    """If an image fails in one of several rewards: leave it out, or let the other weights make up for it."""
    reward_dtype: Precision = "float32"
    """Arithmetic of frozen networks in rewards, like ``pipeline.vae_dtype``: scores then differ in the third digit.
    Judges with an option ``dtype`` use that; rewards that learn stay in float32."""
    max_invalid_ratio: float = 0.1
    """Share of failed images at which the run stops: those of the last 10 iterations over 10 iterations' images."""
    ratio: Literal["step", "sequence", "mixed"] = "step"
    """Importance ratio of each step, of the whole trajectory (GSPO), or of both (DHPO)."""
    loss_aggregation: Literal["rows", "samples", "sum_of_samples", "balanced"] = "rows"
    """Losses are averaged over all trained transitions, samples first, summed samples (DCPO), or balanced by sign."""
    loss_denominator: Literal["live", "all"] = "live"
    """What that average counts: transitions of groups whose rewards differ (Flow-GRPO), or all, those of equal rewards
    as 0 (DanceGRPO, MixGRPO, BranchGRPO, G2RPO). For objective rft: a prompt's best images, or all of them."""
    best_of: int | None = None
    """Train only this many images of each group, half of them the best and half the worst; null trains all."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference policy; 0 skips its network call."""
    kl_type: Literal["exact", "no_dt", "velocity"] = "exact"
    """KL of the two transitions, the published variant without the step length in the variance, or the mean squared
    distance of the two velocities, which weighs all steps alike (UniGRPO)."""
    kl_reference: Literal["base", "ema"] | int = "base"
    """Reference of the KL: the network with the LoRA off (base, also after ``policy.init_lora``), the running average,
    or a copy of the policy that is renewed at every iteration that this number divides. A number beyond
    ``num_iterations`` stays with what the run started from, the LoRA of ``policy.init_lora`` included."""
    log_ratio: Literal["mean", "sum"] = "mean"
    """Log-ratio per latent dimension, as published clip ranges assume, or summed."""
    same_latent: bool | int = False
    """Start all images of a group from the same noise, or so many at a time."""
    eval_every: int = 0
    """Iterations between evaluations; 0 switches evaluation off, before and after training too."""
    checkpoint_every: int = 10
    """Iterations between checkpoints."""
    keep_checkpoints: int = 2
    """Number of newest checkpoints to keep; one more while the weights of the newest have drawn no image yet."""
    threads: int | None = None
    """CPU threads; null leaves the number to torch."""
    deterministic: bool = False
    """Use only kernels that give the same bits each time. On a CPU they do so by default. On a GPU gradients of
    attention and sums are otherwise added in any order, so two equal runs drift apart by rounding. Slower; an
    operation without such a form ends the run and is named."""
    progress: bool = True
    """Show progress bars on a terminal."""
    pipeline: PipelineConfig
    """The generator."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """What is trained."""
    sampler: SamplerConfig
    """How to draw rollouts."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer."""
    prompts: PromptsConfig
    """Prompt files."""
    rewards: tuple[RewardConfig, ...]
    """Rewards, summed by weight. With ``policy.teachers`` they are logged and not trained on, and may be empty."""
    credit: CreditConfig = field(default_factory=CreditConfig)
    """Credit assignment."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    """Loss."""
    dmd: DmdConfig = field(default_factory=DmdConfig)
    """Distribution matching."""
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    """Change of the advantages."""
    reward_map: RewardMapConfig = field(default_factory=RewardMapConfig)
    """Change of the rewards."""
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    """Choice of prompts."""
    times: TimesConfig = field(default_factory=TimesConfig)
    """Training noise levels."""
    slots: SlotsConfig = field(default_factory=SlotsConfig)
    """Old policy."""
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    """Spending limit."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Several processes, one model."""
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    """Drawing and scoring elsewhere."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """Logging."""

    def __post_init__(self) -> None:
        # Alone, for what is said of a number beyond all bounds may take forever to find.
        check_most(lambda key: attrgetter(key)(self))
        best, (low, high), same = self.best_of, self.clip_bounds, self.same_latent
        all_at_once(
            lambda: at_least(1, self, "num_iterations prompts_per_step updates_per_rollout checkpoint_every"),
            lambda: at_least(1, self, "keep_checkpoints micro_batch_size rollout_batch_size threads kl_reference"),
            lambda: at_least(0, self, "seed eval_every kl_coef adv_eps adv_min_std"),
            lambda: positive(self, "adv_clip_range"),
            lambda: share("max_invalid_ratio", self.max_invalid_ratio),
            lambda: refuse(
                (
                    self.adv_correction not in (0, 1),
                    f"adv_correction is 0 (population) or 1 (sample standard deviation), got {self.adv_correction}",
                ),
                (
                    self.group_size < (1 if self.policy.teachers else 2),
                    f"group_size must be at least 2, got {self.group_size}: images are compared within a prompt",
                ),
                (
                    best is not None and (best % 2 or not 2 <= best <= self.group_size),
                    f"best_of ({best}) must be even, at least 2 and at most group_size ({self.group_size}): half of it "
                    "are the best images of a group, half the worst",
                ),
                (
                    not isinstance(same, bool) and (same < 2 or self.group_size % same > 0),
                    f"same_latent is true, false or a divisor above 1 of group_size ({self.group_size}), got {same}",
                ),
                (
                    self.num_images > IMAGES,
                    f"prompts_per_step ({self.prompts_per_step}) * group_size ({self.group_size}) = "
                    f"{self.num_images:,} images of one iteration are more than {IMAGES:,}: lower one of the two",
                ),
                (
                    low <= 0 or high <= 0 or low >= 1,
                    f"clip_range must lie above 0, its lower part below 1, got [{low:g}, {high:g}]; published: 1e-4",
                ),
                (
                    self.kl_reference == "ema" and self.policy.ema_decay == 0,
                    "kl_reference is ema, but there is no average: set policy.ema_decay, 0.99 say",
                ),
                (
                    self.kl_reference != "base" and self.kl_coef == 0,
                    f"kl_reference is {self.kl_reference}, but kl_coef is 0, so no KL is taken to it: set kl_coef "
                    "above 0, or remove kl_reference",
                ),
            ),
            self._check_workers,
            lambda: check_rewards(self.rewards, needed=not self.policy.teachers),
            lambda: refuse(
                (
                    (self.eval_every > 0 or self.budget.evals > 0) and self.prompts.eval is None,
                    f"eval_every is {self.eval_every} and budget.evals {self.budget.evals}, but prompts.eval is not "
                    "set: name a prompt file, or set both to 0",
                )
            ),
            lambda: self.num_images > 0 and self.updates_per_rollout > 0 and self.resolve_batch(1),
        )

    def _check_workers(self) -> None:
        """Refuses settings of workers if there are none."""
        workers, default = self.workers, WorkersConfig()
        refuse(
            (
                workers.staleness and not workers.rollouts,
                f"workers.staleness is {workers.staleness}, but workers.rollouts is 0: name a number of workers that "
                "draw",
            ),
            (
                workers.engine is not None and not workers.rollouts,
                f"workers.engine is {workers.engine}, but workers.rollouts is 0: name a number of workers that draw",
            ),
            (
                workers.engine is not None and workers.weight_cap > 0,
                "workers.engine returns states without densities, and an importance weight compares with those that "
                "drew: set workers.importance_cap=0",
            ),
            (
                workers.engine is not None and self.sampler.solver != "euler",
                f"workers.engine steps without noise by Euler's rule, and sampler.solver is {self.sampler.solver}: set "
                "sampler.solver=euler",
            ),
            (
                workers.importance_cap is not None and not workers.staleness,
                f"workers.importance_cap is {workers.importance_cap}, but workers.staleness is 0, so that no image is "
                "drawn with older weights: remove workers.importance_cap",
            ),
            *(
                (
                    (given := getattr(workers, key)) != getattr(default, key) and not getattr(workers, number),
                    f"workers.{key} is {given:g}, but workers.{number} is 0: name a number of workers that {what}, or "
                    f"remove workers.{key}",
                )
                for key, number, what in (
                    ("shard", "rollouts", "draw"),
                    ("rollout_gpus", "rollouts", "draw"),
                    ("reward_gpus", "rewards", "score"),
                )
            ),
            (
                workers.shard > 1 and workers.rollout_gpus < 1,
                f"workers.shard is {workers.shard} and workers.rollout_gpus {workers.rollout_gpus:g}, but processes "
                "that exchange weights by NCCL each need a GPU: set workers.rollout_gpus=1, or workers.shard=1",
            ),
            (
                workers.address is not None and not (workers.rollouts or workers.rewards),
                f"workers.address is {workers.address}, but nobody works there: name a number of workers that draw in "
                "workers.rollouts, or that score in workers.rewards, or remove workers.address",
            ),
        )

    @property
    def num_images(self) -> int:
        """Images of one iteration, over all processes."""
        return self.prompts_per_step * self.group_size

    @property
    def images_per_start(self) -> int:
        """Images of a group, in their order, that start from the same noise."""
        return self.group_size if self.same_latent is True else self.same_latent or 1

    @property
    def routes(self) -> list[tuple[str, ...]]:
        """The parts of a state that each reward of training speaks of; none for all."""
        return [reward.routes for reward in self.rewards if reward.weight]

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """The clip range as a pair (low, high)."""
        return self.clip_range if isinstance(self.clip_range, tuple) else (self.clip_range, self.clip_range)

    def resolve_batch(self, num_processes: int) -> Geometry:
        """Split the images of one iteration over processes, rollout batches, updates and micro batches.

        Batch sizes are upper bounds: the largest that divides is taken. Processes that share the tokens of an image
        (``parallel.context``) count as one here.

        Raises ConfigError: the images do not divide by the processes, or by the updates.
        """
        images, updates = self.num_images, self.updates_per_rollout
        product = f"prompts_per_step ({self.prompts_per_step}) * group_size ({self.group_size}) = {images} images"
        own, left = divmod(images, num_processes)
        if left:
            raise ConfigError(
                f"{product} do not divide by {num_processes} processes: "
                f"set prompts_per_step to a multiple of {num_processes}"
            )
        each = f"{own} images per process" if num_processes > 1 else product
        if own % updates:
            raise ConfigError(f"{each} do not divide by updates_per_rollout ({updates}): use one of {divisors(own)}")
        rollout = largest_fitting(self.rollout_batch_size, own)
        micro = largest_fitting(self.micro_batch_size, own // updates)
        return Geometry(
            images_per_process=own,
            rollout_batch_size=rollout,
            micro_batch_size=micro,
            micro_batches_per_update=own // micro // updates,
        )


def load_config(path: str | Path | Mapping[str, Any], overrides: Settings = ()) -> TrainConfig:
    """Reads a YAML file and its base, replaces settings and checks everything.

    Args:
        path: the file, or settings without a file.
        overrides: ``a.b=value`` words with YAML values (later ones win), or values by key; list items by index,
            ``rewards.0.weight=2``.

    Raises ConfigError: a ValueError that names the file or the override, the key, and what to change.
    """
    data = read_with_base(path)
    origins = apply_settings(data, overrides)
    config: TrainConfig = build(
        TrainConfig,
        data,
        ConfigSource(
            file=SETTINGS if isinstance(path, Mapping) else str(path),
            overrides=origins,
            elsewhere=foreign_words,
            own_keys=dotted_keys(TrainConfig),
            remedy=REMEDY,
        ),
    )
    return config


def to_yaml(config: TrainConfig) -> str:
    """Write a configuration out in full, defaults included; ``load_config`` reads it back equal."""
    return dump(dataclasses.asdict(config))


def mapping_of(config: TrainConfig) -> dict[str, Any]:
    """The same as plain values, to change and to read again."""
    found: dict[str, Any] = parse_yaml(to_yaml(config), "settings")
    return found


def resolve_path(text: str, base: Path | None = None) -> Path:
    """Turn a path of a configuration into one that exists.

    Args:
        text: a path, or ``asset:NAME`` for a file or folder that ships with flowrl.
        base: folder of relative paths; the current one by default.

    Raises:
        ConfigError: nothing is there; the message says what was looked for.
    """
    if not text.startswith("asset:"):
        path = (Path.cwd() if base is None else base) / Path(text).expanduser()
        if not path.exists():
            advice = advice_on(text) or "give a path that exists, or asset:NAME for a bundled file"
            raise ConfigError(f"there is no '{text}': looked for {path}; {advice}")
        return path
    name = text.removeprefix("asset:")
    folder = Path(str(resources.files("flowrl") / "assets"))
    path = folder / name
    if not name or ".." in Path(name).parts or Path(name).is_absolute() or not path.exists():
        names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if not p.name.startswith(("_", ".")))
        near = closest(name, names)
        hint = (
            f"did you mean asset:{near}?"
            if near
            else f"there are {', '.join(n for n in names if '/' not in n) or 'none'}"
        )
        raise ConfigError(f"there is no asset '{name}' among the files that ship with flowrl: {hint}")
    return path


def option_path(text: str) -> Path:
    """The path in an option of a reward, whether it exists or not; the bundled file or folder for ``asset:NAME``."""
    return resolve_path(text) if text.startswith("asset:") else Path(text).expanduser()


def model_location(model: str) -> str:
    """What a family's `load` takes: the path of an asset or of a written path, else the text, a hub id."""
    return str(resolve_path(model)) if is_path(model) else model


def location_of(settings: PipelineConfig) -> str:
    """The location of a configuration's model, at its revision. Raises ValueError: a revision of a file or folder."""
    return at_revision(model_location(settings.model), settings.revision)


def is_here(text: str) -> bool:
    """Whether a path of the configuration exists; a dataset does if it is a folder."""
    if text.startswith("dataset:"):
        return Path(text.split(":")[1]).is_dir()
    try:
        return resolve_path(text).exists()
    except ValueError:
        return False


def largest_fitting(bound: int | None, images: int, multiple: int = 1) -> int:
    """The largest divisor of a number of images up to a bound (`BATCH_LIMIT` by default) that is a multiple of a given
    divisor; that divisor itself if the bound is below it."""
    most = max(BATCH_LIMIT if bound is None else bound, multiple)
    return multiple * divisors(images // multiple, most // multiple)[-1]


def divisors(number: int, most: int = BATCH_LIMIT) -> list[int]:
    """Divisors up to a number, ascending."""
    return [d for d in range(1, min(number, most) + 1) if number % d == 0]
