"""A user's own reward file: both forms, loading without collisions, and what it must not do."""

from __future__ import annotations

import hashlib
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from reward_inputs import inputs_of, random_images

from flowrl.rewards import Reward, load_target, to_uint8
from flowrl.rewards.base.specs import validate_reward_specs
from flowrl.rewards.base.user_file import content_of, user_file_options
from flowrl.rewards.compose import build_weighted_sum

USER_FILE = """
import numpy as np
import torch
from flowrl.rewards import RewardOutput

def brightness(images, prompts, metadata):
    return images.mean(dim=(1, 2, 3))

def scaled(images, prompts, metadata, *, factor: float = 2.0):
    return [factor * float(image.mean()) for image in images]

def as_array(images, prompts, metadata):
    return images.mean(dim=(1, 2, 3)).numpy().astype(np.float64)

def half_failed(inputs, *, device):
    values = inputs.images.mean(dim=(1, 2, 3))
    valid = torch.arange(len(inputs)) % 2 == 0
    return RewardOutput(values=torch.where(valid, values, torch.nan), valid=valid)

def raises(images, prompts, metadata):
    return images.sharpen()  # no such method

def too_few(images, prompts, metadata):
    return [1.0]

def column(images, prompts, metadata):
    return images.mean(dim=(2, 3))[:, :1]

def words(images, prompts, metadata):
    return prompts

def not_finite(images, prompts, metadata):
    return [1.0, float("nan"), 2.0, 3.0]

def plain_numbers(inputs):
    return [1.0] * len(inputs)

class Scale:
    def __call__(self, images, prompts, metadata, *, factor=2.0):
        return factor * images.mean(dim=(1, 2, 3))

scale = Scale()

def two(images, prompts):
    return []

def alone(images):
    return images.mean(dim=(1, 2, 3))

def named(*, images, prompts, metadata):
    return []

def swallows(images, prompts, metadata, **options):
    return []

def positional_option(images, prompts, metadata, factor=2.0):
    return []

constant = 3
"""


def user_file_reward(file: str, function: str, **options: Any) -> Reward:
    return user_file_options(file, function, options).build(torch.device("cpu"))


@pytest.fixture
def user_file(tmp_path: Path) -> str:
    """A user's file with the name that is most likely to collide."""
    file = tmp_path / "rewards.py"
    file.write_text(USER_FILE, encoding="utf-8")
    return str(file)


def test_user_functions_of_either_form(user_file: str) -> None:
    inputs = inputs_of(random_images())
    mean = inputs.images.mean(dim=(1, 2, 3))
    torch.testing.assert_close(user_file_reward(user_file, "brightness")(inputs).values, mean, rtol=0, atol=0)
    torch.testing.assert_close(user_file_reward(user_file, "as_array")(inputs).values, mean, rtol=0, atol=0)
    torch.testing.assert_close(user_file_reward(user_file, "scaled")(inputs).values, 2 * mean)
    torch.testing.assert_close(user_file_reward(user_file, "scaled", factor=3)(inputs).values, 3 * mean)
    torch.testing.assert_close(user_file_reward(user_file, "scale", factor=3)(inputs).values, 3 * mean)
    output = user_file_reward(user_file, "half_failed")(inputs)
    assert output.valid.tolist() == [True, False, True, False]
    assert output.values.isnan().tolist() == [False, True, False, True]


def test_a_user_file_called_rewards_collides_with_nothing(user_file: str) -> None:
    before = set(sys.modules)
    reward = user_file_reward(user_file, "brightness")
    added = set(sys.modules) - before
    assert len(added) == 1
    assert added.pop().startswith("_flowrl_user_")
    assert "rewards" not in sys.modules
    assert load_target("flowrl.rewards:to_uint8") is to_uint8
    assert reward.name == "brightness"
    assert str(Path(user_file).parent) not in sys.path


def test_a_user_file_runs_once_and_again_after_a_change(tmp_path: Path) -> None:
    file, log = tmp_path / "mine.py", tmp_path / "log"
    source = (
        f"with open({str(log)!r}, 'a') as log:\n    log.write('x')\n"
        "def f(images, prompts, metadata):\n    return [%d] * len(prompts)\n"
    )
    file.write_text(source % 1, encoding="utf-8")
    inputs = inputs_of(random_images())
    first = build_weighted_sum([{"file": str(file), "function": "f"}])
    assert log.read_text(encoding="utf-8") == "x"
    file.write_text(source % 2, encoding="utf-8")
    second = build_weighted_sum([{"file": str(file), "function": "f"}])
    assert [float(total(inputs).values.mean()) for total in (first, second)] == [1.0, 2.0]
    assert first.version != second.version


