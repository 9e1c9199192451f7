"""Space that a run needs on disk, and its downloads."""

from __future__ import annotations

from pathlib import Path

from flowrl.config.locations import is_path, split_revision
from flowrl.planning import published_models as checkpoints
from flowrl.planning.gather import Plan
from flowrl.planning.memory import checkpoint_bytes, sent_bytes
from flowrl.planning.words import Row, duration, in_bytes

_PNG = 2  # bytes per pixel of a saved image, roughly
_PUBLISHED = 2  # bytes per weight of published checkpoints, mostly


def disk_rows(plan: Plan) -> list[Row]:
    """Rows for the run's files and each download."""
    config, run = plan.config, plan.run
    rows: list[Row] = []
    if plan.network is not None:
        one = _checkpoint(plan)
        rows.append(("checkpoints", f"{config.keep_checkpoints} of {in_bytes(one)}, one more while one is written"))
        rows.append(("denoiser" if config.policy.train == "full" else "LoRA", in_bytes(_weights(plan))))
    if each := _of_an_evaluation(plan):
        shown = min(config.eval.num_images, run.evaluation_images or config.eval.num_images)
        rows.append(("samples", f"about {in_bytes(run.evaluations * each)}, {run.evaluations} x {shown} {plan.drawn}s"))
    wanted = [f"{name}: {said}" for name, _, said in _downloads(plan)]
    return rows + [("download" if place == 0 else "", text) for place, text in enumerate(wanted or ["nothing"])]


def disk_line(plan: Plan) -> str:
    """A line with the sums of both, and the names of unknown sizes."""
    kept, saved = plan.run.evaluations * _of_an_evaluation(plan), ""
    if plan.network is not None:
        kept += (plan.config.keep_checkpoints + 1) * _checkpoint(plan) + _weights(plan)
    wanted = _downloads(plan)
    if plan.config.policy.train == "full" and plan.network is not None:
        saved = f"; a checkpoint takes {duration(_checkpoint(plan) / 1e9)} at 1 GB/s"
    size, unknown = sum(size or 0 for _, size, _ in wanted), [name for name, size, _ in wanted if size is None]
    told = [f"about {in_bytes(size)}"] if size else []
    told += [f"{', '.join(unknown)} of unknown size"] if unknown else []
    return f"keeps about {in_bytes(kept)} on disk{saved}; downloads {' and '.join(told) or 'nothing'}"


def on_hub(plan: Plan) -> bool:
    """Whether the model is on the hub, not a local folder or file."""
    given, _ = split_revision(plan.config.pipeline.model)
    return plan.model == given and not is_path(given) and not Path(given).exists()


def _checkpoint(plan: Plan) -> int:
    """Bytes of a checkpoint, with the weights that draw iterations ahead."""
    assert plan.network is not None
    ahead = 0 if plan.facts is None else plan.config.workers.staleness * sent_bytes(plan.facts)
    return checkpoint_bytes(plan.network.trained, plan.slots) + ahead


def _weights(plan: Plan) -> int:
    """Bytes of the weights that the run writes."""
    assert plan.network is not None
    width = 0 if plan.facts is None else plan.facts.dtype[1]
    full = plan.config.policy.train == "full"
    return width * plan.network.parameters if full else 4 * plan.network.trained


def _of_an_evaluation(plan: Plan) -> int:
    """Bytes of the images that an evaluation keeps, and of a grid of them at twice their size."""
    settings, run = plan.config.eval, plan.run
    if not (run.evaluations and plan.size is not None and settings.num_images):
        return 0
    height, width = settings.height or plan.size[0], settings.width or plan.size[1]
    shown = min(settings.num_images, run.evaluation_images or settings.num_images)
    return 2 * shown * height * width * (plan.size[2] or 1) * _PNG


def _downloads(plan: Plan) -> list[tuple[str, float | None, str]]:
    """The downloads: name, bytes if known, and description."""
    wanted: list[tuple[str, float | None, str]] = []
    if on_hub(plan):
        if checkpoints.in_cache(plan.model):
            wanted.append((plan.model, 0, "in the hub's cache already"))
        elif plan.network is not None and plan.parts is not None:
            size = _PUBLISHED * (sum(plan.parts.values()) + plan.network.parameters)
            wanted.append((plan.model, size, f"about {in_bytes(size)}, twice that where stored in float32"))
        else:
            wanted.append((plan.model, None, "not known"))
    for model, count, _ in plan.rewards:
        if not checkpoints.in_cache(model):
            wanted.append((model, count * 4, f"about {in_bytes(count * 4)}, or half of it where stored in 16 bits"))
    if plan.unknown_rewards:
        wanted.append((f"what {', '.join(plan.unknown_rewards)} may need", None, "not known"))
    return wanted
