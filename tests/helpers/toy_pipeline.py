"""A model family without diffusers: a network of two small layers on latents of 12 numbers, in milliseconds.

It stands where a family module stands (`monkeypatch.setitem(PIPELINES, "sd3", "toy_pipeline")`), so that whole runs of
the real recipes and of the real command go through it. `quick_run` leaves the run folder out as well.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest
import torch
import yaml
from accelerate import Accelerator
from PIL import Image
from safetensors.torch import save_file
from tiny_runs import TinyRuns, tiny_runs
from torch import Tensor, nn

from flowrl.config.train import TrainConfig, load_config
from flowrl.pipelines import PIPELINES, ModelFamily
from flowrl.pipelines.arithmetic.attention_words import Known
from flowrl.pipelines.places.known_checkpoints import Published
from flowrl.pipelines.shared.common import Guidance, two_pass_guidance
from flowrl.pipelines.weights.loading_choices import AT_ONCE, Loading
from flowrl.pipelines.weights.lora import lora_ready_for_diffusers
from flowrl.pipelines.weights.parallelize import split_over
from flowrl.recipes import grpo
from flowrl.rewards import FunctionReward, Reward, RewardInputs, RewardOutput
from flowrl.runtime.placement import sent
from flowrl.runtime.randomness import counter_normal
from flowrl.samplers import Network, Velocity, build_schedule
from flowrl.samplers.guidance import TrainNegative
from flowrl.session.preflight import resolve
from flowrl.training.parts import read_run_prompts
from flowrl.training.processes.mesh import Layout
from flowrl.training.trackers.tracker import Trackers
from flowrl.trajectory import Conditioning, Schedule

LORA_TARGETS = ("inner", "outer")
PARTS: dict[str, tuple[Any, ...]] = {"left": (..., slice(None, 1)), "right": (..., slice(1, None))}
PROMPTS = ["a red circle", "two blue squares", "a green star", "three yellow triangles"]
REWARDS = """
import torch

from flowrl.rewards import RewardOutput

def brightness(images, prompts, metadata):
    return images.mean((1, 2, 3))

def redness(images, prompts, metadata):
    return torch.sigmoid(4 * (images[:, 0] - images[:, 2]).mean((1, 2)))

def success(images, prompts, metadata):
    return (images.mean((1, 2, 3)) > 0.5).float()

def half_fail(images, prompts, metadata):  # two of the prompts give equal rewards, so that their groups teach nothing
    same = torch.tensor([prompt in ("a red circle", "two blue squares") for prompt in prompts])
    return torch.where(same, torch.zeros(len(images)), images.mean((1, 2, 3)))

def broken_by_value(inputs):
    value = inputs.images.mean((1, 2, 3))
    valid = (1000 * value).floor() % 3 != 0
    return RewardOutput(values=torch.where(valid, value, torch.nan), valid=valid)

def broken(inputs):
    value = inputs.images.mean((1, 2, 3))
    valid = value <= value.median()
    return RewardOutput(values=torch.where(valid, value, torch.nan), valid=valid)
