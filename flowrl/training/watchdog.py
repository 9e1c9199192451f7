"""Signs that a run goes wrong, found while it runs, and the weights that stay if a policy has diverged.

    look = look_at(images)                                    # before any reward sees them
    stop_on_broken(run, broken, total, iteration, learned=True)
    found = iteration_warnings(history, row, reward_B, config)  # name -> sentence, for the log and the report
    say(run, history, found, iteration, iteration)            # on the terminal when one begins

Images or weights that are not finite, and absurd weights, end a run. Everything else is a warning: the run goes on.
Later iterations compare with `history`, plain numbers in counters and checkpoints, so a continued run warns alike.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from flowrl.config.readers import is_read
from flowrl.config.train import TrainConfig
from flowrl.credit import CREDIT
from flowrl.runs.vital_signs import CHECKS, COLLAPSED, LARGE_WEIGHT, alarm
from flowrl.runtime.files import sync, sync_tree
from flowrl.runtime.scrubbing import say as print
from flowrl.training.learner import total_of
from flowrl.training.model_files import MODEL
from flowrl.training.processes.devices import on_main
from flowrl.training.run import Run

SMALL, LEVELS = 8, 4095  # pixels a side and levels at which images are compared, as whole numbers
FIRST = 3  # iterations that define what is usual for a run
LATELY = 10  # iterations that define what was usual lately; a warning absent for longer is printed again
ABSURD_WEIGHT = 1000.0  # of a LoRA; trained ones stay far below 10


def new_history() -> dict[str, Any]:
    """What the watchdog remembers of a run at its start."""
    return {
        "largest": [],
        "diversity": [],
        "narrow": 0,  # of iterations
        "evaluations": 0,
        "measured": [],
        "said": {},
    }


# ---- images ----------------------------------------------------------------------------------------------------------


class Look(NamedTuple):
    """A look at b decoded images, on the host: bool [b] not finite, bool [b] of one colour, and int32 [b, 3 * SMALL^2],
    the images made small."""

    broken: Tensor
    constant: Tensor
    small: Tensor


def look_at(images: Tensor) -> Look:
    """Looks at decoded images `[b, 3, H, W]` in [0, 1], or at videos `[b, F, 3, H, W]`, compared by their last frame
    alone: the first may have been given."""
    images = images.detach()
    frame = (images[:, -1] if images.ndim == 5 else images).float().nan_to_num().clamp(0, 1)
    channels = frame.flatten(2)
    small = torch.nn.functional.adaptive_avg_pool2d(frame, SMALL)
    flags = [~torch.isfinite(images).flatten(1).all(1), (channels.amax(2) - channels.amin(2) < 1 / 255).all(1)]
    columns = [*(flag[:, None].to(torch.int32) for flag in flags), (LEVELS * small).round().to(torch.int32).flatten(1)]
    seen = torch.cat(columns, 1).cpu()  # together, because every copy waits for the device
    return Look(broken=seen[:, 0] > 0, constant=seen[:, 1] > 0, small=seen[:, 2:])


def diversity_of(small: Tensor, group: Tensor) -> float | None:
    """How much the images of a group differ: mean over groups of the root of the mean squared distance of two images.
    `mean_g sqrt(mean_{i<j in g} |x_i - x_j|^2 / D)` with pixels in [0, 1]. Sums are of whole numbers, so neither order
    nor processes show. None without two images of one group. `small` are int32 [n, D] of `look_at`."""
    _, place, count = group.unique(return_inverse=True, return_counts=True)
    pixels = small.long()
    total = torch.zeros(len(count), pixels.shape[1], dtype=torch.int64).index_add_(0, place, pixels)
    squares = torch.zeros(len(count), dtype=torch.int64).index_add_(0, place, pixels.square().sum(1))
    several = count > 1
    if not bool(several.any()):
        return None
    of_pairs = (count * squares - total.square().sum(1))[several].double()
    pairs = (count * (count - 1) / 2)[several].double()
    return float((of_pairs / (pairs * pixels.shape[1])).sqrt().mean() / LEVELS)


def comparable(config: TrainConfig) -> bool:
    """Whether the images of a group differ for the same reasons in every iteration, so that a fall means something.
    Images with one start noise, and branches, differ by the noise of the stochastic steps alone: a window that moves
    changes how much."""
    method = CREDIT[config.credit.method]
    own_noise = method.of_outcomes and not config.same_latent
    same_steps = config.sampler.sde_window_size == 0 and (method.plan != "tree" or config.credit.splits is not None)
    return own_noise or same_steps


# ---- warnings --------------------------------------------------------------------------------------------------------


def iteration_warnings(
    history: dict[str, Any],
    row: Mapping[str, Any],
    reward_B: Tensor | None,
    config: TrainConfig,
    *,
    largest_weight: float = 0.0,
) -> dict[str, str]:
    """What is wrong in an iteration, name -> sentence; updates `history`. Rewards [B] are of all
    processes, groups contiguous, NaN where an image failed; None without images. `largest_weight` is that of the LoRA
    now, in magnitude; of a network's own weights as a multiple of what it was."""
    constant, now = row.get("constant_ratio", 0.0), row.get("diversity")
    scaled = is_read("adv_eps", config.recipe)
    found = alarm("constant_images", constant, share=constant)
    first: list[float] = history["diversity"]
    if now is not None and len(first) < FIRST:
        first.append(now)
    elif now is not None:
        usual = sum(first) / len(first)
        history["narrow"] = history["narrow"] + 1 if now < COLLAPSED * usual else 0
        share = now / usual if usual else 0.0
        found |= alarm("collapse", comparable(config), history["narrow"], now=now, share=share)
    if reward_B is not None and not bool(reward_B.isnan().all()):
        reward_B = reward_B.cpu().double()
        eps = 0.0 if config.adv_std == "none" or not scaled else config.adv_eps
        found |= _of_rewards(history, reward_B, config.group_size, eps)
    deviation = 0.0 if config.workers.staleness else row.get("ratio_first_deviation", 0.0)
    found |= alarm("ratio_deviation", deviation, deviation=deviation)
    reach = _reach(config.policy.train == "full", largest_weight)
    found |= alarm("large_weights", largest_weight, reach=reach, limit=LARGE_WEIGHT)
    tested = (row.get("grad_norm"), row.get("live_rows", 1), row.get("zero_std_ratio", 0))
    check = CHECKS["teachers" if config.policy.teachers else "advantages" if scaled else "rewards"]
    return found | alarm("zero_gradient", *tested, check=check)


