"""Arithmetic of frozen networks: what it changes, that it ends, and what is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reward_inputs import weighted_sum
from toy_pipeline import write_toy

from flowrl.cli import main
from flowrl.pipelines import PIPELINES
from flowrl.pipelines.families.sd3 import FAMILY
from flowrl.rewards import FunctionReward, RewardInputs, RewardOutput
from flowrl.rewards.judges import local_chat
from flowrl.runtime.precision import arithmetic, network_autocast, refuse_unable

CPU = torch.device("cpu")


def _product() -> torch.dtype:
    with network_autocast(CPU):
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def test_bfloat16_holds_inside_and_in_its_own_thread_alone() -> None:
    with ThreadPoolExecutor(1) as other:
        with arithmetic("bfloat16"):
            assert _product() == torch.bfloat16
            assert other.submit(_product).result() == torch.float32
            with arithmetic("float32"):
                assert _product() == torch.float32
            assert _product() == torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            assert _product() == torch.float32  # a caller's region does not reach frozen networks


@arithmetic("tf32")
def _fails_in_tf32() -> None:
    raise ValueError(f"{torch.get_float32_matmul_precision()} {torch.backends.cudnn.allow_tf32}")


def test_tf32_is_put_back_after_an_error_too() -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        with pytest.raises(ValueError, match="high True"):
            _fails_in_tf32()
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == (before[0], False)
    finally:
        torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.parametrize(("capability", "able"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_tf32_needs_a_device_that_has_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], able: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if able:
        refuse_unable("tf32", "cuda", "reward_dtype")
    else:
        with pytest.raises(ValueError, match=r"reward_dtype=tf32 needs .* 8.0 .* set reward_dtype to float32"):
            refuse_unable("tf32", "cuda", "reward_dtype")


def test_a_run_is_refused_before_its_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_sd3_folder: Path
) -> None:
    monkeypatch.setitem(PIPELINES, "sd3", "toy_pipeline")
    assert main(["train", str(write_toy(tmp_path)), f"out={tmp_path / 'run'}", "reward_dtype=tf32"]) == 1
    assert "reward_dtype=tf32 needs a CUDA device" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(ValueError, match=r"pipeline\.vae_dtype=tf32 needs a CUDA device"):
        FAMILY.load(str(tiny_sd3_folder), device="cpu", vae_dtype="tf32")


def test_images_of_an_autoencoder_in_bfloat16_are_near_and_float32(tiny_sd3_folder: Path) -> None:
    plain, half = (FAMILY.load(str(tiny_sd3_folder), device="cpu", vae_dtype=kind) for kind in ("float32", "bfloat16"))
    latents = torch.randn(3, *plain.latent_shape, generator=torch.Generator().manual_seed(0))
    exact, near = plain.decode(latents), half.decode(latents)
    assert near.dtype == torch.float32
    assert 0 < _rms(exact - near) < 5e-3  # 46 dB
    again, found = plain.encode_images(exact), half.encode_images(exact)
    assert found.dtype == torch.float32
    assert 0 < _rms(again - found) < 3e-2 * _rms(again)


def _rms(values: torch.Tensor) -> float:
    return float(values.double().square().mean().sqrt())


def test_rewards_that_do_not_learn_go_by_the_key() -> None:
    def score(inputs: RewardInputs) -> RewardOutput:
        values = torch.full((len(inputs),), float(_product() == torch.bfloat16))
        return RewardOutput(values=values, valid=torch.ones(len(inputs), dtype=torch.bool))

    frozen = FunctionReward(name="frozen", score=score, needs=frozenset(), version="1")
    learning = replace(frozen, name="learning", kind="adversarial")
    inputs = RewardInputs(
        prompts=["a"], images=torch.zeros(1, 3, 2, 2), metadata=[{}], group_ids=torch.zeros(1, dtype=torch.int64),
        sample_ids=torch.zeros(1, dtype=torch.int64),
    )  # fmt: skip
    total = replace(weighted_sum([frozen, learning], [1.0, 1.0]), dtype="bfloat16")
    assert {key: float(value) for key, value in total(inputs).parts.items()} == {
        "reward/frozen": 1.0, "reward/learning": 0.0
    }  # fmt: skip


@pytest.mark.parametrize(
    ("device", "given", "dtype"),
    [("cpu", None, torch.float32), ("cuda", None, torch.bfloat16), ("cuda", "float32", torch.float32)],
)
def test_a_judge_is_in_bfloat16_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, given: Any, dtype: torch.dtype
) -> None:
    tokenizer = SimpleNamespace(padding_side="right", pad_token_id=0)
    loaded = list[torch.dtype]()

    def load(model: str, **options: Any) -> tuple[None, SimpleNamespace]:
        loaded.append(options["dtype"])
        return None, SimpleNamespace(chat_template="{}", tokenizer=tokenizer)

    monkeypatch.setattr(local_chat, "load_vision_language", load)
    judge: Any = local_chat.LocalChat(model="some/model", dtype=given).build(torch.device(device))
    assert loaded == [dtype]
    assert judge.options.dtype == str(dtype).removeprefix("torch.")
