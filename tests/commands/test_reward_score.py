"""`flowrl reward score`: which images with which prompts, in which batches, and what is written and printed."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evaluation_folders import raising
from PIL import Image

from flowrl.generation.folders import ImageFile
from flowrl.generation.image_folder import check_needs, make_batches, read_items, score_items
from flowrl.generation.named_rewards import reward_specs
from flowrl.rendering.terminal_text import align, cut
from flowrl.rewards import FunctionReward, RewardInputs, RewardOutput, output_of
from flowrl.rewards.base.specs import validate_reward_specs
from flowrl.rewards.jpeg import jpeg_bytes


def save(path: Path, size: tuple[int, int] = (8, 8), red: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (red, 0, 0)).save(path)
    return path


def run(*arguments: str | Path) -> int:
    return raising("reward score", *arguments)


def redness(inputs: RewardInputs) -> RewardOutput:
    """Mean of the red channel; a black image fails."""
    values = [float(image[0].mean()) for image in inputs.images]
    errors = [None if value else "no_red" for value in values]
    return output_of([value or None for value in values], inputs, {"twice": [2 * v for v in values]}, errors)


def reward(score: Any = redness, kind: str = "pointwise", needs: Sequence[str] = ("images",)) -> FunctionReward:
    return FunctionReward(name="red", score=score, needs=frozenset(needs), version="red", kind=kind)


# ---- folders ---------------------------------------------------------------------------------------------------------


def test_one_prompt_for_all_images_at_any_depth(tmp_path: Path) -> None:
    for name in ("b.png", "a/2.jpg", "a/10.webp", "a/x.JPEG"):
        save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no image", encoding="utf-8")
    items = read_items(tmp_path, prompt="a dog")
    assert [item.file for item in items] == ["a/2.jpg", "a/10.webp", "a/x.JPEG", "b.png"]
    assert {item.prompt for item in items} == {"a dog"}
    assert {item.index for item in items} == {0}


def test_without_prompts_the_images_of_a_folder_are_a_group(tmp_path: Path) -> None:
    for name in ("a/1.png", "b/1.png", "a/2.png"):
        save(tmp_path / name)
    assert [(item.file, item.index) for item in read_items(tmp_path)] == [
        ("a/1.png", 0),
        ("a/2.png", 0),
        ("b/1.png", 1),
    ]


def test_a_text_file_gives_each_image_its_prompt(tmp_path: Path) -> None:
    for name in ("1.png", "2.png", "3.png"):
        save(tmp_path / "images" / name)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\na dog\na cat\n", encoding="utf-8")
    items = read_items(tmp_path / "images", prompts=prompts)
    assert [(item.prompt, item.index) for item in items] == [("a cat", 0), ("a dog", 1), ("a cat", 0)]
    prompts.write_text("a cat\na dog\n", encoding="utf-8")
    with pytest.raises(ValueError, match="holds 2 prompts for the 3 images"):
        read_items(tmp_path / "images", prompts=prompts)


def test_a_jsonl_file_names_images_and_brings_metadata(tmp_path: Path) -> None:
    for name in ("p/1.png", "p/2.png", "p/3.png", "lists/source.png"):
        save(tmp_path / name)
    rows = [
        {"file": "3.png", "prompt": "x", "tag": "t", "source_images": "source.png"},
        {"file": "1.png", "prompt": "y"},
    ]
    prompts = tmp_path / "lists" / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    items = read_items(tmp_path / "p", prompts=prompts)
    assert [(item.file, item.prompt) for item in items] == [("3.png", "x"), ("1.png", "y")]
    assert items[0].record == rows[0]
    assert items[0].source_images == (tmp_path / "lists" / "source.png",)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x"}, "entry 1: has no text under 'file'"),
        ({"file": "no.png", "prompt": "x"}, r"entry 1: names 'no.png', which is not there"),
        ({"file": "1.png", "prompt": "x", "source_images": 3}, "source_images must be a path or a list"),
        ({"file": "1.png", "prompt": "x", "reference_images": ["r.png"]}, r"reference_images names .*r\.png"),
    ],
)
def test_bad_lines_are_refused(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    save(tmp_path / "1.png")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps(row), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_items(tmp_path, prompts=prompts)


def test_genevals_layout_names_its_own_prompts(tmp_path: Path) -> None:
    for number, prompt in enumerate(("a cup", "two cups")):
        folder = tmp_path / f"{number:05d}"
        save(folder / "samples" / "0000.png")
        save(folder / "samples" / "0001.png")
        save(folder / "grid.png")  # no sample
        row = {"tag": "counting", "include": [], "prompt": prompt}
        (folder / "metadata.jsonl").write_text(json.dumps(row), encoding="utf-8")
    items = read_items(tmp_path)
    assert [(item.file, item.prompt, item.index) for item in items] == [
        ("00000/samples/0000.png", "a cup", 0), ("00000/samples/0001.png", "a cup", 0),
        ("00001/samples/0000.png", "two cups", 1), ("00001/samples/0001.png", "two cups", 1),
    ]  # fmt: skip
    assert items[2].record["tag"] == "counting"
    with pytest.raises(ValueError, match="names its own prompts"):
        read_items(tmp_path, prompt="x")


def test_folders_without_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        read_items(tmp_path / "none")
    with pytest.raises(ValueError, match="holds no images"):
        read_items(tmp_path, prompt="x")
    with pytest.raises(ValueError, match="give one of them"):
        read_items(tmp_path, prompt="x", prompts=tmp_path / "p.txt")


# ---- rewards ---------------------------------------------------------------------------------------------------------


def test_rewards_of_a_command_line(tmp_path: Path) -> None:
    assert reward_specs("hps") == [{"name": "hps"}]
    assert reward_specs("clip_score", ["scale=paper"]) == [{"name": "clip_score", "options": {"scale": "paper"}}]
    assert reward_specs("clip_score,aesthetic", ["clip_score.threshold=0.3", "aesthetic.head=./x"]) == [
        {"name": "clip_score", "options": {"threshold": 0.3}}, {"name": "aesthetic", "options": {"head": "./x"}},
    ]  # fmt: skip
    nested = reward_specs("rank", ["reward=jpeg_compressibility", "options.scale=ddpo"])
    assert nested == [{"name": "rank", "options": {"reward": "jpeg_compressibility", "options": {"scale": "ddpo"}}}]
    mine = reward_specs("hps,my/own.py:sharp", ["sharp.radius=3"])
    assert mine == [{"name": "hps"}, {"file": "my/own.py", "function": "sharp", "options": {"radius": 3}}]
    own = tmp_path / "own.py"
    own.write_text("def sharp(images, prompts, metadata):\n    return [0.0] * len(prompts)\n")
    with pytest.raises(ValueError, match="unknown function 'FUNCTION'; allowed: sharp"):
        validate_reward_specs(reward_specs(str(own)))
    config = tmp_path / "rewards.yaml"
    config.write_text("rewards:\n  - {name: hps, weight: 0.5, options: {version: v2.0}}\n", encoding="utf-8")
    assert reward_specs(str(config), ["hps.version=v2.1"]) == [{"name": "hps", "options": {"version": "v2.1"}}]


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        ("hpz", [], "did you mean 'hps'"),
        ("mine", [], "Or give FILE.py:FUNCTION"),
        ("hps,aesthetic", ["head=x"], r"begin with the name of one, hps\.KEY=VALUE"),
        ("hps", ["version"], "KEY=VALUE"),
    ],
)
def test_bad_command_lines_are_refused(names: str, options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reward_specs(names, options)


def test_what_a_folder_cannot_feed_is_refused(tmp_path: Path) -> None:
    items = [ImageFile(file="a.png", path=save(tmp_path / "a.png"), prompt="", index=0)]
    for unfit, message in (
        (reward(kind="adversarial"), "learns during a training run"),
        (reward(needs=("videos",)), "judges videos"),
        (reward(needs=("images", "prompts")), "reads prompts: give `prompt`"),
        (reward(needs=("images", "source_images")), r"needs source_images, and a\.png has none"),
    ):
        with pytest.raises(ValueError, match=message):
            check_needs(unfit, items, key="red", prompts_given=False)
    check_needs(reward(needs=("images", "prompts")), items, key="red", prompts_given=True)


# ---- batches ---------------------------------------------------------------------------------------------------------


def items_of(groups: Sequence[int]) -> list[ImageFile]:
    return [ImageFile(file=str(i), path=Path(str(i)), prompt=f"p{g}", index=g) for i, g in enumerate(groups)]


def test_batches_hold_one_size_and_keep_to_theirs() -> None:
    sizes = [(8, 8), (4, 4), (8, 8), None, (8, 8), (4, 4)]
    found = make_batches(items_of([0] * 6), sizes, whole_groups=False, batch_size=2)
    assert found == [[0, 2], [4], [1, 5]]


def test_groups_stay_whole() -> None:
    found = make_batches(items_of([0, 1, 0, 1, 0, 2]), [(8, 8)] * 6, whole_groups=True, batch_size=2)
    assert found == [[0, 2, 4], [1, 3], [5]]
    assert make_batches(items_of([0, 1, 0, 1, 0, 2]), [(8, 8)] * 6, whole_groups=True, batch_size=5) == [
        [0, 2, 4, 1, 3],
        [5],
    ]


def test_a_group_of_several_sizes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"those of 'p0' have several sizes, such as \(4, 4\) and \(8, 8\)"):
        make_batches(items_of([0, 0]), [(8, 8), (4, 4)], whole_groups=True, batch_size=4)


def test_items_get_their_own_values_whatever_the_batches(tmp_path: Path) -> None:
    reds = [10, 200, 0, 90, 30]
    sizes = [(8, 8), (6, 4), (8, 8), (6, 4), (8, 8)]
    files = [save(tmp_path / f"{i}.png", size, red) for i, (size, red) in enumerate(zip(sizes, reds, strict=True))]
    broken = tmp_path / "5.png"
    broken.write_bytes(files[0].read_bytes()[:45])  # readable as far as the header
    (tmp_path / "6.png").write_bytes(b"nothing")
    items = read_items(tmp_path)
    scores = score_items(reward(), items, key="red", batch_size=2)
    expected = [value / 255 if value else math.nan for value in reds]
    np.testing.assert_allclose(scores.values, [*expected, math.nan, math.nan], atol=1e-6)
    np.testing.assert_allclose(scores.parts["twice"][:4], [20 / 255, 400 / 255, 0, 180 / 255], atol=1e-6)
    assert scores.errors == [None, None, "no_red", None, None, "unreadable", "unreadable"]
    assert scores.failed == 3
    assert (scores.seconds[:5] > 0).all()
    assert scores.batches[6] == -1


def test_groups_samples_and_sources_reach_the_reward(tmp_path: Path) -> None:
    source = save(tmp_path / "s" / "source.png", (4, 4), 255)
    items = [
        ImageFile(file=f"{i}", path=save(tmp_path / f"{i}.png"), prompt=f"p{i // 2}", index=i // 2, record={"i": i},
             source_images=(source,) * (i + 1))
        for i in range(4)
    ]  # fmt: skip
    seen: list[RewardInputs] = []

    def look(inputs: RewardInputs) -> RewardOutput:
        seen.append(inputs)
        return output_of([1.0] * len(inputs), inputs)

    score_items(reward(look, "groupwise"), items, key="red", batch_size=2, iteration=3)
    assert [inputs.group_ids.tolist() for inputs in seen] == [[0, 0], [1, 1]]
    assert [inputs.sample_ids.tolist() for inputs in seen] == [[0, 1], [2, 3]]
    assert [inputs.prompts for inputs in seen] == [["p0", "p0"], ["p1", "p1"]]
    assert seen[1].metadata == [{"i": 2}, {"i": 3}]
    assert {inputs.iteration for inputs in seen} == {3}
    assert seen[1].source_images is not None
    assert [len(row) for row in seen[1].source_images] == [3, 4]
    torch.testing.assert_close(seen[0].source_images[0][0][0], torch.ones(4, 4))  # type: ignore[index]


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def images(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for number, side in enumerate((16, 32, 16)):
        noise = rng.integers(0, 256, size=(side, side, 3), dtype=np.uint8)
        path = tmp_path / "images" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(noise).save(path)
    return tmp_path / "images"


def test_scores_as_csv(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "scores.csv"
    given = ["--option", "jpeg_compressibility.scale=ddpo", "--prompt", 'a "dog", wet', "--out", str(out)]
    assert run("jpeg_compressibility,jpeg_incompressibility", images, *given) == 0
    rows = list(csv.DictReader(io.StringIO(out.read_text(encoding="utf-8"))))
    sizes = [jpeg_bytes(np.asarray(Image.open(path))) for path in sorted(images.iterdir())]
    assert [float(row["jpeg_compressibility"]) for row in rows] == pytest.approx([-size / 1000 for size in sizes])
    assert [float(row["jpeg_incompressibility/kilobytes"]) for row in rows] == pytest.approx([s / 1000 for s in sizes])
    assert [row["file"] for row in rows] == ["0.png", "1.png", "2.png"]
    assert {row["prompt"] for row in rows} == {'a "dog", wet'}
    assert {row["error"] for row in rows} == {""}
    printed = capsys.readouterr().out
    assert max(len(line) for line in printed.splitlines()[:-1]) <= 80
    assert f"wrote {out}" in printed
    assert [path.name for path in out.parent.iterdir()] == ["scores.csv"]


USERS = """
import math
def red(images, prompts, metadata):
    return [math.nan if prompt == "bad" else float(image[0].mean()) for image, prompt in zip(images, prompts)]