def _of_rewards(history: dict[str, Any], reward_B: Tensor, group_size: int, eps: float) -> dict[str, str]:
    """Rewards, in float64, that explode, vanish, or are all about one image."""
    known = reward_B[~reward_B.isnan()]
    sizes = known.abs().sort(descending=True).values
    largest, usual = float(sizes[0]), max(history["largest"], default=0.0)
    history["largest"] = [*history["largest"], largest][-LATELY:]
    before = f", {usual:.3g} at most in the iterations before" if usual else ""
    found = alarm("exploding_rewards", largest, usual, largest=largest, before=before)
    if len(sizes) > 2:
        place, second = int(reward_B.nan_to_num().abs().argmax()), float(sizes[1])
        square = (known - known.mean()).square()
        found |= alarm(
            "one_image", largest, second, count=len(known), share=float(square.max() / square.sum()), place=place,
            value=float(reward_B[place]), second=second,
        )  # fmt: skip
    if len(reward_B) % group_size == 0:
        groups = reward_B.view(-1, group_size)
        mean = groups.nanmean(1, keepdim=True)
        spread = float((groups - mean).square().nanmean(1).sqrt().nan_to_num().max())
        found |= alarm("vanishing_rewards", spread, eps, spread=spread, eps=eps)
    return found


def evaluation_warnings(
    history: dict[str, Any], row: Mapping[str, Any], weights: Mapping[str, float]
) -> dict[str, str]:
    """A trained reward that got better while all that are only measured fell, since one of the evaluations before; and
    images that have lost their detail since the first.

    Both by more than two standard errors of the difference, which are taken from the 95 % intervals of its two means:
    evaluations ask the same prompts from the same noise, where iterations ask others. `history` takes it in. Every
    earlier evaluation is looked back to, since a policy often learns what was meant before it finds the hole. `weights`
    are 0 for rewards that are not trained on.
    """
    now = {
        name: [row[f"eval/reward/{name}{end}"] for end in ("", "_low", "_high")]
        for name in weights
        if f"eval/reward/{name}_low" in row
    }
    history["evaluations"] += 1
    earlier: list[dict[str, list[float]]] = history.setdefault("measured", [])  # not there in older checkpoints
    found = [told for then in earlier if (told := _hacked_since(then, now, weights))]
    earlier.append(now)
    blurred = _blurred_since(earlier[0], now, weights)
    if not found:
        return blurred
    _, said = min(found)  # since the largest loss
    return blurred | alarm("reward_hacking", said, said=said)