"""


@dataclass(frozen=True, kw_only=True)
class SmoothBrightness:
    """Brightness that carries gradient, for `REWARDS`."""

    differentiable: ClassVar[bool] = True

    def build(self, device: torch.device) -> Reward:
        """Makes the reward."""

        def score(inputs: RewardInputs) -> RewardOutput:
            values = inputs.images.mean((1, 2, 3))
            return RewardOutput(values=values, valid=torch.ones_like(values, dtype=torch.bool))

        return FunctionReward(
            name="smooth_brightness", score=score, needs=frozenset(), version="1", differentiable=True
        )  # fmt: skip


class Net(nn.Module):
    """Velocity of a flat latent, its text and its time."""

    _repeated_blocks: ClassVar[list[str]] = []  # so that it is split as one unit

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(12 + 4 + 1, 16), nn.Linear(16, 12)
        for name, parameter in self.named_parameters():
            parameter.data.copy_(0.3 * counter_normal(parameter.shape, "toy", name))

    def forward(self, x: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        flat = torch.cat([x.flatten(1), text, timestep[:, None] / 1000], 1)
        return self.outer(torch.tanh(self.inner(flat))).view_as(x)


class Toy:
    """A `Pipeline`."""

    model: str = "toy"
    lora_targets: tuple[str, ...] = LORA_TARGETS
    latent_shape: tuple[int, ...] = (3, 2, 2)
    image_shape: tuple[int, ...] = (3, 2, 2)
    num_sources: tuple[int, int] = (0, 0)
    fps: float | None = None
    sound_rate: int | None = None
    parts: Mapping[str, tuple[Any, ...]] = PARTS
    attention: str = "native"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.denoiser: nn.Module = Net().to(device)
        self.experts: dict[str, Any] = {"transformer": self.denoiser}

    def encode(self, prompts: Sequence[str], sources: Any = None) -> Conditioning:
        text = torch.stack([counter_normal((4,), "text", prompt) for prompt in prompts])
        return Conditioning({"text": sent(text, self.device)})

    def keeps(self, prompts: Sequence[str], sources: Any = None) -> bool:
        return False

    def keep_embeddings(self, folder: Path, encoders: str) -> None:
        pass

    def load_text_encoders(self) -> None:
        pass

    def awake(self, *parts: str) -> AbstractContextManager[None]:
        return nullcontext()

    def load_denoiser(self) -> None:
        pass

    def num_cut(self, prompts: Sequence[str]) -> int:
        return 0

    def free_text_encoders(self) -> None:
        pass

    def network(self, x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        velocity: Tensor = self.denoiser(x, timestep, cond.tensors["text"])
        return velocity

    def passes(self, scale: float) -> int:
        return 1 if scale == 1 else 2

    def guided(
        self, network: Network, cond: Conditioning, negative: Conditioning | None, scale: float,
        train_negative: TrainNegative = True,
    ) -> Velocity:  # fmt: skip
        return two_pass_guidance(Guidance(network, cond, negative, scale, train_negative))

    def schedule(self, num_steps: int, grid: str, shift: float | None = None) -> Schedule:
        return build_schedule({"shift": shift or 2.0}, num_steps, grid=grid)

    def resized(self, height: int | None, width: int | None) -> Toy:
        return self

    def decode(self, latents: Tensor, *, gradient: bool = False) -> Tensor:
        with torch.set_grad_enabled(gradient):
            return torch.sigmoid(latents.float())

    def decode_sound(self, latents: Tensor) -> Tensor:
        raise AssertionError("the toy is silent")

    def encode_images(self, images: Tensor) -> Tensor:
        return torch.logit(images.to(self.device))

    def save_lora(self, folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
        folder.mkdir(exist_ok=True)
        save_file(lora_ready_for_diffusers(tensors), folder / "pytorch_lora_weights.safetensors")
        return folder / "pytorch_lora_weights.safetensors"


def load(model: str, *, device: torch.device | str = "cpu", how: Loading = AT_ONCE, **options: Any) -> Toy:
    """The toy, whatever is asked for; split over processes where it is to be."""
    toy = Toy(device)
    if how.split is not None:
        split_over(toy.denoiser.requires_grad_(False), how.split)
    return toy


class ToyFamily:
    """A `ModelFamily` of the toy alone, of whose networks nothing is known before it loads."""

    name: str = "sd3"
    lora_targets: tuple[str, ...] = LORA_TARGETS
    num_sources: tuple[int, int] | None = (0, 0)
    sources_option: str | None = None
    clips: tuple[str, ...] = ()
    needed_clips: tuple[str, ...] = ()
    denoisers: tuple[str, ...] = ("transformer",)
    videos: bool = False
    sound = None
    parts: Mapping[str, Any] = PARTS

    def check(self, model: str, targets: Sequence[str] | None, rank: int | None = None) -> None:
        pass

    def check_options(self, options: Mapping[str, Any]) -> None:
        pass

    def attends(self, model: str) -> Known:
        return Known()

    def load(self, model: str, **options: Any) -> Toy:
        return load(model, **options)

    def block_kinds(self, model: str) -> dict[str, int]:
        return {}

    def meta_denoiser(self, model: str, kinds: Mapping[str, int] | None = None) -> None:
        return None

    def planned_size(self, model: str, options: Mapping[str, Any]) -> None:
        return None

    def text_tokens(self, model: str, options: Mapping[str, Any]) -> int:
        return 0

    def rows(self, model: str, scale: float) -> int:
        return 1 if scale == 1 else 2

    def remembers(self, model: str, options: Mapping[str, Any], scale: float, num_steps: int) -> bool:
        return False

    def meta_call(self, model: str, size: Any, text_tokens: int) -> dict[str, Any]:
        raise NotImplementedError


FAMILY: ModelFamily = ToyFamily()
PUBLISHED = Published(family="sd3", index={}, network={}, vae={}, licence="none", gated=False, parts={}, sampling={})
"""An entry of `known_checkpoints.checkpoints()` that makes a hub id one of the toy's."""


