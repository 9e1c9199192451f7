"""The reliability card: rewards whose noise, bias and spread are known give these numbers back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from evaluation_folders import raising
from PIL import Image

from flowrl.evaluation.reward_card.card_measure import CardMeasures, judge_order, measure
from flowrl.evaluation.reward_card.card_text import overall, percent, summary, verdicts
from flowrl.evaluation.reward_card.reward_card import as_json, draw_images, without_cache
from flowrl.generation.folders import ImageFile
from flowrl.generation.image_folder import read_items
from flowrl.generation.sampling_options import SamplingOptions
from flowrl.media.perturbations import PERTURBATIONS, half_and_back, jpeg
from flowrl.pages.reward_card_page import render
from flowrl.rewards import FunctionReward, RewardInputs, RewardOutput, output_of
from flowrl.runtime.randomness import counter_normal
from flowrl.statistics.reliability import (
    agreement,
    order_bias,
    over_groups,
    rank_correlation,
    ranks,
    repeats_for,
    retest,
    spread,
)

# ---- statistics ------------------------------------------------------------------------------------------------------


def drawn(groups: int, size: int, between: float, within: float, noise: float, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Two noisy measurements of the same images, and their groups."""
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(groups), size)
    true = between * rng.normal(size=groups)[group] + within * rng.normal(size=groups * size)
    first, second = (true + noise * rng.normal(size=len(true)) for _ in range(2))
    return first, second, group


def test_known_noise_gives_the_known_reliability() -> None:
    first, second, group = drawn(500, 8, between=3.0, within=1.0, noise=0.5)
    found = agreement(first, second, group)
    # 1 / (1 + 0.25) of the variance is signal. The standard error of an intraclass correlation of 3500 degrees of
    # freedom and two measurements is (1 - r²) / sqrt(3500) = 0.0061.
    assert found.reliability.mean == pytest.approx(0.8, abs=4 * 0.0061)
    assert found.reliability.low < 0.8 < found.reliability.high
    assert found.reliability.high - found.reliability.low == pytest.approx(2 * 1.96 * 0.0061, rel=0.25)
    assert found.noise_share.mean == pytest.approx(math.sqrt(0.2), abs=0.03)
    assert found.within_std.mean == pytest.approx(math.sqrt(1.25), rel=4 / math.sqrt(2 * 3500))
    assert found.signal_to_noise == pytest.approx(2.0, rel=0.05)
    told = retest(first, second, group)
    assert told.noise_std.mean == pytest.approx(0.5, rel=4 / math.sqrt(2 * 4000))
    assert told.noise_std.low < 0.5 < told.noise_std.high
    assert told.mean.mean == pytest.approx(
        math.sqrt(2) * 0.5 * math.sqrt(2 / math.pi), abs=0.03
    )  # mean of a half-normal
    assert told.correlation.mean == pytest.approx(10 / 10.25, abs=0.005)
    where = spread(first, group)
    assert where.between_prompts.mean == pytest.approx(9 / 10.25, abs=4 * 0.008)
    assert where.between_prompts.low < 9 / 10.25 < where.between_prompts.high


def test_intervals_cover_as_often_as_they_say() -> None:
    hits = 0
    for seed in range(60):
        found = agreement(*drawn(40, 6, between=1.0, within=1.0, noise=1.0, seed=seed))
        hits += found.reliability.low <= 0.5 <= found.reliability.high
    assert hits >= 51  # 95 % of 60 are 57; below 51 lies a probability under 1 %, were coverage 93 %