def _blurred_since(
    then: Mapping[str, Sequence[float]], now: Mapping[str, Sequence[float]], weights: Mapping[str, float]
) -> dict[str, str]:
    """The warning of images that have lost detail since the first evaluation, by the size of their JPEG files. Rewards
    by that size are proportional to it; those that are trained on are meant to move it."""
    for name in now:
        was, size = abs(then[name][0]) if name in then else 0.0, abs(now[name][0])
        if name.startswith("jpeg_") and weights[name] == 0 and was:
            sure = abs(_in_errors(then[name], now[name])) > 2
            return alarm("blur", sure, size / was, reward=name, share=size / was, was=then[name][0], now=now[name][0])
    return {}


def _hacked_since(
    then: Mapping[str, Sequence[float]], now: Mapping[str, Sequence[float]], weights: Mapping[str, float]
) -> tuple[float, str] | None:
    """How much was lost since an evaluation, in standard errors, and its sentence; None if nothing is."""
    changes = {name: _in_errors(then[name], now[name]) for name in now if name in then}
    risen = [name for name in changes if weights[name] and changes[name] * math.copysign(1, weights[name]) > 2]
    held_out = [name for name in changes if weights[name] == 0]
    if not risen or not held_out or not all(changes[name] < -2 for name in held_out):
        return None

    def told(names: Sequence[str]) -> str:
        return ", ".join(f"{name} {then[name][0]:.3g} -> {now[name][0]:.3g}" for name in names)

    said = f"the reward trained on rose ({told(risen)}) while every reward that is only measured fell"
    return max(changes[name] for name in held_out), f"{said} ({told(held_out)})"


def _in_errors(was: Sequence[float], now: Sequence[float]) -> float:
    """The change of a mean in standard errors, from (mean, low, high) of 95 % intervals; NaN without bounds on both
    sides. Where one side has none, as of empty images, which all agree, the error is the other's."""
    known = [high - low for _, low, high in (was, now) if not math.isnan(low)]
    change, error = now[0] - was[0], math.hypot(*known) / (2 * 1.96) if known else math.nan
    return change / error if error else change and math.copysign(math.inf, change)


def say(run: Run, history: dict[str, Any], found: Mapping[str, str], iteration: int, moment: int) -> None:
    """Prints warnings on standard error when they begin, and again if they come back after a pause. `moment` counts
    the occasions at which they can be found: iterations, or evaluations."""
    said: dict[str, int] = history["said"]
    for name, sentence in found.items():
        if run.main and (name not in said or moment - said[name] > LATELY):
            print(f"flowrl: warning, iteration {iteration}: {sentence}", file=sys.stderr, flush=True)
        said[name] = moment


# ---- divergence ------------------------------------------------------------------------------------------------------


def stop_on_broken(run: Run, broken: int, total: int, iteration: int, *, learned: bool) -> None:
    """Ends a run whose images are not finite; every process calls it with its own counts. If no weights were `learned`
    before, it is the model that draws them. Raises ValueError: says so, and how to go on; `lora/` or `model/` then
    holds the last weights whose images were finite."""
    broken = total_of(run, broken)
    if not broken:
        return
    what = f"{broken} of {total_of(run, total)} images hold NaN or infinity"
    if not learned:
        raise ValueError(
            f"{what} before anything was learned: the weights of pipeline.model or policy.init_lora are damaged, or "
            "pipeline.dtype is too narrow for them: check the files, or set pipeline.dtype=float32"
        )
    raise _end_diverged(run, iteration, what)


