"""Which stock classes can be called one step at a time, judging by the arguments of their calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

OTHER = "models that are trained have a family (docs/families.md), or are called as docs/generic.md says"
_ASKED = ("prompt", "latents", "num_inference_steps", "output_type")


def undecorate(call: Callable[..., Any]) -> Callable[..., Any]:
    """A function without decorators: stock's `no_grad` is one."""
    found: Callable[..., Any] = inspect.unwrap(call)
    return found


def call_arguments(cls: Any) -> Mapping[str, inspect.Parameter]:
    """Arguments of a stock class's call by name."""
    return inspect.signature(undecorate(cls.__call__)).parameters


def scale_argument(taken: Mapping[str, inspect.Parameter]) -> str | None:
    """The argument of a stock call that sets guidance; None without one."""
    true = taken.get("true_cfg_scale")
    if true is not None and isinstance(true.default, (int, float)) and true.default > 1:
        return "true_cfg_scale"
    return "guidance_scale" if "guidance_scale" in taken else None


GUIDER_PARTS = ("guider", "ocr_guider")
"""What guiders are called in a folder."""
GUIDERS = ("ClassifierFreeGuidance",)
"""Classes of stock's guiders whose scale can be set and that keep nothing from step to step."""


def check_guider(name: str, kind: str, config: Mapping[str, Any]) -> None:
    """Refuses a part that guides a stock pipeline other than by a scale. Raises ValueError: it has another class, or is
    on only for a part of the steps."""
    if kind not in GUIDERS or config.get("start", 0.0) != 0 or config.get("stop", 1.0) != 1:
        raise ValueError(
            f"{name} is guided by {kind}, which goes by the number of the step: give the folder a guider "
            f"{GUIDERS[0]} without start and stop; {OTHER}"
        )


def usual_sources(taken: Mapping[str, inspect.Parameter]) -> int:
    """Source images that a stock call draws from by default: one if `image` comes before the prompt."""
    return int("image" in taken and list(taken).index("image") < list(taken).index("prompt"))


def takes_frames(taken: Mapping[str, inspect.Parameter]) -> bool:
    """Whether a stock call makes videos."""
    return bool({"num_frames", "frames"} & set(taken))


def stock_class(name: str, model: str) -> Any:
    """The stock class of a name; imports diffusers. Raises ValueError: diffusers has none, or its call cannot be
    stepped from outside."""
    import diffusers

    cls = getattr(diffusers, name, None)
    if not (inspect.isclass(cls) and issubclass(cls, diffusers.DiffusionPipeline)):
        raise ValueError(
            f"{model} is a {name}, and no family loads that, nor has diffusers {diffusers.__version__} a pipeline of "
            f"this name: {OTHER}"
        )
    taken = call_arguments(cls)
    said = f"{model} is a {name}, which no family loads and pipeline.name=generic cannot train"
    wanted = [one for one in _ASKED if one not in taken]
    if not hasattr(cls, "encode_prompt"):
        wanted = wanted or ["encode_prompt"]
    varying = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed = [key for key, one in taken.items() if one.default is one.empty and one.kind not in varying]
    own = [key for key in needed if key not in ("self", "prompt", "image")]
    sounds = "audio_latents" in taken or hasattr(cls, "prepare_audio_latents")
    faults = {
        f"has no {', '.join(wanted)}": bool(wanted),
        "steps two schedulers in a loop, of images and of sound": sounds,
        "fills what a mask leaves out (mask_image)": "mask_image" in taken,
        "begins at a given image (strength)": "strength" in taken,
        f"draws from {', '.join(own)} beside a prompt": bool(own),
    }
    for fault, is_so in faults.items():
        if is_so:
            raise ValueError(f"{said}, it {fault}: {OTHER}")
    return cls
