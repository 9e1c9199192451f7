"""What a user's code does to its arguments and to the process does not stay, and how it ends is said in words."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from reward_inputs import inputs_of, random_images, weighted_sum
from toy_pipeline import write_toy

from flowrl.cli import main
from flowrl.pipelines import PIPELINES
from flowrl.rewards import Reward, RewardOutput
from flowrl.rewards.base import user_file as user_code_module
from flowrl.rewards.base.user_file import user_file_options
from flowrl.rewards.comparing.comparators import FileComparator

Make = Callable[..., Reward]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A reward of a file with this source; the function is `reward`."""

    def build(source: str, name: str = "mine.py") -> Reward:
        (tmp_path / name).write_text(source, encoding="utf-8")
        return user_file_options(str(tmp_path / name), "reward", {}).build(torch.device("cpu"))

    return build


def body(line: str, parameters: str = "images, prompts, metadata") -> str:
    return f"import random, sys, os, torch\nimport numpy as np\ndef reward({parameters}):\n    {line}\n"


# ---- arguments -------------------------------------------------------------------------------------------------------


def test_what_a_reward_writes_into_its_arguments_reaches_nobody_else(make: Make) -> None:
    inputs = inputs_of(random_images(), metadata=[{"tags": [1]} for _ in range(4)])
    seen, prompts = inputs.images.clone(), list(inputs.prompts)
    spoils = make(body("images.zero_(); prompts.clear(); metadata[0]['tags'].append(2); return [0.0] * 4"))
    mean = make("def reward(images, prompts, metadata):\n    return images.mean((1, 2, 3))\n", "mean.py")
    output = weighted_sum([spoils, mean], [1.0, 1.0])(inputs)
    torch.testing.assert_close(output.values, seen.mean((1, 2, 3)), rtol=0, atol=0)
    assert torch.equal(inputs.images, seen)
    assert inputs.prompts == prompts
    assert inputs.metadata == [{"tags": [1]}] * 4


def test_the_form_of_one_argument_is_given_copies_of_everything(make: Make) -> None:
    source = (
        "from flowrl.rewards import RewardOutput\nimport torch\nkept = torch.ones(4)\n"
        "def reward(inputs):\n"
        "    for t in [inputs.images, inputs.videos, inputs.group_ids, inputs.sample_ids, inputs.source_images[0][0],\n"
        "              inputs.reference_images[1][0]]:\n"
        "        t += 1\n"
        "    inputs.metadata[0]['x'] = 1\n"
        "    kept.add_(1)\n"
        "    return RewardOutput(values=kept, valid=kept > 0)\n"
    )
    images = random_images()
    inputs = replace(
        inputs_of(images), videos=images[:, None].repeat(1, 2, 1, 1, 1), source_images=[[torch.zeros(3, 2, 2)]] * 4,
        reference_images=[[torch.zeros(3, 2, 2)]] * 4,
    )  # fmt: skip
    before = [inputs.images.clone(), inputs.videos.clone(), inputs.group_ids.clone()]  # type: ignore[union-attr]
    reward = make(source)
    first, second = reward(inputs), reward(inputs)
    assert (first.values.tolist(), second.values.tolist()) == ([2.0] * 4, [3.0] * 4)  # the file's own tensor is copied
    assert all(torch.equal(a, b) for a, b in zip(before, (inputs.images, inputs.videos, inputs.group_ids), strict=True))  # type: ignore[arg-type]
    assert float(inputs.source_images[0][0].sum()) == float(inputs.reference_images[1][0].sum()) == 0  # type: ignore[index]
    assert inputs.metadata[0] == {}


def test_a_comparator_is_given_copies_too(tmp_path: Path) -> None:
    file = tmp_path / "compare.py"
    file.write_text(
        "import torch\ndef better(first, second, prompts, metadata):\n"
        "    torch.set_default_dtype(torch.float64)\n    first.zero_(); metadata[0]['x'] = 1\n"
        "    return [1.0] * len(prompts)\n"
    )
    inputs = inputs_of(random_images())
    seen = inputs.images.clone()
    comparator = FileComparator(file=str(file), function="better").build(torch.device("cpu"))
    comparator.compare(inputs, np.array([[0, 1], [1, 0]]))
    assert torch.equal(inputs.images, seen)
    assert inputs.metadata[0] == {}
    assert torch.get_default_dtype() == torch.float32


