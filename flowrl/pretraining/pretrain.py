"""Makes one of the models that ship with flowrl, their scorer or their prompts, from scratch; trains a verifier."""

from __future__ import annotations

import importlib
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flowrl.config.building import build_settings, setting_words
from flowrl.config.options import entry_of
from flowrl.runtime.public import public

MODELS: dict[str, tuple[str, str]] = {
    "kontext": ("flowrl.pretraining.make_kontext", "KontextConfig"),
    "prompts": ("flowrl.pretraining.make_prompts", "PromptListsConfig"),
    "scorer": ("flowrl.pretraining.make_scorer", "ScorerConfig"),
    "sd15": ("flowrl.pretraining.make_sd15", "Sd15Config"),
    "sd3": ("flowrl.pretraining.make_sd3", "PretrainConfig"),
    "verifier": ("flowrl.pretraining.train_verifier", "VerifierConfig"),
    "wan": ("flowrl.pretraining.make_wan", "WanConfig"),
}
"""Name -> module with `main(config) -> Path`, and its settings."""
MOST_THREADS = 256
"""CPU threads: far more of them end torch without a word."""
_SHARES = ("prompt_dropout", "wrong", "label_smoothing", "ema_decay", "first_weight")
_MAY_BE_ZERO = frozenset("generated kl_weight shape_weight weight_decay sft_steps gcpo_steps kl_coef lora_rank".split())


@public
def pretrain(what: str = "sd3", *words: str, show: bool = True, **settings: Any) -> Path:
    """Makes an embedded model, its scorer or its prompts from scratch, in tens of minutes on two cores, or a verifier.

    The same call continues where it stopped.

    Args:
        what: "sd3", "sd15", "wan", "kontext", "scorer", "prompts" or "verifier", a judge that learns.
        *words: settings as `key=value` texts.
        show: show progress.
        **settings: settings as values. They are the fields of the class that `MODELS` names.

    Returns:
        The folder.

    Raises:
        ValueError: there is no such model, a key is unknown, a type is wrong, or a number is out of its range.
    """
    module_name, kind = entry_of(MODELS, what, "model", owner="pretrain")
    from flowrl.runtime.placement import torch_threads  # imports torch

    module = importlib.import_module(module_name)
    config = build_settings(getattr(module, kind), [*words, *setting_words(settings)], command=f"pretrain {what}")
    check_numbers(config)
    with torch_threads(getattr(config, "threads", None)):
        made: Path = module.main(config)
    return made


def check_numbers(config: Any) -> None:
    """Refuses settings that would train for nothing or without an end. Raises ValueError: names the setting."""
    for name, value in asdict(config).items():
        if name == "seed" or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if name in _SHARES:
            fits, words = 0 <= value <= 1, "lie in [0, 1]"
        elif name in _MAY_BE_ZERO:
            fits, words = 0 <= value < math.inf, "be 0 or a finite number above"
        elif name == "threads":
            fits, words = 0 < value <= MOST_THREADS, f"lie in 1 .. {MOST_THREADS}: give the number of cores"
        else:
            fits, words = 0 < value < math.inf, "be a finite number above 0"
        if not fits:
            raise ValueError(f"{name}={value} must {words}")