def test_reliability_in_numbers() -> None:
    # Less their means the groups are x: -1 0 1 | -2 2, y: -1 1 0 | -1 1. Sxx = 10, Syy = 4, Sxy = 1 + 4 = 5.
    x, y, group = [1, 2, 3, 10, 14], [4, 6, 5, 0, 2], [7, 7, 7, 3, 3]
    found = agreement(x, y, group)
    assert found.groups == 2
    assert found.reliability.mean == pytest.approx(10 / 14)
    assert found.noise_share.mean == pytest.approx(math.sqrt(4 / 14))
    assert found.within_std.mean == pytest.approx(math.sqrt(7 / 3))  # 14 / 2 over (3 - 1) + (2 - 1)
    assert found.rank.mean == pytest.approx((0.5 + 1) / 2)  # 1 - 6 · 2 / (3 · 8) and 1
    assert found.shift.mean == pytest.approx((3 + 4 + 2 - 10 - 12) / 5)


def test_a_shift_of_a_whole_group_is_no_noise() -> None:
    first, _, group = drawn(20, 5, between=1.0, within=1.0, noise=0.0)
    found = agreement(first, first + 5.0 * group, group)
    assert found.reliability.mean == pytest.approx(1.0)
    assert found.noise_share.mean == pytest.approx(0.0, abs=1e-6)
    assert found.rank.mean == pytest.approx(1.0)
    assert found.signal_to_noise > 1e4


def test_a_constant_reward_has_no_reliability() -> None:
    group = np.repeat(np.arange(10), 4)
    value = np.full(40, 0.1)
    found = agreement(value, value, group)
    assert math.isnan(found.reliability.mean)
    assert math.isnan(found.rank.mean)
    assert found.within_std.mean == 0.0
    where = spread(value, group)
    assert where.flat_groups.mean == 1.0
    assert math.isnan(where.between_prompts.mean)
    assert retest(value, value, group).exact


def test_an_order_that_is_lost_counts_as_zero() -> None:
    # The first group keeps its order, the second loses its spread, the third had none.
    found = agreement([1, 2, 1, 2, 5, 5], [3, 4, 7, 7, 1, 2], [0, 0, 1, 1, 2, 2])
    assert found.rank.mean == pytest.approx(0.5)


def test_failed_items_and_single_ones_are_left_out() -> None:
    x, y = [1.0, 2.0, 4.0, math.nan, 5.0, 9.0], [1.5, 2.5, math.nan, 3.0, 5.0, 9.0]
    group = [0, 0, 0, 1, 1, 2]
    found = agreement(x, y, group)
    assert found.groups == 1
    assert found.reliability.mean == pytest.approx(1.0)
    assert not found.reliability.known  # of one group nothing is known
    assert retest(x, y, group).count == 4
    nothing = agreement([math.nan], [1.0], [0])
    assert nothing.groups == 0
    assert math.isnan(nothing.rank.mean)
    assert math.isnan(retest([], [], []).largest)


def test_where_the_variance_lies_with_groups_of_several_sizes() -> None:
    # One-way analysis by hand: groups 1 3 | 4 6 8, means 2 and 6, grand mean 4.4.
    found = spread([1, 3, 4, 6, 8], [0, 0, 1, 1, 1])
    mean_within, mean_between = (2 + 8) / 3, 2 * 2.4**2 + 3 * 1.6**2
    size = (5 - (4 + 9) / 5) / 1
    variance = (mean_between - mean_within) / size
    assert found.between_prompts.mean == pytest.approx(variance / (variance + mean_within))
    assert found.std.mean == pytest.approx(np.std([1, 3, 4, 6, 8], ddof=1))


def test_a_judge_that_names_the_first_always_and_one_that_does_not() -> None:
    always = order_bias(np.ones(12), np.ones(12), np.repeat(np.arange(6), 2))
    assert (always.first_wins.mean, always.agreement.mean) == (0.5, 0.0)
    fair = order_bias([1.0, 0.0, 0.9, 0.5], [0.0, 1.0, 0.2, 0.5], [0, 0, 1, 1])
    assert (fair.first_wins.mean, fair.agreement.mean, fair.count) == (0.0, 1.0, 4)
    # A tie against a win is half an agreement, a quarter of a win too many; a failed order takes the pair out.
    mixed = order_bias([0.5, math.nan], [1.0, 1.0], [0, 1])
    assert (mixed.first_wins.mean, mixed.agreement.mean, mixed.failed) == (0.25, 0.5, 1)


