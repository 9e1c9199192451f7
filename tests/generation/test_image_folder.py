"""Which prompt belongs to which image of a folder, which images are a group, and that all are read in one way."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flowrl import cli
from flowrl.generation.folders import ImageFile
from flowrl.generation.image_folder import read_items, score_items
from flowrl.rewards import FunctionReward, RewardInputs, RewardOutput, output_of
from flowrl.rewards.image_files import image_files


def save(path: Path, colour: str = "red") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4), colour).save(path)
    return path


def texts(path: Path, count: int) -> Path:
    path.write_text("".join(f"prompt {number}\n" for number in range(count)), encoding="utf-8")
    return path


def brightness(inputs: RewardInputs) -> RewardOutput:
    return output_of([float(image.mean()) for image in inputs.images], inputs)


def test_kinds_of_files_score_as_their_plain_likes(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 64 * 64).round().astype(np.uint16).reshape(64, 64)
    half = np.zeros((64, 64, 4), dtype=np.uint8)
    half[..., 0], half[:, :32, 3] = 255, 255
    turned = Image.Exif()
    turned[0x0112] = 6
    wide = Image.fromarray(np.tile(np.arange(48, dtype=np.uint8)[:, None, None], (1, 64, 3)))
    Image.fromarray(ramp).save(tmp_path / "a.png")
    Image.fromarray(np.rint(ramp / 257).astype(np.uint8)).save(tmp_path / "b.png")
    Image.fromarray(half).save(tmp_path / "c.png")
    wide.save(tmp_path / "d.png", exif=turned)
    wide.transpose(Image.Transpose.ROTATE_270).save(tmp_path / "e.png")
    reward = FunctionReward(name="mean", score=brightness, needs=frozenset({"images"}), version="1")
    items = read_items(tmp_path, prompt="x")
    scores = score_items(reward, items, key="mean", batch_size=5).values
    assert scores[0] == scores[1] == pytest.approx(0.5, abs=1e-3)
    assert scores[2] == pytest.approx(2 / 3, abs=1e-3)
    assert [item.pixels().shape for item in items[3:]] == [(64, 48, 3)] * 2
    assert np.array_equal(items[3].pixels(), items[4].pixels())
    seen: list[torch.Tensor] = []

    def see(inputs: RewardInputs) -> RewardOutput:
        seen.append(inputs.images)
        return brightness(inputs)

    shown = FunctionReward(name="see", score=see, needs=frozenset({"images"}), version="1")
    score_items(shown, items[3:], key="see", batch_size=2)
    assert torch.equal(seen[0][0], seen[0][1])


def test_prompts_of_a_text_file_go_by_the_numbers_in_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(12):
        save(tmp_path / "im" / f"{number}.png")
    items = read_items(tmp_path / "im", prompts=texts(tmp_path / "p.txt", 12))
    assert [(item.file, item.prompt) for item in items] == [(f"{k}.png", f"prompt {k}") for k in range(12)]
    assert "go to the images of" in (said := capsys.readouterr().err)
    assert "by their numbers: 2.png before 10.png" in said
    for number in range(12):
        save(tmp_path / "padded" / f"{number:02d}.png")
    read_items(tmp_path / "padded", prompts=tmp_path / "p.txt")
    assert capsys.readouterr().err == ""


def test_digits_of_any_script_are_numbers(tmp_path: Path) -> None:
    names = [f"img_{digits}.png" for digits in ("\uff12", "\uff11\uff10")]
    for name in names:
        save(tmp_path / "im" / name)
    items = read_items(tmp_path / "im", prompts=texts(tmp_path / "p.txt", 2))
    assert [item.file for item in items] == names


def test_what_systems_leave_in_a_folder_is_no_image_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.png", "._a.png", ".ipynb_checkpoints/a.png", "__MACOSX/a.png"):
        save(tmp_path / "im" / name)
    assert [item.file for item in read_items(tmp_path / "im", prompt="x")] == ["a.png"]
    assert "hidden files are no images of a folder: 3 left out, such as ._a.png" in capsys.readouterr().err
    assert image_files(str(tmp_path / "im")) == {None: [tmp_path / "im" / "a.png"]}


def test_folders_count_by_value_too(tmp_path: Path) -> None:
    for name in ("run_2/1.png", "run_10/1.png", "run_2/9.png", "run_2/10.png"):
        save(tmp_path / "im" / name)
    items = read_items(tmp_path / "im", prompts=texts(tmp_path / "p.txt", 4))
    assert [item.file for item in items] == ["run_2/1.png", "run_2/9.png", "run_2/10.png", "run_10/1.png"]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("1.png", "01.png", "2.png"), r"holds (01\.png and 1\.png|1\.png and 01\.png), of which neither comes first"),
        (("1.png", "1.jpg", "2.png"), r"holds 1\.jpg and 1\.png, of which neither comes first"),
        (("cat_1.png", "cat_2.png", "dog_1.png"), "by name cat_2.png comes before dog_1.png, by number after it"),
        (("a_3.png", "b_2.png", "c_1.png"), "by name a_3.png comes before b_2.png, by number after it"),
        (("t_0.25.png", "t_0.5.png", "t_1.0.png"), "by name t_0.25.png comes before t_0.5.png, by number after it"),
        (("0a1f.png", "10bc.png", "9f00.png"), "by name 10bc.png comes before 9f00.png, by number after it"),
        (("x2/0.png", "y1/0.png", "x3/0.png"), "by name x3 comes before y1, by number after it"),
    ],
)
def test_names_without_one_order_are_refused(tmp_path: Path, names: tuple[str, ...], said: str) -> None:
    for name in names:
        save(tmp_path / "im" / name)
    with pytest.raises(ValueError, match=said):
        read_items(tmp_path / "im", prompts=texts(tmp_path / "p.txt", 3))
    assert len(read_items(tmp_path / "im", prompt="x")) == 3  # one prompt for all needs no order


@pytest.mark.parametrize(
    "names", [("a.png", "b.png"), ("sd3_a.png", "sd3_b.png"), ("cat_1.png", "dog_2.png"), ("a/1.png", "b/1.png")]
)
def test_names_with_one_order_are_taken(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        save(tmp_path / "im" / name)
    items = read_items(tmp_path / "im", prompts=texts(tmp_path / "p.txt", 2))
    assert tuple(item.file for item in items) == names


def test_groups_are_by_all_that_is_asked(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"source": "red.png"}, {"source": "same_red.png"}, {"source": "blue.png"}, {"reference_images": ["blue.png"]},
        {"source": "red.png", "negative_prompt": "ugly"}, {}, {},
    ]  # fmt: skip
    for name, colour in (("red", "red"), ("same_red", "red"), ("blue", "blue")):
        save(tmp_path / f"{name}.png", colour)
    for place in range(len(rows)):
        save(tmp_path / "im" / f"{place}.png")
    listed = tmp_path / "p.jsonl"
    lines = [json.dumps({"file": f"{place}.png", "prompt": "make it red", **row}) for place, row in enumerate(rows)]
    listed.write_text("\n".join(lines), encoding="utf-8")
    items = read_items(tmp_path / "im", prompts=listed)
    assert [item.index for item in items] == [0, 0, 1, 2, 3, 4, 4]
    assert items[0].source_images == (tmp_path / "red.png",)
    assert items[3].reference_images == (tmp_path / "blue.png",)


def test_units_of_a_panel_tell_sources_apart(tmp_path: Path) -> None:
    from flowrl.evaluation.panel import ScoredImages

    images = [
        ImageFile(file="a", path=tmp_path, prompt="x", index=0, source_images=(tmp_path / name,)) for name in "ab"
    ]
    assert len(set(ScoredImages(images=images, values={}, rows=[]).units)) == 2


def test_a_number_is_read_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    half = np.zeros((8, 8, 4), dtype=np.uint8)
    half[..., 0], half[:, :4, 3] = 255, 255
    (tmp_path / "im").mkdir()
    Image.fromarray(half).save(tmp_path / "im" / "a.png")
    (tmp_path / "mean.py").write_text(
        "def mean(images, prompts, metadata): return images.mean(dim=(1, 2, 3)).tolist()", encoding="utf-8"
    )
    rewards, out = tmp_path / "rewards.yaml", tmp_path / "scores.jsonl"
    rewards.write_text(f"rewards: [{{file: {tmp_path / 'mean.py'}, function: mean}}]", encoding="utf-8")
    assert cli.main(["reward", "score", str(rewards), str(tmp_path / "im"), "--prompt", "x", "--out", str(out)]) == 0
    assert json.loads(out.read_text())["values"]["mean"] == pytest.approx(2 / 3, abs=1e-6)
    capsys.readouterr()
