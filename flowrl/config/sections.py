"""The sections of a configuration, each a frozen dataclass that refuses values which cannot work.

Messages name keys in full (``sampler.noise_level``): each section has one place in
:class:`flowrl.config.train.TrainConfig`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from flowrl.config.bounds import GUIDANCE
from flowrl.config.rewards import RewardConfig
from flowrl.config.strict_yaml import ConfigError, all_at_once, refuse


def at_least(minimum: int, section: object, keys: str, prefix: str = "") -> None:
    """Refuse numbers below ``minimum`` among the named keys of a section; None and words pass."""
    values = {key: getattr(section, key) for key in keys.split()}
    low = {key: value for key, value in values.items() if isinstance(value, int | float) and value < minimum}
    refuse(*((True, f"{prefix}{key} must be at least {minimum}, got {value:g}") for key, value in low.items()))


def positive(section: object, keys: str, prefix: str = "") -> None:
    """Refuse zero and negative numbers among the named keys of a section; None and words pass."""
    values = {key: getattr(section, key) for key in keys.split()}
    low = {key: value for key, value in values.items() if isinstance(value, int | float) and value <= 0}
    refuse(*((True, f"{prefix}{key} must be above 0, got {value:g}") for key, value in low.items()))


def share(key: str, value: float | None, *, open_end: bool = False) -> None:
    """Refuse a number outside [0, 1], or [0, 1) with ``open_end``; None passes."""
    if value is not None and (not 0 <= value <= 1 or (open_end and value == 1)):
        raise ConfigError(f"{key} must lie in [0, 1{')' if open_end else ']'}, got {value:g}")


Precision = Literal["float32", "tf32", "bfloat16"]
"""Arithmetic of frozen networks; see `flowrl.runtime.precision`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """The generator that is trained."""

    name: str | None = None
    """Model family: the name of its file in `pipelines/`. Null reads it from the model: folder, asset, checkpoint."""
    model: str
    """A diffusers folder, a hub id, or ``asset:NAME`` for one that ships with flowrl (``asset:tiny-sd3``)."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; null takes its main branch. The manifest has the loaded commit."""
    variant: str | None = None
    """Which weights of a checkpoint, by the ending of their files: ``fp16``, ``bf16``. Null takes those with none."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Precision of the frozen weights and of the network's arithmetic."""
    height: int | None = None
    """Pixels; null takes the model's own size."""
    width: int | None = None
    """Pixels; null takes the model's own size."""
    num_frames: int | None = None
    """Frames of a video; null takes the family's own."""
    fps: float | None = None
    """Frames per second of a video; null takes the family's own."""
    max_sequence_length: int | None = None
    """Tokens of the (longest) text encoder; null takes the family's own, 128 for sd3."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    attention: str = "auto"
    """The attention kernel of this model only: auto, native (torch's own choice), one of torch's (cudnn,
    flash, efficient, math), float32 (torch's on float32 copies), xformers, flash_attn, flash_attn_varlen, flash_hub,
    flash_varlen_hub, flash_3_hub, flash_3_varlen_hub, flash_3_varlen or flash_4_hub. auto is float32 on a CPU in 16
    bits, cudnn on Hopper GPUs if there is no mask, otherwise native; the manifest says which it became."""
    vae_slice: int | None = None
    """Images or videos decoded at once; null takes the family's own, 8 for images and 1 for videos."""
    vae_dtype: Precision = "float32"
    """Arithmetic of the autoencoder: as torch is set up, with all products in TF32 (CUDA devices of compute capability
    8.0 or later), or in bfloat16 (for tiny-sd3 60 dB PSNR from float32, and no verdict of 96 changed; slow on CPUs)."""
    compile: Literal["none", "blocks"] = "none"
    """``blocks`` compiles the denoiser's repeated blocks in place: fewer kernels, after a minute or more of compiling
    at the start. Rollout and update stay equal bit for bit. Works on CUDA and CPU; on a CPU it gains little."""
    quantize: Literal["none", "int8", "fp8", "nf4", "int8_bnb"] = "none"
    """Form of the denoiser's frozen weights, in rollout and update alike: int8 or fp8, weight only
    (torchao), nf4 or LLM.int8 (bitsandbytes). Works on CUDA and CPUs. The LoRA over them stays float32."""
    offload: tuple[Literal["text_encoders", "vae", "rewards"], ...] = ()
    """Parts that rest in the host's memory while they are not used."""
    free_text_encoders: bool = False
    """Load the text encoders first, encode all prompts, then drop the encoders and load the denoiser."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    options: dict[str, Any] = field(default_factory=dict)
    """More options of the family, such as `vae_tiling` of video families."""

    def __post_init__(self) -> None:
        all_at_once(
            lambda: at_least(1, self, "height width num_frames max_sequence_length vae_slice", "pipeline."),
            lambda: positive(self, "fps", "pipeline."),
            lambda: refuse(
                (not self.model.strip(), "pipeline.model is empty text; give it a value"),
                *(
                    (
                        text is not None and (not text or text != "".join(text.split())),
                        f"pipeline.{key} must be a word without spaces, got '{text}'; null leaves it out",
                    )
                    for key, text in (("revision", self.revision), ("variant", self.variant))
                ),
                (
                    re.fullmatch(r"auto|cpu|cuda(:\d+)?|mps", self.device) is None,
                    f"pipeline.device must be auto, cpu, cuda, cuda:N or mps, got '{self.device}'",
                ),
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherConfig:
    """A network whose velocity the policy learns at the states that it visits itself (recipe visited)."""

    lora: str | None = None
    """Its LoRA: a file or folder, also one of another program, or a run folder; null is the model without a LoRA."""
    guidance_scale: float | None = None
    """Guidance of its velocity; null takes ``sampler.guidance_scale``, which is the policy's."""
    prompts: tuple[str, ...] = ()
    """The prompts that it teaches: those whose metadata have one of these values under ``policy.teacher_key``. A single
    teacher without any teaches all prompts."""

    def __post_init__(self) -> None:
        if self.guidance_scale is not None and not 0 <= self.guidance_scale <= GUIDANCE:
            raise ConfigError(f"guidance_scale must lie in [0, {GUIDANCE:g}], got {self.guidance_scale:g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConfig:
    """What is trained: a LoRA on the generator's denoiser or its weights themselves, and their running average."""

    train: Literal["lora", "full"] = "lora"
    """Train a LoRA, or (full) the weights themselves, all or those of ``target_modules``, with masters in float32."""
    lora_variant: Literal["lora", "rslora", "dora"] = "lora"
    """A plain LoRA, one scaled by the root of its rank (rsLoRA), or one with a trained magnitude (DoRA)."""
    lora_rank: int | None = None
    """Rank of every adapter matrix pair; null takes that of ``init_lora``, otherwise 32."""
    lora_alpha: int | None = None
    """Scale numerator; null takes that of ``init_lora``, otherwise twice the rank."""
    target_modules: tuple[str, ...] | None = None
    """Names of the layers that get an adapter; null takes those of ``init_lora``, otherwise the family's published
    list.    With ``train: full`` the layers whose weights are trained; null trains all of them."""
    init_lora: str | None = None
    """LoRA to start from: a file or folder, also one of another program, or a run folder."""
    ema_decay: float = 0.0
    """Decay of the running average of the adapter; 0 switches it off."""
    ema_every: int = 1
    """Optimizer updates between two averaging steps."""
    teachers: tuple[TeacherConfig, ...] = ()
    """What the policy learns from in recipe visited: the model at another guidance, or LoRAs on it."""
    teacher_key: str = "domain"
    """Key of the prompts' metadata whose value chooses a prompt's teacher, if teachers name ``prompts``."""

    def __post_init__(self) -> None:
        taught = [value for teacher in self.teachers for value in teacher.prompts]
        all_at_once(
            lambda: at_least(1, self, "lora_rank lora_alpha ema_every", "policy."),
            lambda: share("policy.ema_decay", self.ema_decay, open_end=True),
            lambda: refuse(
                (
                    not all(self.target_modules or ()),
                    "policy.target_modules holds an empty name; name layers, or write null for the family's own list",
                ),
                (
                    self.target_modules == (),
                    "policy.target_modules is empty: nothing would be trained; name layers, or write null",
                ),
                (
                    len(self.teachers) > 1 and not all(teacher.prompts for teacher in self.teachers),
                    f"policy.teachers lists {len(self.teachers)}, and one of them names no prompts: give each the "
                    "values of policy.teacher_key that it teaches",
                ),
                (
                    len(set(taught)) < len(taught),
                    f"policy.teachers name the prompts {', '.join(sorted({v for v in taught if taught.count(v) > 1}))} "
                    "twice: a prompt has one teacher, so leave them to one",
                ),
            ),
        )

    @property
    def rank(self) -> int:
        """The rank of a LoRA that starts from nothing: ``lora_rank``, or 32."""
        return 32 if self.lora_rank is None else self.lora_rank

    @property
    def alpha(self) -> int:
        """The scale numerator of a LoRA that starts from nothing: ``lora_alpha``, or twice the rank."""
        return 2 * self.rank if self.lora_alpha is None else self.lora_alpha


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationConfig:
    """Noise of each step, found before anything is trained, as DenseGRPO does (credit methods with values)."""

    iterations: int = 0
    """Number of first iterations that only sample, score and move the noise levels; 0 leaves the levels unchanged."""
    tolerance: float = 2.0
    """A level rises if fewer samples than this gained more often than lost (or the reverse), and falls otherwise."""
    step: float = 0.01
    """Amount by which a level moves."""

    def __post_init__(self) -> None:
        at_least(0, self, "iterations", "sampler.calibration.")
        positive(self, "tolerance step", "sampler.calibration.")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerConfig:
    """How a rollout draws images, and which steps are stochastic and so trained."""

    kernel: str
    """Transition rule of one denoising step, an entry of ``KERNELS`` (`flowrl.samplers.kernels`)."""
    log_prob: Literal["gaussian", "published"] = "gaussian"
    """What importance ratios compare: the density, or what the released code of the kernel ``cps`` uses for it."""
    noise_level: float | None = None
    """Strength of the noise; its meaning depends on the kernel. Null takes the kernel's default."""
    num_steps: int = 10
    """Denoising steps of a rollout."""
    guidance_scale: float = 1.0
    """Classifier-free guidance; 1 means none and costs one network call per step instead of two."""
    train_negative: bool | Literal["recompute"] = True
    """Whether to train the half of guidance with the negative prompt. true is the whole velocity's gradient, as in
    Flow-GRPO's later code. false is a separate call without gradient, which halves activations and the backward pass,
    and is the gradient of Flow-GRPO's release of July 2025. ``recompute`` has the gradient of true with the activations
    of false: it computes that half again in the backward pass. false and recompute are refused if guidance has no such
    half: at scale 1, and in distilled models."""
    grid: Literal["diffusers", "linspace", "unipc_flow"] = "diffusers"
    """Noise levels to visit: spaced as by diffusers' scheduler, evenly before the shift, or as Wan 2.1's UniPC."""
    shift: float | None = None
    """Shift of the noise levels towards noise; null takes the model's own, which may depend on the resolution."""
    sde_window_size: int = 0
    """Consecutive stochastic steps, drawn in each iteration; 0 takes all steps of ``sde_window_range``."""
    sde_window_range: tuple[int, int] | None = None
    """Half-open range [low, high) of the steps that may be stochastic; null means [0, num_steps - 1]."""
    sde_window: Literal["uniform", "progressive", "random", "decay", "exp_decay", "frozen"] = "uniform"
    """Position of the window: drawn in each iteration (uniform), or by MixGRPO's rules."""
    sde_window_by: Literal["iteration", "prompt"] = "iteration"
    """One window for an iteration, or one for each of its prompts, shared by all images of the prompt (Flash-GRPO)."""
    sde_window_interval: int = 25
    """Iterations before a MixGRPO window moves."""
    sde_window_stride: int = 1
    """Steps by which it moves."""
    published_window: bool = False
    """Reproduce MixGRPO's published windows, which never reach the last but one step and run empty at the end."""
    flash_tail: float | None = None
    """Share of the steps after the window to keep (MixGRPO-Flash); null keeps all."""
    solver: Literal["euler", "dpm2"] = "euler"
    """Solver of the deterministic steps after the last stochastic one."""
    trained_fraction: float = 1.0
    """Share of the stochastic steps to train."""
    trained_steps: Literal["leading", "random"] = "leading"
    """Which steps of that share: the first ones (Flow-GRPO), or drawn for each image (DanceGRPO)."""
    noise_levels: tuple[float, ...] | None = None
    """Noise level of each step instead of ``noise_level``, as found by a calibration."""
    first_block_cache: float = 0.0
    """Leave out all blocks but the first at steps where its output has changed by less than this share (diffusers'
    First-Block Cache); 0 is off. Images then depend on those drawn at once. Evaluations never use it."""
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    """How to find each step's noise by how often it gains."""

    def __post_init__(self) -> None:
        moves, levels, (low, high) = self.sde_window != "uniform", self.noise_levels, self.stochastic_range
        all_at_once(
            lambda: at_least(1, self, "num_steps sde_window_interval", "sampler."),
            lambda: at_least(0, self, "sde_window_size sde_window_stride guidance_scale", "sampler."),
            lambda: positive(self, "shift", "sampler."),
            lambda: share("sampler.trained_fraction", self.trained_fraction),
            lambda: share("sampler.flash_tail", self.flash_tail),
            lambda: share("sampler.first_block_cache", self.first_block_cache),
            lambda: refuse(
                (
                    moves and not self.sde_window_size,
                    f"sampler.sde_window {self.sde_window} moves a window, but sde_window_size is 0: give it a size, 4 "
                    "is MixGRPO's",
                ),
                (
                    moves and self.sde_window_range is not None,
                    f"sampler.sde_window {self.sde_window} moves over all steps but the last, so sde_window_range has "
                    "no place beside it: remove one of them",
                ),
                (
                    self.sde_window_by == "prompt"
                    and (moves or self.flash_tail is not None or self.trained_fraction < 1),
                    "sampler.sde_window_by prompt draws a window for each prompt and trains all of it, on one grid; "
                    f"sde_window is {self.sde_window}, flash_tail {self.flash_tail} and trained_fraction "
                    f"{self.trained_fraction:g}: set them to uniform, null and 1",
                ),
                (
                    self.sde_window_by == "prompt" and not 0 < self.sde_window_size < high - low,
                    f"sampler.sde_window_by is prompt, but windows of sde_window_size {self.sde_window_size} all begin "
                    f"at the same of the steps {low} .. {high - 1}: give a size from 1 to {high - low - 1}",
                ),
                (
                    levels is not None
                    and (len(levels) != self.num_steps or min(levels) <= 0 or self.noise_level is not None),
                    f"sampler.noise_levels holds one number above 0 for each of the {self.num_steps} steps, in the "
                    f"place of noise_level, got {list(levels or ())} and noise_level {self.noise_level}: change one of "
                    "them",
                ),
                (
                    self.calibration.iterations and levels is None and not self.noise_level,
                    "sampler.calibration starts at a noise level: give sampler.noise_level above 0, or "
                    "sampler.noise_levels",
                ),
            ),
        )

    @property
    def stochastic_range(self) -> tuple[int, int]:
        """Half-open range of the steps that may be stochastic: ``sde_window_range``, or all but the last step."""
        return (0, self.num_steps - 1) if self.sde_window_range is None else self.sde_window_range


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """AdamW, of torch or of bitsandbytes."""

    name: Literal["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"] = "adamw"
    """torch's, or one of bitsandbytes: moments in 8 bits, or in pages that move to the host if memory is short."""
    lr: float = 3e-4
    """Learning rate; the highest one if a schedule changes it."""
    schedule: Literal["constant", "linear", "cosine", "polynomial", "inverse_sqrt"] = "constant"
    """How the rate falls until the last update of ``num_iterations``; formulas: `flowrl.training.optimizers`."""
    warmup: int = 0
    """Number of first updates over which the rate rises from 0; the very first has rate 0."""
    offload: bool = False
    """Keep the optimizer's moments, and the masters of ``policy.train: full``, in the host's memory."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the two moments."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 1e-4
    """Decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""

    def __post_init__(self) -> None:
        all_at_once(
            lambda: at_least(0, self, "lr weight_decay warmup", "optim."),
            lambda: positive(self, "eps max_grad_norm", "optim."),
            *(partial(share, "optim.betas", beta, open_end=True) for beta in self.betas),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptsConfig:
    """Prompts, each a ``.txt``, ``.jsonl`` or ``.csv`` file (a path or ``asset:NAME``) or a dataset.

    A dataset is written ``dataset:ID_OR_FOLDER[:SPLIT]`` and needs the extra ``data``.
    """

    train: str
    """Prompts to train on."""
    eval: str | None = None
    """Prompts to evaluate on."""
    negative: str = ""
    """Negative prompt for rows without their own (``negative_prompt``)."""
    cache: str | None = None
    """Folder that keeps prompts' embeddings for other processes and later runs; null keeps them only in memory."""

    def __post_init__(self) -> None:
        refuse(
            *(
                (
                    place is not None
                    and re.fullmatch(r"dataset:.*[^:].*|.*\.(txt|jsonl|csv)", place, re.DOTALL) is None,
                    f"prompts.{key} must be a .txt, .jsonl or .csv file or dataset:ID_OR_FOLDER[:SPLIT], got '{place}'",
                )
                for key, place in (("train", self.train), ("eval", self.eval))
            )
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """How held-out prompts are sampled for evaluation (always without noise)."""

    num_steps: int | None = None
    """Denoising steps; null takes ``sampler.num_steps``."""
    guidance_scale: float | None = None
    """Guidance; null takes ``sampler.guidance_scale``."""
    samples_per_prompt: int = 1
    """Images per prompt."""
    batch_size: int = 24
    """Upper bound of images sampled at once; a process's last batch may be smaller."""
    num_prompts: int | None = None
    """Number of prompts, spread evenly over the file; null takes all."""
    num_images: int = 16
    """Images of the fixed sample grid; 0 draws none."""
    grid: Literal["diffusers", "linspace", "unipc_flow"] | None = None
    """Noise levels visited; null takes ``sampler.grid``."""
    height: int | None = None
    """Height of evaluation images in pixels; null takes the training size."""
    width: int | None = None
    """Width of evaluation images in pixels; null takes the training size."""
    shift: float | Literal["own", "training"] = "own"
    """Shift of the noise levels: the model's own at the evaluation's size, that of training, or a number."""
    seed: int = 0
    """Seed of the evaluation's start noise; use the same for runs that you compare."""
    initial: bool = True
    """Evaluate before the first iteration too."""
    rewards: tuple[RewardConfig, ...] = ()
    """Rewards that are only measured at evaluations, never trained on, in addition to ``rewards``."""
    ema: bool = True
    """Evaluate the averaged adapter if there is one (``policy.ema_decay`` above 0)."""
    temporal: bool = False
    """Measure flicker, freezing and teleporting of videos, as ``eval/temporal/<name>`` (docs/benchmarks.md)."""

    def __post_init__(self) -> None:
        all_at_once(
            lambda: at_least(1, self, "num_steps samples_per_prompt batch_size num_prompts height width", "eval."),
            lambda: at_least(0, self, "guidance_scale num_images", "eval."),
            lambda: positive(self, "shift", "eval."),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggingConfig:
    """Where numbers, samples and the report go besides the run folder; nothing leaves the machine by default."""

    tensorboard: bool | None = None
    """Write TensorBoard event files into the run folder; null does if the extra ``tensorboard`` is installed."""
    wandb: Literal["none", "offline", "online"] = "none"
    """Weights & Biases (extra ``wandb``): into the run folder for a later ``wandb sync``, or sent during the run."""
    trackio: str = "none"
    """trackio (docs/trackers.md): ``local``, a database on this machine, or a Space of the hub as ``OWNER/NAME``."""
    project: str = "flowrl"
    """Project of W&B and trackio."""
    entity: str | None = None
    """User or team of W&B; null takes the key's."""

    def __post_init__(self) -> None:
        if not self.project.strip():
            raise ValueError("logging.project must be a name, got nothing")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How the processes of a run share its model; their number is the product of the three."""

    shard: int = 1
    """Processes that together hold one copy of the denoiser, each a part (FSDP2)."""
    replicate: int | None = None
    """Number of copies, each drawing its own images; null takes as many as the processes allow."""
    context: int = 1
    """Processes that share the tokens of one image or video, for long videos (docs/sharding.md)."""

    def __post_init__(self) -> None:
        at_least(1, self, "shard replicate context", "parallel.")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkersConfig:
    """Processes on Ray that draw and score images for the learner (extra ``ray``)."""

    rollouts: int = 0
    """Workers that draw images, each with its own model, over all learning processes; 0 draws in the learner."""
    shard: int = 1
    """Processes of one machine that are a worker together and hold one copy of the denoiser's weights (FSDP2)."""
    rewards: int = 0
    """Workers that score images; 0 scores in the learner."""
    address: str | None = None
    """Address of a Ray cluster ("auto" finds the one on this machine); null starts one here."""
    staleness: int = 0
    """Iterations that are drawn ahead, during the updates of those before, with weights that are as many iterations
    older; their log-densities are scored again. 0 waits, and gives the numbers of a run without workers."""
    importance_cap: float | None = None
    """Largest importance weight of a transition that was drawn with older weights; 0 weighs none. null is 1 where
    `staleness` is 2 or more, else 0."""
    engine: str | None = None
    """Python file with a class ``Engine`` by which workers draw, such as a server's client; null: the model itself."""
    rollout_gpus: float = 1.0
    """GPUs of each process of a worker that draws, below 1 if several share one; ignored without GPUs."""
    reward_gpus: float = 1.0
    """GPUs of a worker that scores; ignored without GPUs."""
    reward_env: str | None = None
    """YAML file of a Ray runtime environment for the workers that score, with their own packages."""

    def __post_init__(self) -> None:
        at_least(0, self, "rollouts rewards staleness importance_cap rollout_gpus reward_gpus", "workers.")
        at_least(1, self, "shard", "workers.")

    @property
    def drawing(self) -> int:
        """Processes that draw: those of all workers."""
        return self.rollouts * self.shard

    @property
    def weight_cap(self) -> float:
        """The largest importance weight of a transition; 0 where none is weighed."""
        return float(self.staleness > 1) if self.importance_cap is None else self.importance_cap