def largest_weight(weights: Iterable[Tensor]) -> float:
    """The largest magnitude of weights; NaN if one is."""
    return float(get_total_norm([weight for weight in weights if weight.numel()], norm_type=math.inf))


def stop_on_absurd_weights(run: Run, iteration: int, largest: float, *, full: bool = False) -> None:
    """Ends a run after an update whose weights no training gives: not finite, or beyond `ABSURD_WEIGHT`. `largest` is
    as `iteration_warnings` takes it; `full` means the network's own weights. Raises ValueError: as `stop_on_broken`."""
    if not largest <= ABSURD_WEIGHT:
        raise _end_diverged(run, iteration, f"{_reach(full, largest)}, beyond {ABSURD_WEIGHT:g}")


def _reach(full: bool, largest: float) -> str:
    unit = " times the largest of the model" if full else ""
    return f"weights of the {'network' if full else 'LoRA'} reach {largest:.3g}{unit}"


class Diverged(ValueError):
    """A policy that has diverged; the message says how to go on, since a resume would repeat it."""


def _end_diverged(run: Run, iteration: int, what: str) -> Diverged:
    """The error of a diverged policy; logs it, and restores the last good weights."""
    shipped = on_main(lambda: shipped_folder(run.folder))
    key = "pipeline.model" if shipped.name == MODEL else "policy.init_lora"
    if run.main:
        with suppress(OSError):  # on a full disk, say: what counts is the divergence
            put_back_good(run.folder)
            run.log({"iteration": iteration, "warnings": alarm("diverged", what, what=what)})
    advice = (
        f"{shipped} holds the last weights whose images were finite. Go on from them with smaller steps: flowrl train "
        f"{run.folder / 'config.yaml'} out=NEW {key}={shipped} optim.lr=SMALLER"
        if on_main(shipped.exists)
        else f"no {shipped.name.replace('lora', 'LoRA')} that was saved has drawn finite images: start again with a "
        "smaller optim.lr"
    )
    return Diverged(f"the policy has diverged since iteration {iteration}: {what}. Resuming would repeat it; {advice}")


def shipped_folder(folder: Path) -> Path:
    """Where a run keeps its trained weights: `model/` if that exists or was put aside, else `lora/`."""
    places = (MODEL, _good(MODEL), _diverged_name(MODEL))
    return folder / (MODEL if any((folder / name).exists() for name in places) else "lora")


def keep_good(folder: Path) -> None:
    """Notes that the weights in a run folder have drawn finite images. Links cost no room: files are replaced."""
    shipped, staged = shipped_folder(folder), folder / ".shipped.keeping"
    _link_tree(shipped, staged)
    shutil.rmtree(folder / _good(shipped.name), ignore_errors=True)
    staged.replace(folder / _good(shipped.name))
    sync(folder)


def put_back_good(folder: Path) -> None:
    """Restores the last weights that drew finite images; without any, the present ones move aside."""
    shipped, staged = shipped_folder(folder), folder / ".shipped.restoring"
    good, aside = folder / _good(shipped.name), folder / _diverged_name(shipped.name)
    if shipped.exists():
        shutil.rmtree(aside, ignore_errors=True)
        shipped.replace(aside)
    if good.exists():
        _link_tree(good, staged)
        staged.replace(shipped)
        sync(folder)
        shutil.rmtree(aside, ignore_errors=True)


def _good(name: str) -> str:
    return f".{name}.good"


def _diverged_name(name: str) -> str:
    return f"{name}.diverged"


def _link_tree(source: Path, target: Path) -> None:
    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:  # a file system without hard links
            shutil.copy2(source, target)

    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, copy_function=link, symlinks=True)
    sync_tree(target)