# ---- configurations and runs -----------------------------------------------------------------------------------------


def toy_in_place(folder: Path) -> Iterator[Path]:
    """The toy's configuration in a folder, with the toy in the place of a model family until the iteration goes on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PIPELINES, "sd3", "toy_pipeline")
        yield write_toy(folder)


def toy_runs(folder: Path, **settings: Any) -> Iterator[TinyRuns]:
    """`tiny_runs` of the toy, which take a quarter of the time of a tiny SD3, until the iteration goes on.

    For what is not about a family: a LoRA of the toy is trained by the real recipe, loop and run folder.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PIPELINES, "sd3", "toy_pipeline")
        pipeline = {"name": "sd3", "model": "toy", "dtype": "float32", "device": "cpu"}
        yield tiny_runs(folder, Path("toy"), **{"pipeline": pipeline, **settings})


def write_toy(folder: Path, **settings: Any) -> Path:
    """Writes prompts, rewards and a configuration into a folder; `settings` replace top-level keys."""
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    (folder / "toy_rewards.py").write_text(REWARDS)
    config: dict[str, Any] = {
        "num_iterations": 1, "prompts_per_step": 2, "group_size": 4, "checkpoint_every": 1, "progress": False,
        "keep_checkpoints": 9, "max_invalid_ratio": 1.0,
        "pipeline": {"name": "sd3", "model": "toy", "dtype": "float32", "device": "cpu"},
        "policy": {"lora_rank": 2},
        "sampler": {"kernel": "flow_sde", "num_steps": 4},
        "optim": {"lr": 0.01},
        "prompts": {"train": str(folder / "prompts.txt")},
        "rewards": [{"file": str(folder / "toy_rewards.py"), "function": "brightness"}],
        "logging": {"tensorboard": False},
    }  # fmt: skip
    path = folder / "toy.yaml"
    path.write_text(yaml.safe_dump(config | settings))
    return path