# ---- the process -----------------------------------------------------------------------------------------------------

CHANGES = {
    "the default dtype": "torch.set_default_dtype(torch.float64)",
    "the default device": "torch.set_default_device('meta')",
    "the grad mode": "torch.set_grad_enabled(False)",
    "the number of threads": "torch.set_num_threads(torch.get_num_threads() + 1)",
    "deterministic algorithms": (
        "torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled(), warn_only=True)"
    ),
    "the precision of products": "torch.set_float32_matmul_precision('medium')",
    "the working directory": "os.chdir('/')",
}


def settings() -> list[object]:
    return [setting.read() for setting in user_code_module._SETTINGS]


@pytest.mark.parametrize("name", CHANGES)
def test_what_it_changes_of_the_process_is_put_back_and_said_once(
    make: Make, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = settings()
    make(
        f"import os, torch\n{CHANGES[name]}\ndef reward(images, prompts, metadata):\n    return [0.0] * len(prompts)\n"
    )
    assert settings() == before
    at_import = capsys.readouterr().err
    assert f"mine.py' changed {name} to " in at_import
    assert at_import.count("\n") == 1
    reward = make(body(f"{CHANGES[name]}; return [1.0] * len(prompts)"), "other.py")
    inputs = inputs_of(random_images())
    if name == "the grad mode":  # in a call gradients are off anyway
        reward(inputs)
        assert torch.is_grad_enabled()
        return
    for _ in range(2):
        assert reward(inputs).values.tolist() == [1.0] * 4
        assert settings() == before
    assert capsys.readouterr().err.count(f"other.py:reward changed {name} to ") == 1


def test_random_numbers_are_its_own_and_follow_from_counters(make: Make) -> None:
    reward = make(body("return [random.random(), np.random.rand(), float(torch.rand(())), 0.0]"))
    seeds = make(body("random.seed(1); np.random.seed(1); torch.manual_seed(1); return [0.0] * 4"), "seeds.py")
    inputs = inputs_of(random_images())

    def states() -> list[object]:
        return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]  # type: ignore[index,union-attr]

    before = states()
    first = reward(inputs).values
    seeds(inputs)
    assert states() == before
    torch.rand(3), random.random(), np.random.rand()
    assert torch.equal(first, reward(inputs).values)
    assert not torch.equal(first, reward(replace(inputs, iteration=1)).values)


def test_its_import_path_is_there_in_its_calls_only(make: Make, tmp_path: Path) -> None:
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "found_beside_it.py").write_text("value = 7.0\n")
    reward = make(
        f"import sys\nsys.path.insert(0, {str(tmp_path / 'beside')!r})\n"
        "def reward(images, prompts, metadata):\n    import found_beside_it\n"
        "    return [found_beside_it.value] * len(prompts)\n"
    )
    assert str(tmp_path / "beside") not in sys.path
    assert reward(inputs_of(random_images())).values.tolist() == [7.0] * 4
    assert str(tmp_path / "beside") not in sys.path
    sys.modules.pop("found_beside_it")


# ---- how it ends -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["sys.exit()", "sys.exit(3)", "raise BaseException('out')", "exit()"])
def test_the_end_of_the_program_is_an_error_with_its_line(make: Make, line: str) -> None:
    with pytest.raises(ValueError, match=r"(?s)mine.py' cannot be imported: (SystemExit|BaseException).*mine.py:2"):
        make(f"import sys\n{line}\n")
    reward = make(body(line))
    with pytest.raises(ValueError, match=r"(?s)mine.py:reward raised (SystemExit|BaseException).*mine.py:4"):
        reward(inputs_of(random_images()))


def test_a_command_fails_where_a_reward_would_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PIPELINES, "sd3", "toy_pipeline")
    (tmp_path / "mine.py").write_text(body("sys.exit(0)"))
    rewards = f"rewards=[{{file: {tmp_path / 'mine.py'}, function: reward}}]"
    assert main(["train", str(write_toy(tmp_path)), f"out={tmp_path / 'out'}", rewards]) == 1
    assert "mine.py:reward raised SystemExit: 0" in capsys.readouterr().err


def test_an_interrupt_goes_through(make: Make) -> None:
    with pytest.raises(KeyboardInterrupt):
        make(body("raise KeyboardInterrupt"))(inputs_of(random_images()))


