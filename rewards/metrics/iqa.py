"""Quality of images by the metrics of the package pyiqa: MUSIQ, MANIQA, TOPIQ, LPIPS, DISTS, SSIM and dozens more.

    {name: pyiqa, options: {metric: musiq}}                           no reference: the image alone
    {name: pyiqa, options: {metric: lpips, against: sources}}         full reference: how little an edit changed

pyiqa (github.com/chaofengc/IQA-PyTorch) holds the networks and fetches their weights. Version 0.1.16 is under
PolyForm Noncommercial 1.0.0, and weights have licences of their own, so it is no dependency: install it yourself.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flowrl.config.options import unknown_name
from flowrl.config.sections import at_least
from flowrl.config.strict_yaml import read_mapping
from flowrl.prompts.loading import Prompt
from flowrl.rewards.base import FunctionReward, Model, Reward, RewardInputs, RewardOutput, tensor_output, to_uint8
from flowrl.rewards.base.user_file import unchanged_process
from flowrl.rewards.metrics.against import FIELDS, Against, best_of_others, no_other
from flowrl.rewards.networks.pretrained import fingerprint, first_line
from flowrl.runtime.failures import out_of_memory
from flowrl.runtime.randomness import counter_seed
from flowrl.runtime.shapes import Float

OWNER = "reward 'pyiqa'"
NOT_OF_AN_IMAGE = read_mapping(Path(__file__).with_suffix(".yaml"))
"""Metrics of the package that are no reward of an image, and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pyiqa:
    """An image-quality metric of pyiqa on its own scale, negated if lower is better.

    `negated` in the version marks these; the log's part `metric` has the number as papers print it. A metric that needs
    a reference takes the largest value over the sample's images of `against`, which must have its size (an item
    fails with "other_size" otherwise). Crops that a metric draws are the same at every call.
    """

    metric: str
    """Its name in `pyiqa.list_models()`, such as musiq, maniqa, topiq_nr, clipiqa+, niqe, lpips, dists or ssim."""
    against: Against = "references"
    """What a full-reference metric compares with: the sample's `references`, or the `sources` of an edit."""
    pixels: Literal["8bit", "float"] = "8bit"
    """`8bit`, rounded as an image file is, without gradient; `float` lets the gradient through, if there is one."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Passed to `pyiqa.create_metric`, such as pretrained_model_path, a file of weights on this machine."""
    batch_size: int = 1
    """Images that a metric without reference sees at once; with one, no value depends on the others."""
    differentiable: ClassVar[bool] = True
    models: ClassVar[tuple[Model, ...] | None] = None

    def __post_init__(self) -> None:
        at_least(1, self, "batch_size")
        if importlib.util.find_spec("pyiqa") is None:
            raise ValueError(
                "the package pyiqa is missing: pip install pyiqa. Its licence (PolyForm Noncommercial 1.0.0) is for "
                "you to accept."
            )
        names = library().list_models()
        if self.metric not in names:
            raise ValueError(unknown_name("metric", self.metric, set(names) - set(NOT_OF_AN_IMAGE)))
        if self.metric in NOT_OF_AN_IMAGE:
            raise ValueError(f"metric {self.metric!r} {NOT_OF_AN_IMAGE[self.metric]}.")
        if not self.is_full_reference and self.against != "references":
            raise ValueError(f"metric {self.metric!r} looks at one image alone: leave out against.")

    @property
    def is_full_reference(self) -> bool:
        """Whether the metric compares with another image."""
        return self.metric in library().list_models("FR")

    def lacks(self, prompt: Prompt) -> str | None:
        """An image to compare with."""
        return no_other(prompt, self.against) if self.is_full_reference else None

    def build(self, device: torch.device) -> Reward:
        """Makes the metric; the package reads or fetches its weights."""
        package = library()
        try:
            with unchanged_process(OWNER):
                # As a loss without reduction: one value per image, and we decide whether to keep the gradient.
                metric = package.create_metric(
                    self.metric, as_loss=True, loss_reduction="none", device=device, **self.options
                )
        except Exception as error:  # missing weights, unknown options and packages: errors of every kind
            if out_of_memory(error):
                raise
            raise ValueError(
                f"{OWNER} could not make metric {self.metric!r}: {first_line(error)} If its weights cannot be fetched, "
                f"give options: {{pretrained_model_path: FILE}}; if a package is missing, install it."
            ) from error
        metric = metric.eval().requires_grad_(False)

        def score(inputs: RewardInputs) -> RewardOutput:
            images = self._pixels(inputs.images)

            def compared(item: int, other: Tensor) -> Tensor | None:
                if other.shape != images[item].shape:
                    return None
                given = self._pixels(other[None].to(images.device))
                return self._value(metric, images[item : item + 1], given)[0]

            if self.is_full_reference:
                output = best_of_others(inputs, self.against, compared, owner=OWNER)
            else:
                values = [self._value(metric, piece) for piece in images.split(self.batch_size)]
                output = tensor_output(torch.cat(values))
            # The part is the number as papers print it.
            output.parts["metric"] = (-output.values if metric.lower_better else output.values).detach()
            return output

        way = "negated" if metric.lower_better else "as-is"
        weights = list(metric.parameters())
        hashed = f"@{fingerprint(weights)}" if weights else ""
        settings = ",".join(f"{name}={self.options[name]}" for name in sorted(self.options))
        return FunctionReward(
            name="pyiqa",
            score=score,
            needs=frozenset({"images"} | ({FIELDS[self.against]} if self.is_full_reference else set())),
            version=f"pyiqa:{self.metric}{hashed}:{way}:{self.pixels}:{importlib.metadata.version('pyiqa')}:"
            f"{self.against if self.is_full_reference else 'no-reference'}{':' + settings if settings else ''}",
            differentiable=self.pixels == "float",
        )

    def _value(self, metric: Any, *images: Float[Tensor, " b 3 h w"]) -> Float[Tensor, " b"]:
        """The metric of images, higher is better."""
        device = images[0].device
        seed = counter_seed("pyiqa", self.metric)
        gradient = nullcontext() if self.pixels == "float" else torch.no_grad()
        with unchanged_process(OWNER, seed=seed), gradient, torch.autocast(device.type, enabled=False):
            values: Tensor = metric(*images).reshape(-1).float()
        if len(values) != len(images[0]):
            raise ValueError(f"{OWNER}: metric {self.metric!r} gave {len(values)} values for {len(images[0])} images.")
        return -values if metric.lower_better else values

    def _pixels(self, images: Float[Tensor, " b 3 h w"]) -> Float[Tensor, " b 3 h w"]:
        if self.pixels == "float":
            return images
        return torch.from_numpy(to_uint8(images)).to(images.device).permute(0, 3, 1, 2).float() / 255


def library() -> Any:
    """The package; its messages on loading are kept to warnings."""
    package = importlib.import_module("pyiqa")
    logging.getLogger("pyiqa").setLevel(logging.WARNING)
    return package