"""


def test_failures_are_counted_and_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(USERS, encoding="utf-8")
    config = tmp_path / "rewards.yaml"
    config.write_text(f"rewards: [{{file: {file}, function: red}}]", encoding="utf-8")
    for number, value in enumerate((51, 102, 204)):
        save(tmp_path / "p" / f"{number}.png", red=value)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("good\nbad\ngood\n", encoding="utf-8")
    out = tmp_path / "scores.jsonl"
    # One at a time, as several reasons in a batch could not be told apart.
    assert run(config, tmp_path / "p", "--prompts", prompts, "--out", out, "--batch-size", "1") == 0
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row["values"]["red"] for row in rows] == pytest.approx([0.2, None, 0.8])
    assert [row["error"] for row in rows] == [None, {"red": "not_finite"}, None]
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == ["reward", "mean", "std", "lowest", "highest", "images", "invalid"]
    assert printed[1].split() == ["red", "0.5", "0.4243", "0.2", "0.8", "3", "1"]
    assert printed[2] == "red, failed: not_finite 1"
    assert [line.split() for line in printed[3:-1]] == [
        ["1.png"],
        ["red,", "best"], ["0.8", "2.png"], ["0.2", "0.png"], ["red,", "worst"], ["0.2", "0.png"], ["0.8", "2.png"],
    ]  # fmt: skip


def test_a_reward_that_fails_everywhere_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(USERS, encoding="utf-8")
    config = tmp_path / "rewards.yaml"
    config.write_text(f"rewards: [{{file: {file}, function: red}}]", encoding="utf-8")
    save(tmp_path / "p" / "1.png")
    assert run(config, tmp_path / "p", "--prompt", "bad", "--out", tmp_path / "s.csv") == 1
    assert "red, failed: not_finite 1" in capsys.readouterr().out


def test_bad_arguments_are_refused(images: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.csv or a \.jsonl"):
        run("jpeg_compressibility", images, "--out", tmp_path / "scores.txt")
    with pytest.raises(ValueError, match="scale must be one of"):
        run("jpeg_compressibility", images, "--option", "scale=raw", "--out", tmp_path / "s.csv")


def test_text_is_cut_to_the_width() -> None:
    assert cut("abcdef", 4) == "abc\u2026"
    assert cut("abcdef", 4, front=True) == "\u2026def"
    assert cut("abcd", 4) == "abcd"
    assert align(["name", "x"], [["a" * 90, "1.5"]]).splitlines() == [
        "name" + " " * 75 + "x", "a" * 74 + "\u2026  1.5",
    ]  # fmt: skip