def test_complex_numbers_are_refused_and_truth_values_are_numbers(make: Make) -> None:
    for line in ("return torch.ones(4, dtype=torch.complex64)", "return [1j] * 4", "return np.ones(4) * 1j"):
        with pytest.raises(ValueError, match=r"mine.py:reward must return 4 real numbers, got complex"):
            make(body(line))(inputs_of(random_images()))
    for line in ("return torch.ones(4, dtype=torch.bool)", "return [True] * 4", "return np.ones(4) > 0"):
        output: RewardOutput = make(body(line))(inputs_of(random_images()))
        assert output.values.tolist() == [1.0] * 4
        assert output.values.dtype == torch.float32


def test_a_long_wait_says_what_for(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(user_code_module, "IMPORT_SECONDS", 0.02)
    monkeypatch.setattr(user_code_module, "CALL_SECONDS", 0.02)
    reward = make("import time\ntime.sleep(0.1)\n" + body("import time; time.sleep(0.1); return [0.0] * 4"))
    assert "the import of reward file" in (shown := capsys.readouterr().err)
    assert "is still at work after 0.02 s" in shown
    for _ in range(2):
        reward(inputs_of(random_images()))
    assert capsys.readouterr().err.count("mine.py:reward is still at work after 0.02 s") == 1
    monkeypatch.setattr(user_code_module, "IMPORT_SECONDS", 60.0)
    monkeypatch.setattr(user_code_module, "CALL_SECONDS", 60.0)
    make(body("return [0.0] * 4"), "quick.py")(inputs_of(random_images()))
    time.sleep(0.05)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("return torch.empty(4, device='meta')", "returned a tensor on the device meta, which holds no numbers"),
        ("return [torch.empty((), device='meta')] * 4", "got list of Tensor: "),
        ("return torch.eye(4).to_sparse()", r"returned a tensor of layout sparse_coo, .* its to_dense\(\)"),
        ("return torch.ones(4).to_sparse()", "returned a tensor of layout sparse_coo"),
        (
            "return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)",
            r"returned a quantised tensor: .*dequan",
        ),
        (
            "return [0.1, None, 0.2, None]",
            r"got list with None in it \(give NaN, float\('nan'\), for an item that failed",
        ),
        ("return np.array([0.1, None, 0.2, 0.3])", "got ndarray with None in it"),
        ("return np.array(['a'] * 4)", "got ndarray of str_"),
        ("return ['a'] * 4", "got list of str"),
        ("return 'good'", "got str: "),
        ("return None", r"got NoneType \(is a return missing\?\)"),
        ("return (1.0 for _ in range(4))", r"got generator \(make a list of its numbers"),
        ("async def later(): return 1\n    return later()", r"got coroutine \(write def, not async def\)"),
        ("return dict.fromkeys(range(4), 1.0)", r"got dict \(make a list of its numbers"),
        ("return [[1.0]] * 4", r"got shape \[4, 1\]"),
        ("return [[1.0], [1.0, 2.0], [], []]", "got list of list: "),
        ("return [10 ** 400] * 4", "got list of int: "),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_is_no_list_of_numbers_is_named(make: Make, line: str, said: str) -> None:
    reward = make(body(line))
    with pytest.raises(ValueError, match=rf"mine.py:reward must return 4 numbers, one per image, (.*){said}"):
        reward(inputs_of(random_images()))


def test_arrays_of_any_memory_are_numbers(make: Make) -> None:
    for line in ("return np.arange(4.0)[::-1]", "return np.broadcast_to(1.0, 4)", "return torch.arange(4).half()"):
        assert make(body(line))(inputs_of(random_images())).valid.all()


@pytest.mark.parametrize("line", ["torch.empty(4, device='meta')", "torch.ones(4).to_sparse()"])
def test_outputs_hold_plain_tensors(make: Make, line: str) -> None:
    source = (
        "import torch\nfrom flowrl.rewards import RewardOutput\ndef reward(inputs):\n"
        f"    return RewardOutput(values={line}, valid=torch.ones(4, dtype=torch.bool), parts={{}}, errors={{}})\n"
    )
    with pytest.raises(
        ValueError, match=r"mine.py:reward': values is a tensor (on the device meta|of layout sparse_coo)"
    ):
        make(source)(inputs_of(random_images()))
