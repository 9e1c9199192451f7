"""`flowrl sample`: files, repeatability, and that training shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_runs import TinyRuns, tiny_runs
from torch import Tensor
from toy_pipeline import Toy

from flowrl.cli import main
from flowrl.generation import drawing
from flowrl.generation import sample as module
from flowrl.generation.sample import BATCH, parse_seeds, wanted_prompts
from flowrl.prompts.loading import Prompt
from flowrl.training import heldout as evaluate


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_sd3_folder: Path) -> TinyRuns:
    return tiny_runs(tmp_path_factory.mktemp("sample"), tiny_sd3_folder)


@pytest.fixture(scope="module")
def run(runs: TinyRuns) -> Path:
    """Trained hard enough that eight-bit images differ."""
    return runs.train("run", "num_iterations=3", "optim.lr=1", "clip_range=0.9")


def _sample(source: Path, out: Path, *options: str) -> dict[str, bytes]:
    assert (
        main(["sample", str(source), "--prompt", "a red circle", "--seeds", "0-1,5", "--out", str(out), *options]) == 0
    )
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.mark.slow
def test_an_image_a_prompt_and_seed_and_a_grid(run: Path, tmp_path: Path) -> None:
    files = _sample(run, tmp_path, "--prompt", "two blue squares", "--prompt", "a red circle")
    assert set(files) == {f"{p:03d}_seed{s}.png" for p in (0, 1) for s in (0, 1, 5)} | {"grid.png"}
    assert len(set(files.values())) == 7
    with Image.open(tmp_path / "000_seed0.png") as image, Image.open(tmp_path / "grid.png") as sheet:
        assert image.size == (64, 64)
        assert sheet.size[0] >= 3 * 64


def test_another_size_precision_and_batch_are_flags(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--height", "32", "--width", "48", "--dtype", "bfloat16", "--batch-size", "2", "--device", "cpu")
    files = _sample(run, tmp_path, *flags, "--steps", "2", "--guidance", "1")
    with Image.open(tmp_path / "000_seed0.png") as image:
        assert image.size == (48, 32)
    assert len(files) == 4
    assert "2 steps, guidance 1, 48 x 32 pixels, 3 seeds from 0 to 5" in capsys.readouterr().out


@pytest.mark.slow
def test_the_lines_of_the_docs_draw_the_same_image_in_stock_diffusers(
    run: Path, tiny_sd3_folder: Path, tmp_path: Path
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "running.md").read_text(encoding="utf-8")
    code = [part.split("```")[0] for part in text.split("```python\n") if "pipe" in part.split("```")[0]]
    lines = "\n".join(code).replace("runs/first", str(run))
    found: dict[str, Any] = {"MODEL": str(tiny_sd3_folder), "PROMPT": "a red circle"}
    exec(lines, found)
    given = ["--seeds", "7", "--steps", "10", "--guidance", "3", "--out", str(tmp_path)]
    assert main(["sample", str(run), "--prompt", "a red circle", *given]) == 0
    with Image.open(tmp_path / "000_seed7.png") as image:
        ours, stock = (np.asarray(one, dtype=np.int64) for one in (image, found["image"]))
    assert abs(ours - stock).max() <= 1, "one step of 255"
    assert len(code) == 2


def test_a_seed_gives_the_same_files_again(run: Path, tmp_path: Path) -> None:
    assert _sample(run, tmp_path / "a") == _sample(run, tmp_path / "b")


def test_an_image_does_not_depend_on_its_neighbours_seeds(run: Path, tmp_path: Path) -> None:
    assert main(["sample", str(run), "--prompt", "a red circle", "--seeds", "5,0,1", "--out", str(tmp_path / "c")]) == 0
    _sample(run, tmp_path / "a")
    for path in (tmp_path / "c").glob("0*.png"):
        with Image.open(path) as alone, Image.open(tmp_path / "a" / path.name) as together:
            ours, theirs = (np.asarray(one, dtype=np.int64) for one in (alone, together))
        assert abs(ours - theirs).max() <= 1, "a batch of another size rounds otherwise: one step of 255"


@pytest.mark.slow
def test_training_shows_and_base_is_the_model_before(run: Path, tiny_sd3_folder: Path, tmp_path: Path) -> None:
    tuned, base = _sample(run, tmp_path / "tuned"), _sample(run, tmp_path / "base", "--before-training")
    assert all(tuned[name] != base[name] for name in tuned)
    steps = ("--steps", "3", "--max-sequence-length", "16", "--guidance", "1")
    assert _sample(tiny_sd3_folder, tmp_path / "model", *steps) == base
    assert _sample(tiny_sd3_folder, tmp_path / "lora", *steps, "--lora", str(run / "lora")) == tuned


def test_a_run_without_a_lora_yet_says_so(runs: TinyRuns, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun = runs.folder / "begun"
    begun.mkdir()
    (begun / "config.yaml").write_text((run / "config.yaml").read_text())
    assert main(["sample", str(begun), "--prompt", "a", "--out", str(runs.folder / "none")]) == 1
    assert "has no lora/ yet: finish it with" in capsys.readouterr().err


def test_prompts_without_a_negative_prompt_take_that_of_the_run(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "a"}\n{"prompt": "b", "negative_prompt": "grey"}\n{"prompt": "c", "negative_prompt": ""}'
    )
    rows = wanted_prompts(["d"], [], file, "blurred")
    assert [(row.text, row.negative) for row in rows] == [("d", "blurred"), ("a", "blurred"), ("b", "grey"), ("c", "")]


@pytest.mark.parametrize(("fps", "sizes"), [(8.0, [1] * 20), (0.0, [BATCH, 4])])
def test_videos_are_drawn_one_by_one(
    fps: float, sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []

    def draw(batch: Sequence[tuple[Prompt, int]]) -> tuple[Tensor, list[None]]:
        drawn.append(len(batch))
        return torch.zeros(len(batch), *((2,) if fps else ()), 3, 16, 16), [None] * len(batch)

    monkeypatch.setattr(module, "load_drawing", lambda source, settings, device: (draw, fps))
    monkeypatch.setattr(module, "save_mp4", lambda clip, path, fps, track: None)
    arguments = ["sample", "asset:tiny-wan", "--prompt", "a", "--seeds", "0-19", "--out", str(tmp_path / "out")]
    assert main(arguments) == 0
    assert drawn == sizes


def test_noise_goes_to_where_the_network_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def arrived(velocity: Any, x: Tensor, schedule: Any) -> Tensor:
        return x

    monkeypatch.setattr(evaluate, "ode_rollout", arrived)
    monkeypatch.setattr(drawing, "ode_rollout", arrived)
    pipeline = Toy()
    pipeline.denoiser.to("meta")
    x, schedule = torch.zeros(1, 3, 2, 2), pipeline.schedule(2, "diffusers")
    assert evaluate.generate(pipeline, ["a"], x, schedule, guidance_scale=1.0).device.type == "meta"
    arrived_at: list[Tensor] = []

    def decode(x: Tensor) -> Tensor:
        arrived_at.append(x)
        return torch.zeros(1)

    monkeypatch.setattr(pipeline, "decode", decode)
    drawing.draw(pipeline, lambda prompts: lambda x, *at: x, [], x, schedule)
    assert arrived_at[0].device.type == "meta"


def test_seed_lists() -> None:
    assert parse_seeds("0-3") == [0, 1, 2, 3]
    assert parse_seeds(" 7, 2-3,7") == [7, 2, 3]
    assert parse_seeds(range(2)) == [0, 1]
    assert parse_seeds(5) == [5]