def test_a_partial_order_bias_is_found_within_its_error() -> None:
    # The judge names the first outright in 30 % of its verdicts, else the better one: bias 0.3 / 2.
    rng = np.random.default_rng(0)
    better = rng.random(2000) < 0.5
    blind = rng.random((2, 2000)) < 0.3
    first = np.where(blind[0], 1.0, better)
    other = np.where(blind[1], 1.0, ~better)
    found = order_bias(first, other, np.repeat(np.arange(200), 10))
    assert found.first_wins.mean == pytest.approx(0.15, abs=4 * 0.5 / math.sqrt(4000))
    assert found.first_wins.low < 0.15 < found.first_wins.high
    assert found.agreement.mean == pytest.approx(0.7, abs=0.05)  # one order is always right, the other in 70 %


def test_ranks_and_their_correlation() -> None:
    assert ranks([3.0, 1.0, 3.0, 2.0]).tolist() == [2.5, 0.0, 2.5, 1.0]
    group = np.arange(4)
    assert rank_correlation([1, 2, 3, 4], [1, 8, 27, 64], group).mean == pytest.approx(1.0)
    # Ranks 0 1 2 3 against 1 0 3 2: 1 - 6 · 4 / (4 · 15).
    assert rank_correlation([1, 2, 3, 4], [2, 1, 4, 3], group).mean == pytest.approx(0.6)


def test_repeats_for_a_reliable_mean() -> None:
    assert repeats_for(0.5) == 9  # 0.9 · 0.5 / (0.5 · 0.1)
    assert repeats_for(0.9) == 1
    assert repeats_for(0.95) == 1
    assert math.isinf(repeats_for(0.0))
    assert math.isinf(repeats_for(math.nan))


def test_intervals_of_a_mean_match_the_standard_error() -> None:
    sums = np.stack([np.ones(400), np.random.default_rng(0).normal(size=400)])
    found = over_groups(sums, lambda s: s[1] / s[0])
    assert found.mean == pytest.approx(sums[1].mean())
    assert found.high - found.low == pytest.approx(2 * 1.96 * sums[1].std() / 20, rel=0.1)
    assert over_groups(sums, lambda s: s[1] / s[0]) == found
    assert not over_groups(sums[:, :1], lambda s: s[1] / s[0]).known


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="one entry per item"):
        agreement([1.0], [1.0, 2.0], [0, 0])


# ---- perturbations ---------------------------------------------------------------------------------------------------