def test_modules_beside_a_user_file_are_part_of_its_version(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    files = {"mine.py": "import one_beside, math\n", "one_beside.py": "from package.part import x\n",
             "package/part.py": "x = 1\n", "other.py": "y = 1\n"}  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    found = [content_of(str(tmp_path / "mine.py"))]
    for name in files:
        (tmp_path / name).write_text(files[name] + "# changed\n")
        found.append(content_of(str(tmp_path / "mine.py")))
    assert [one != other for one, other in pairwise(found)] == [True, True, True, False]
    alone = hashlib.sha256((tmp_path / "other.py").read_bytes()).hexdigest()[:12]
    assert content_of(str(tmp_path / "other.py")) == alone  # as in files that were written before


def test_nan_of_a_user_function_is_a_failed_item(user_file: str) -> None:
    output = user_file_reward(user_file, "not_finite")(inputs_of(torch.rand(4, 3, 4, 4)))
    assert output.valid.tolist() == [True, False, True, True]
    assert output.errors == {"not_finite": 1}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "raises",
            r"rewards.py:raises raised AttributeError.*\n.*rewards.py:\d+: return images.sharpen\(\)",
        ),
        ("too_few", r"rewards.py:too_few must return 4 numbers, one per image, got shape \[1\]"),
        ("column", r"must return 4 numbers, one per image, got shape \[4, 1\]"),
        ("words", r"rewards.py:words must return 4 numbers, one per image, got list"),
        ("plain_numbers", r"rewards.py:plain_numbers' must return a RewardOutput, got list"),
    ],
)
def test_what_a_user_function_must_not_do(user_file: str, function: str, message: str) -> None:
    reward = user_file_reward(user_file, function)
    with pytest.raises(ValueError, match=message):
        reward(inputs_of(random_images()))


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("brightnes", {}, r"unknown function 'brightnes' \(did you mean 'brightness'\?\); allowed: .*as_array"),
        ("constant", {}, "constant is of type int, not a function"),
        ("two", {}, r"parameters must be \(images, prompts, metadata\) or \(inputs\).*got \(images, prompts\)"),
        ("alone", {}, r"must be \(images, prompts, metadata\) or \(inputs\).*got \(images\)"),
        ("named", {}, r"got \(\*, images, prompts, metadata\)"),
        ("swallows", {}, r"got \(images, prompts, metadata, \*\*options\)"),
        ("positional_option", {}, r"options after a bare \*, got \(images, prompts, metadata, factor=2.0\)"),
        ("scaled", {"facter": 2}, "unknown key 'facter': did you mean 'factor'?"),
        ("scaled", {"factor": "two"}, "factor must be a finite number, got 'two'"),
        ("half_failed", {"device": "cpu"}, "unknown key 'device': the keys here are none"),
    ],
)
def test_user_files_are_checked_before_anything_runs(
    user_file: str, function: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        validate_reward_specs([{"file": user_file, "function": function, "options": options}])


def test_user_files_that_cannot_be_imported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'nowhere.py' does not exist \(looked in "):
        validate_reward_specs([{"file": "nowhere.py", "function": "f"}])
    for source, message in [
        (
            "x = 1\nimport surely_no_such_module\n",
            r"ModuleNotFoundError.*\n.*broken.py:2: import surely_no",
        ),
        ("def f(images:\n", r"SyntaxError.*\n.*broken.py:1: def f\(images:"),
    ]:
        (tmp_path / "broken.py").write_text(source, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            validate_reward_specs([{"file": str(tmp_path / "broken.py"), "function": "f"}])
    (tmp_path / "rewards.txt").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="is not a Python file"):
        validate_reward_specs([{"file": str(tmp_path / "rewards.txt"), "function": "f"}])


def test_a_module_beside_the_file_that_it_imports_is_part_of_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = []
    for factor in (1, -1):
        place = tmp_path / str(factor)
        place.mkdir()
        (place / "helper_of_a_reward.py").write_text(f"FACTOR = {factor}\n")
        (place / "rw.py").write_text(
            "import sys\nfrom pathlib import Path\nsys.path.insert(0, str(Path(__file__).parent))\n"
            "from helper_of_a_reward import FACTOR\n\n"
            "def reward(images, prompts, metadata):\n    return images * FACTOR\n"
        )
        monkeypatch.chdir(place)
        versions.append(user_file_options("rw.py", "reward", {}).build(torch.device("cpu")).version)
        monkeypatch.delitem(sys.modules, "helper_of_a_reward")
    assert versions[0] != versions[1]
