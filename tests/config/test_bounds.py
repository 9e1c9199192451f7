"""Every number of a configuration has an upper bound, and what is beyond it is refused in words."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

import pytest
from config_files import minimal_file, refusal

from flowrl.config.bounds import MOST, check_counts
from flowrl.config.train import TrainConfig


def numbers_of(cls: type[Any], prefix: str = "") -> dict[str, str]:
    """Every key below a dataclass that takes numbers -> how many of them it takes: "one", "two" or "list"."""
    found: dict[str, str] = {}
    for name, hint in typing.get_type_hints(cls).items():
        kinds = [hint, *(part for part in typing.get_args(hint) if hint is not part)]
        if dataclasses.is_dataclass(hint):
            found |= numbers_of(typing.cast(type[Any], hint), f"{prefix}{name}.")
        elif any(kind in (int, float) for kind in kinds) and typing.get_origin(hint) is not tuple:
            found[f"{prefix}{name}"] = "one"
        for kind in kinds:
            if typing.get_origin(kind) is tuple and typing.get_args(kind)[0] in (int, float):
                found.setdefault(f"{prefix}{name}", "list" if typing.get_args(kind)[1] is Ellipsis else "two")
    return found


def test_every_number_has_an_upper_bound() -> None:
    assert numbers_of(TrainConfig).keys() == MOST.keys()


@pytest.mark.parametrize(("key", "shape"), sorted(numbers_of(TrainConfig).items()))
def test_a_number_beyond_its_bound_is_refused_in_words(tmp_path: Path, key: str, shape: str) -> None:
    whole = "." not in str(MOST[key]) and "e" not in str(MOST[key])
    beyond = 2 * int(MOST[key]) if whole else 1e308
    value = {"one": f"{beyond}", "two": f"[0, {beyond}]", "list": f"[{beyond}]"}[shape]
    message = refusal(
        minimal_file(tmp_path), "sampler.noise_level=0.5" if "calibration" in key else "seed=0", f"{key}={value}"
    )
    assert key in message
    refusals = ("at most", "below 2^63", "must lie in", "is 0 (population)", "one of", "noise_levels holds")
    assert any(word in message for word in refusals)


def test_an_iteration_has_an_end_too(tmp_path: Path) -> None:
    path = minimal_file(tmp_path)
    message = refusal(path, "prompts_per_step=10000", "group_size=1000")
    assert "10,000,000 images of one iteration are more than 100,000" in message
    assert "weight of scene" in refusal(path, "rewards.0.weight=1e300")


def test_counts_are_whole_numbers_from_1() -> None:
    check_counts(workers=1, images=None, batch=10)
    for wrong in (0, -1, True, 1.0, 11, "2"):
        with pytest.raises(ValueError, match=r"`batch` must be a whole number from 1 to 10"):
            check_counts(10, batch=wrong)  # type: ignore[arg-type]
