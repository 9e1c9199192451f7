"""`flowrl reward realism`: images that come nearer to drawn scenes are told from those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import avg_pool2d, interpolate

from flowrl.cli import main
from flowrl.config.base import find_config
from flowrl.config.train import load_config, resolve_path, to_yaml
from flowrl.media.images import save_png
from flowrl.prompts.loading import eval_items, read_prompts
from flowrl.rewards.embedded.realism import scene_images

COUNT = 24
CONFIG = find_config("tiny_grpo_geneval")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose images are blurred scenes before and sharp ones after training."""
    config = load_config(CONFIG, [f"eval.num_prompts={COUNT}", f"eval.num_images={COUNT}"])
    folder = tmp_path / "run"
    (folder / "eval").mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert config.prompts.eval is not None
    items = eval_items(read_prompts(resolve_path(config.prompts.eval)), num_prompts=COUNT)
    sharp = scene_images([item.prompt.metadata for item in items], seed=5, stream="made")
    blurred = interpolate(avg_pool2d(sharp, 4), scale_factor=4.0, mode="bilinear", align_corners=False)
    for name, images in (("iteration_000000", blurred), ("iteration_000009", sharp)):
        (folder / "eval" / f"{name}.jsonl").write_text("{}\n" * COUNT, encoding="utf-8")
        (folder / "samples" / name).mkdir(parents=True)
        for place, image in enumerate(torch.unbind(images)):
            save_png(image, folder / "samples" / name / f"{place:04d}.png")
    return folder


@pytest.mark.slow
def test_the_change_is_towards_the_scenes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reward", "realism", str(run)]) == 0
    line = capsys.readouterr().out.splitlines()[1].split()
    before, after, change = float(line[1]), float(line[2]), float(line[3])
    assert before > after + 0.01
    assert change == pytest.approx(after - before, abs=1e-3)
    assert float(line[-1].rstrip(")")) < 0  # the upper end of the interval


def test_runs_without_all_images_are_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reward", "realism", str(tmp_path)]) == 1
    assert "is not a run folder" in capsys.readouterr().err
    next((run / "samples" / "iteration_000009").glob("*.png")).unlink()
    assert main(["reward", "realism", str(run)]) == 1
    assert f"kept {COUNT - 1} of {COUNT} images: train with eval.num_images={COUNT}" in capsys.readouterr().err
    (run / "eval" / "iteration_000009.jsonl").unlink()
    assert main(["reward", "realism", str(run)]) == 1
    assert "needs an evaluation before and one after" in capsys.readouterr().err