def test_changes_change_as_they_say() -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, size=(9, 12, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    np.testing.assert_array_equal(np.asarray(PERTURBATIONS["flip"][1](image)), pixels[:, ::-1])
    errors = [np.abs(np.asarray(jpeg(image, q)).astype(float) - pixels).mean() for q in (95, 75, 50)]
    assert 0 < errors[0] < errors[1] < errors[2]
    assert half_and_back(image).size == (12, 9)
    flat = Image.new("RGB", (12, 9), (10, 200, 30))
    np.testing.assert_array_equal(np.asarray(half_and_back(flat)), np.asarray(flat))
    assert half_and_back(Image.new("RGB", (1, 1))).size == (1, 1)


# ---- a card ----------------------------------------------------------------------------------------------------------

GROUPS, SIZE, STEP, NOISE = 24, 6, 8.0, 0.02


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain images, six levels of red a prompt, that blue of another level tells apart from other prompts."""
    folder = tmp_path_factory.mktemp("images")
    for group in range(GROUPS):
        (folder / f"{group:02d}").mkdir()
        for number in range(SIZE):
            color = (40 + round(STEP * number), 128, 5 * group)
            Image.new("RGB", (16, 16), color).save(folder / f"{group:02d}" / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def items(images: Path) -> list[ImageFile]:
    return read_items(images)


def reward(value: Callable[[np.ndarray, int, int], float], name: str = "made") -> FunctionReward:
    """A reward of an image's mean colour, sample and iteration."""

    def score(inputs: RewardInputs) -> RewardOutput:
        means = inputs.images.mean(dim=(2, 3)).double().numpy()
        ids = inputs.sample_ids.tolist()
        return output_of([value(mean, i, inputs.iteration) for mean, i in zip(means, ids, strict=True)], inputs)

    return FunctionReward(name=name, score=score, needs=frozenset({"images"}), version=f"{name}:1")


def red(mean: np.ndarray, sample: int, iteration: int) -> float:
    return float(mean[0])


def noisy_red(mean: np.ndarray, sample: int, iteration: int) -> float:
    return float(mean[0]) + NOISE * float(counter_normal((1,), 0, "card", sample, iteration))


def measured(items: list[ImageFile], value: Callable[[np.ndarray, int, int], float], *changes: str) -> CardMeasures:
    return measure({"made": reward(value), "red": reward(red, "red")}, items, batch_size=16, changes=changes)


def test_a_reward_with_known_noise(items: list[ImageFile]) -> None:
    found = measured(items, noisy_red)
    # Six equal steps have the variance step² · 35 / 12, with the denominator 5 that of degrees of freedom step² · 3.5.
    signal = (STEP / 255) ** 2 * 3.5
    expected = signal / (signal + NOISE**2)
    freedom = GROUPS * (SIZE - 1)
    error = (1 - expected**2) / math.sqrt(freedom)
    assert found.repeat.reliability.mean == pytest.approx(expected, abs=4 * error)
    assert found.retest.noise_std.mean == pytest.approx(NOISE, rel=4 / math.sqrt(2 * GROUPS * SIZE))
    assert found.retest.noise_std.low < NOISE < found.retest.noise_std.high
    assert not found.retest.exact
    told = {verdict.aspect: verdict for verdict in verdicts(found)}
    assert told["repeatability"].grade == "fair"
    assert "is the reward's own noise" in told["repeatability"].words
    assert found.others["red"].within.mean > 0.8
    assert found.cost.calls == 1.0
    assert found.cost.hours_per_1000 == pytest.approx(found.cost.seconds.mean / 3.6)


def test_a_steady_reward_is_good_throughout(items: list[ImageFile]) -> None:
    found = measured(items, red, *PERTURBATIONS)
    assert found.retest.exact
    assert found.repeat.reliability.mean == pytest.approx(1.0)
    assert found.perturbed["flip"].noise_share.mean == pytest.approx(0.0, abs=1e-5)
    assert found.perturbed["jpeg50"].rank.mean > 0.95
    assert [verdict.grade for verdict in verdicts(found)] == ["good", "good", "good", "good", "open", "open"]
    assert overall(verdicts(found)) == "Good in all that was judged: failures, signal, repeatability and steadiness."


def test_a_constant_reward_teaches_nothing(items: list[ImageFile]) -> None:
    found = measured(items, lambda mean, sample, iteration: 0.25, "jpeg50")
    told = {verdict.aspect: verdict for verdict in verdicts(found)}
    assert told["signal"].grade == "poor"
    assert "nothing to learn from" in told["signal"].words
    assert told["repeatability"].words == "Both passes gave exactly the same values."
    assert told["steadiness"].grade == "open"
    assert "nan" not in summary(found)
    assert render(found).count("<svg") == 2  # one scatter plot, for desktop and phone; there is nothing to rank


def test_failures_are_told(items: list[ImageFile]) -> None:
    found = measured(items, lambda mean, sample, iteration: math.nan if sample % 9 == 0 else float(mean[0]))
    assert found.failed.mean == pytest.approx(16 / 144)
    assert found.errors == {"not_finite": 32}
    assert verdicts(found)[0].grade == "poor"
    assert "11 % of the values failed (not_finite 32)" in verdicts(found)[0].words


def test_noise_hides_no_signal_where_there_is_none(items: list[ImageFile]) -> None:
    found = measured(items, lambda mean, sample, iteration: float(counter_normal((1,), sample, iteration)))
    assert found.repeat.reliability.mean == pytest.approx(0.0, abs=4 / math.sqrt(120))
    assert overall(verdicts(found)).startswith("Poor in repeatability")


JUDGES = """
def first(first_images, second_images, prompts, metadata):
    return [1.0] * len(prompts)
def redder(first_images, second_images, prompts, metadata):
    return (first_images[:, 0].mean((1, 2)) > second_images[:, 0].mean((1, 2))).double().tolist()
"""


@pytest.mark.parametrize(("function", "bias", "both"), [("first", 0.5, 0.0), ("redder", 0.0, 1.0)])
def test_the_order_of_a_pairwise_judge(
    function: str, bias: float, both: float, items: list[ImageFile], tmp_path: Path
) -> None:
    (tmp_path / "judges.py").write_text(JUDGES, encoding="utf-8")
    found = judge_order({"file": str(tmp_path / "judges.py"), "function": function}, items)
    assert (found.first_wins.mean, found.agreement.mean) == (bias, both)
    assert found.count == GROUPS * SIZE  # a ring: as many pairs as images


def test_answers_are_not_looked_up_in_the_second_pass() -> None:
    comparator = {"reward": "jpeg_compressibility"}
    given = {"name": "win_rate", "options": {"comparator": comparator, "cache": 5}}
    assert without_cache(given)["options"] == {"comparator": comparator, "cache": 0}
    assert without_cache({"name": "jpeg_compressibility"})["options"] == {}
    assert given["options"] == {"comparator": comparator, "cache": 5}


# ---- the command -----------------------------------------------------------------------------------------------------


def run(*arguments: str | Path) -> int:
    return raising("reward card", *arguments)


def test_the_card_of_a_pairwise_reward(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "judges.py").write_text(JUDGES, encoding="utf-8")
    config = tmp_path / "rewards.yaml"
    judge = f"{{file: {tmp_path / 'judges.py'}, function: first}}"
    config.write_text(f"rewards: [{{name: win_rate, options: {{comparator: {judge}}}}}]", encoding="utf-8")
    out = tmp_path / "card"
    with_others = ["--prompt", "a wall", "--with", "jpeg_compressibility", "--perturb", "jpeg50,flip"]
    small = tmp_path / "small"
    small.mkdir()
    for number in range(4):
        (small / f"{number}.png").write_bytes((images / "00" / f"{number}.png").read_bytes())
    assert run(config, small, *with_others, "--out", out) == 0
    printed = capsys.readouterr().out
    assert max(len(line) for line in printed.splitlines()[:-1]) <= 80
    assert "The image shown first wins 100 % of the time" in " ".join(printed.split())
    told = json.loads((out / "card.json").read_text(encoding="utf-8"))
    assert told["order"]["first_wins"]["mean"] == 0.5
    assert told["cost"]["calls"] == 1.5  # six pairs of four images
    assert set(told["perturbed"]) == {"jpeg50", "flip"}
    assert [row["file"] for row in told["values"]] == ["0.png", "1.png", "2.png", "3.png"]
    assert set(told["values"][0]) == {"file", "prompt", "first", "second", "jpeg50", "flip"}
    page = (out / "card.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 4
    assert "http" not in page.replace("http-equiv", "")
    assert "nan" not in page.lower()


@pytest.mark.slow
def test_images_are_drawn_for_the_prompts_of_a_file(tmp_path: Path) -> None:
    record = {"tag": "colors", "include": [{"class": "circle", "count": 1, "color": "red"}]}
    texts = ["a photo of a red circle", "a photo of a red circle", "a photo of a red square"]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({**record, "prompt": text}) for text in texts), encoding="utf-8")
    out = tmp_path / "card"
    given: list[str | Path] = ["attributes", "--model", "asset:tiny-sd3", "--prompts", prompts, "--samples", "2"]
    assert run(*given, "--out", out, "--perturb", "none") == 0
    drawn_items = read_items(out / "images")
    assert [item.file for item in drawn_items] == [f"{p:05d}/samples/{s:05d}.png" for p in (0, 1) for s in (0, 1)]
    assert [item.prompt for item in drawn_items] == [texts[0]] * 2 + [texts[2]] * 2
    assert drawn_items[0].record["tag"] == "colors"
    assert len({item.path.read_bytes() for item in drawn_items}) == 4
    told = json.loads((out / "card.json").read_text(encoding="utf-8"))
    assert (told["images"], told["prompts"]) == (4, 2)
    first = drawn_items[0].path.read_bytes()
    drawn_items[0].path.unlink()
    assert run(*given, "--out", out, "--perturb", "none") == 0  # draws what is missing
    assert drawn_items[0].path.read_bytes() == first
    with pytest.raises(ValueError, match="was drawn with other settings: num_steps 10 "):
        run(*given, "--out", out, "--steps", "3")