def write_pairs(folder: Path, size: int = 2) -> None:
    """A pair of images for every prompt, `size` pixels wide and the winner brighter; the toy never gives 0 or 1. The
    winners are the images of a file too."""
    folder.mkdir()
    levels = np.random.default_rng(0).integers(64, 160, (len(PROMPTS), size, size, 3), dtype=np.uint8)
    rows, shown = [], []
    for number, (prompt, level) in enumerate(zip(PROMPTS, levels, strict=True)):
        names = {"winner": f"winner_{number}.png", "loser": f"loser_{number}.png"}
        Image.fromarray(level + 64).save(folder / names["winner"])
        Image.fromarray(level).save(folder / names["loser"])
        rows.append(json.dumps({"prompt": prompt, **names}))
        shown.append(json.dumps({"prompt": prompt, "image": names["winner"]}))
    (folder / "pairs.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "images.jsonl").write_text("\n".join(shown) + "\n")


def reward_list(folder: Path, *functions: str) -> str:
    """The override that takes these functions of the reward file."""
    return f"rewards=[{', '.join(f'{{file: {folder}/toy_rewards.py, function: {name}}}' for name in functions)}]"


@cache
def _accelerator() -> Accelerator:
    return Accelerator(cpu=True)


class QuickRun:
    """A `Run` of one process that keeps its rows in memory and writes nothing."""

    device, main, rank, world = torch.device("cpu"), True, 0, 1
    processes, first, layout = 1, True, Layout()
    stop_requested, parts, rollouts = False, None, None

    def __init__(self, folder: Path) -> None:
        self.accelerator, self.folder, self.logged = _accelerator(), folder, list[dict[str, Any]]()
        self.trackers = Trackers(())

    def tell(self, iteration: int) -> None:
        return None

    def log(self, row: Mapping[str, Any]) -> None:
        self.logged.append(dict(row))

    def save_checkpoint(self, iteration: int, state: Mapping[str, Any], keep: int, own: Mapping[str, Any]) -> Path:
        return self.folder

    def load_checkpoint(self, inputs: Mapping[str, Any]) -> None:
        return None

    def begin(self, first: int, **facts: Any) -> None:
        pass

    def should_stop(self) -> bool:
        return False

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def total(self, tensor: Tensor) -> Tensor:
        return tensor

    def total_gradient(self, gradient: Tensor) -> Tensor:
        return gradient

    def joined(self, mine: list[Any]) -> list[Any]:
        return mine

    def of_all(self, mine: Any) -> list[Any]:
        return [mine]


T = TypeVar("T")


class Meeting:
    """Where threads that stand for processes hand each other what they have."""

    def __init__(self, world: int) -> None:
        self.barrier, self.given = threading.Barrier(world, timeout=60), [None] * world

    def all(self, rank: int, mine: Any) -> list[Any]:
        self.given[rank] = mine
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found


class Process(QuickRun):
    """One of several processes, which is a thread here."""

    def __init__(self, folder: Path, rank: int, world: int, meeting: Meeting) -> None:
        super().__init__(folder)
        self.rank, self.world, self.processes, self.main = rank, world, world, rank == 0  # type: ignore[misc]
        self.meeting = meeting

    def gather(self, tensor: Tensor) -> Tensor:
        return torch.cat(self.meeting.all(self.rank, tensor))

    def total(self, tensor: Tensor) -> Tensor:
        return torch.stack(self.meeting.all(self.rank, tensor)).sum(0)

    def joined(self, mine: list[Any]) -> list[Any]:
        return [one for part in self.meeting.all(self.rank, mine) for one in part]

    def of_all(self, mine: Any) -> list[Any]:
        return self.meeting.all(self.rank, mine)


def on_threads(world: int, folder: Path, work: Callable[[Any], T]) -> list[T]:
    """What a function gives of the run of each of so many processes, which run at once."""
    meeting = Meeting(world)
    runs = [Process(folder, rank, world, meeting) for rank in range(world)]
    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(work, runs))


def quick_run(config: TrainConfig, folder: Path) -> list[dict[str, Any]]:
    """Checks and trains as the command does, without a run folder; returns the rows it logged."""
    grpo.check(config)
    run: Any = QuickRun(folder)
    assert grpo.main(resolve(config, read_run_prompts(config.prompts)), run)
    return run.logged


def toy_config(path: Path, *overrides: str) -> TrainConfig:
    """The toy's configuration with overrides."""
    return load_config(path, overrides)


FRAMES = 4
"""Of the clips of `VideoToy`."""


class VideoToy(Toy):
    """The toy, whose images are clips that brighten from frame to frame and fall back in the last one."""

    fps: float | None = 8.0

    def decode(self, latents: Tensor, *, gradient: bool = False) -> Tensor:
        image = super().decode(latents, gradient=gradient)
        levels = torch.tensor([0.2, 0.5, 0.8, 0.4])[:, None, None, None]
        return image[:, None] * levels