@pytest.mark.slow
def test_edits_of_one_instruction_are_told_apart_by_their_images(tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    for name, colour in (("a", "red"), ("b", "blue")):
        Image.new("RGB", (64, 64), colour).save(tmp_path / "given" / f"{name}.png")
    text = "make it green"
    rows = [{"prompt": text, "source": f"given/{name}.png"} for name in "aba"]
    prompts = tmp_path / "edits.jsonl"
    prompts.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    draw_images("asset:tiny-kontext", str(prompts), tmp_path / "images", sampling=SamplingOptions(), num_prompts=24,
                samples=1, seed=0, device=None)  # fmt: skip
    drawn_items = read_items(tmp_path / "images")
    assert [(item.file, item.prompt) for item in drawn_items] == [(f"{p:05d}/samples/00000.png", text) for p in (0, 1)]
    assert [item.record["sources"] for item in drawn_items] == [
        [str(tmp_path / "given" / f"{name}.png")] for name in "ab"
    ]
    assert len({item.path.read_bytes() for item in drawn_items}) == 2


def test_models_of_videos_are_refused_before_they_load(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a red circle", encoding="utf-8")
    with pytest.raises(ValueError, match=r"asset:tiny-wan makes videos \(family wan\) and flowrl reward card judges"):
        run("attributes", "--model", "asset:tiny-wan", "--prompts", tmp_path / "prompts.txt", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_json_knows_no_infinity(items: list[ImageFile]) -> None:
    told = as_json(measured(items, red))
    assert told["repeat"]["signal_to_noise"] is None
    assert json.loads(json.dumps(told, allow_nan=False))["repeat"]["reliability"]["mean"] == pytest.approx(1.0)
    assert told["order"] is None


def test_names_and_prompts_are_escaped(images: Path) -> None:
    found = measure({"<b>": reward(red)}, read_items(images / "00", prompt="a <script> & more"), batch_size=4)
    page = render(found)
    assert "<script>" not in page
    assert "a &lt;script&gt; &amp; more" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("jpeg_compressibility",), "either a FOLDER of images or --model"),
        (("jpeg_compressibility", ".", "--model", "asset:tiny-sd3"), "either a FOLDER of images or --model"),
        (("jpeg_compressibility", "--model", "asset:tiny-sd3"), "add --prompts"),
        (
            ("jpeg_compressibility", "--model", "x", "--prompts", "p.txt", "--samples", "1"),
            "--samples must be at least 2, got 1",
        ),
        (("jpeg_compressibility", ".", "--guidance", "2"), "--guidance says how --model draws"),
        (("jpeg_compressibility,hps", "."), "a card is about one reward"),
        (("jpeg_compressibility", ".", "--perturb", "jpg95"), "did you mean 'jpeg95'"),
    ],
)
def test_bad_arguments_are_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(*arguments)


def test_shares_in_words() -> None:
    assert [percent(share) for share in (0.0, 0.004, 0.3, 0.996, 1.0)] == ["0 %", "0.4 %", "30 %", "99.6 %", "100 %"]
