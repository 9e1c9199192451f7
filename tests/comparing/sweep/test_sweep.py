"""`flowrl sweep` on a toy model: what it draws, how it goes on, what it says, and what it refuses."""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tiny_clip import write_tiny_clip, write_tiny_dinov2
from toy_pipeline import PROMPTS, PUBLISHED, Toy, write_toy

import flowrl
import flowrl.comparing.sweep.sweep as sweep_run
from flowrl import cli
from flowrl.cli import main
from flowrl.comparing.sweep.sweep_draw import Judges, TunedModels, draw_prompts, drift, judge, load_features
from flowrl.comparing.sweep.sweep_result import columns_of, difference_of, mean_of, results_of
from flowrl.comparing.sweep.sweep_settings import Measure, Setting, SweepPlan, trained_on
from flowrl.generation.rlg import add_experts, numbers
from flowrl.media.images import save_png
from flowrl.pipelines import PIPELINES
from flowrl.pipelines.places.known_checkpoints import checkpoints
from flowrl.prompts.loading import Prompt
from flowrl.rewards import REWARDS, FunctionReward
from flowrl.runtime.randomness import counter_normal
from flowrl.samplers import build_schedule

REWARD_LIST = "target=smooth_brightness,heldout=jpeg_compressibility"
SCALES = ("--rlg", "-1,0,0.5,1,2")
COMMON = ("--rewards", REWARD_LIST, "--samples", "3", "--num-prompts", "4", "--features", "none", "--device", "cpu")


def parse(*arguments: str) -> argparse.Namespace:
    return cli.parse("sweep", arguments)


def sweep(*arguments: str) -> int:
    return main(["sweep", *arguments])


def called(*arguments: str) -> Any:
    return flowrl.sweep(**vars(parse(*arguments)))


def prepare(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> SweepPlan:
    """What a command would do."""
    with monkeypatch.context() as patch:
        patch.setattr(sweep_run, "carry_out", lambda asked, page: asked)
        plan: SweepPlan = called(*arguments)
    return plan


@pytest.fixture(autouse=True)
def _toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PIPELINES, "sd3", "toy_pipeline")
    monkeypatch.setitem(REWARDS, "smooth_brightness", "toy_pipeline:SmoothBrightness")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two trained runs, `strong` and `weak`."""
    folder = tmp_path_factory.mktemp("sweep")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PIPELINES, "sd3", "toy_pipeline")
        path = write_toy(folder, num_iterations=3, clip_range=0.9)
        for name, rate in (("strong", "0.2"), ("weak", "0.02")):
            out = f"out={folder / name}"
            assert main(["train", str(path), out, f"optim.lr={rate}", f"prompts.eval={folder / 'prompts.txt'}"]) == 0
    return folder


@pytest.fixture
def swept(runs: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs the command on `strong` with a folder of the test's own; returns what `sweep.json` says."""

    def run(*arguments: str, out: str = "out") -> dict[str, Any]:
        assert sweep(str(runs / "strong"), *COMMON, *arguments, "--out", str(tmp_path / out)) == 0
        found: dict[str, Any] = json.loads((tmp_path / out / "sweep.json").read_text())
        return found

    return run


def by_key(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["key"]: one for one in found["settings"]}


# ---- what it measures ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_scales_searches_and_their_costs(swept: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    found = by_key(swept(*SCALES, "--best-of", "1,4", "--prune", "4@1,2"))
    assert {key: (one["evaluations"], one["looks"]) for key, one in found.items()} == {
        "rlg_-1": (8, 0), "rlg_0": (4, 0), "rlg_0.5": (8, 0), "rlg_1": (4, 0), "rlg_2": (8, 0),
        "best_of_1_rlg_1": (4, 0), "best_of_4_rlg_1": (16, 4), "prune_4_1-2_2-1_rlg_1": (4 + 2 + 1 + 1, 4 + 2),
    }  # fmt: skip
    score = {key: one["scores"]["smooth_brightness"]["mean"] for key, one in found.items()}
    # One candidate is plain sampling, up to how the network rounds in other batches.
    assert score["best_of_1_rlg_1"] == pytest.approx(score["rlg_1"], abs=1e-6)
    assert score["best_of_4_rlg_1"] > score["prune_4_1-2_2-1_rlg_1"] > score["rlg_1"]
    assert score["rlg_-1"] < score["rlg_0"] < score["rlg_0.5"] < score["rlg_1"] < score["rlg_2"]  # it was trained on
    change = found["rlg_2"]["to_base"]["smooth_brightness"]
    assert change["mean"] == pytest.approx(score["rlg_2"] - score["rlg_0"], abs=1e-9)
    assert change["low"] > 0
    assert found["rlg_1"]["to_tuned"] == {}
    assert set(found["rlg_1"]["to_base"]) == {"smooth_brightness", "jpeg_compressibility", "pixel diversity"}
    assert found["best_of_4_rlg_1"]["kl_bound"] == pytest.approx(0.6363, abs=5e-5)
    drifts = [found[f"rlg_{scale}"]["drift"] for scale in ("0", "1", "2")]
    assert drifts == pytest.approx([0.0, drifts[1], 4 * drifts[1]])
    assert drifts[1] > 0
    page = (tmp_path / "out" / "sweep.html").read_text()
    assert "://" not in page
    assert "nan" not in page.lower().replace("nanoseconds", "")
    assert page.count("data:image/png") == 8 * 4


@pytest.mark.parametrize("start_scale", [1.0, 3.0])
def test_drift_is_that_of_the_outputs(runs: Path, start_scale: float) -> None:
    """Against the mean square over the four compared steps by hand, of a model with four steps."""
    pipeline: Any = Toy()
    names = add_experts(pipeline, [runs / "strong" / "lora"])
    schedule = replace(pipeline.schedule(4, "diffusers"), start_scale=start_scale)
    model = TunedModels(
        pipeline=pipeline, adapters={"": names[0]}, schedule=schedule, guidance=1.0, base_guidance=1.0, batch_size=3
    )
    prompts = [Prompt(text=text, metadata={}) for text in PROMPTS]
    base, tuned = model.make(0.0)(prompts), model.make(1.0)(prompts)
    x = start_scale * torch.stack([sweep_start(text) for text in PROMPTS])
    total = []
    with torch.no_grad():
        for step in range(4):
            sigma, timestep = schedule.sigma[step], schedule.timestep[step]
            v = base(x, sigma, timestep)
            total.append(float((tuned(x, sigma, timestep) - v).double().pow(2).mean()))
            x = x + (schedule.sigma[step + 1] - sigma) * v
    assert drift(model, prompts, 0) == pytest.approx(sum(total) / 4, rel=1e-5)


def sweep_start(text: str) -> torch.Tensor:
    return counter_normal(Toy.latent_shape, 0, "eval", text, 0)


def test_other_runs_are_points_at_scale_one(runs: Path, swept: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    found = by_key(swept("--rlg", "0,1", "--also", str(runs / "weak"), "--also", str(runs / "strong")))
    again, weak = found["run_strong"], found["run_weak"]
    assert again["scores"] == found["rlg_1"]["scores"]  # the same weights
    assert again["drift"] == pytest.approx(found["rlg_1"]["drift"])
    assert weak["evaluations"] == 4
    assert 0 < weak["drift"] < again["drift"]
    assert again["to_tuned"]["smooth_brightness"]["mean"] == 0
    assert ">weak</text>" in (tmp_path / "out" / "sweep.html").read_text()


def test_guidance_of_the_base_alone_costs_three_evaluations(swept: Callable[..., dict[str, Any]]) -> None:
    found = by_key(swept("--rlg", "0,1,2", "--base-guidance", "3"))
    assert [found[f"rlg_{scale}"]["evaluations"] for scale in (0, 1, 2)] == [8, 4, 12]


def test_features_for_diversity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_clip(tmp_path / "clip")
    monkeypatch.setattr("flowrl.rewards.networks.clip_encoder.CLIP_MODEL", str(tmp_path / "clip"))
    write_tiny_dinov2(tmp_path / "dino")
    monkeypatch.setattr("flowrl.rewards.networks.dinov2.DINOV2_MODEL", str(tmp_path / "dino"))
    images = counter_normal((3, 3, 64, 64), "pictures").sigmoid()
    images[2] = images[0]
    prompt = Prompt(text="a star", metadata={})
    for kind, width in (("attributes", 80), ("clip", 16), ("dinov2", 32)):
        embed = load_features(kind, torch.device("cpu"))
        assert embed is not None
        found = embed(images).double()
        assert found.shape == (3, width)
        pipeline: Any = Toy()
        row = judge(pipeline, Judges(rewards={}, features=embed), [prompt], images, 3)[0]
        # Of the three pairs one is an image with itself, and the other two are alike.
        cosine = float(torch.nn.functional.cosine_similarity(found[0], found[1], dim=0))
        assert row["diversity"]["features"] == pytest.approx(2 * (1 - cosine) / 3, rel=1e-5, abs=1e-7)
    assert load_features("none", torch.device("cpu")) is None


def test_the_base_is_loaded_and_sampled_as_its_owner_does(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = prepare(monkeypatch, str(runs / "strong"), *COMMON)
    loaded: list[dict[str, Any]] = []

    def load(model: str, **options: Any) -> Toy:
        loaded.append({"model": model, **options})
        return Toy()

    monkeypatch.setattr("toy_pipeline.load", load)
    source = replace(asked.source, options={"height": 32, "width": 48}, shift=5.0)
    model = sweep_run.load_model(replace(asked, source=source))
    assert torch.equal(model.schedule.sigma, build_schedule({"shift": 5.0}, 4, grid="diffusers").sigma)
    assert (
        loaded.pop().items()
        >= {"model": "toy", "dtype": torch.float32, "device": "cpu", "height": 32, "width": 48}.items()
    )
    assert not loaded
    versions = {"smooth_brightness": "1", "jpeg_compressibility": "1"}
    seen = [
        json.dumps(sweep_run.conditions(replace(asked, source=one), versions))
        for one in (asked.source, source, replace(source, shift=None), replace(source, family="flux"))
    ]
    assert len(set(seen)) == 4


def test_prompts_are_told_apart_by_what_they_are_about(swept: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """One text with two images is two prompts; a row that is there twice is one."""
    for name, shade in (("dark", 0.2), ("light", 0.8)):
        save_png(torch.full((3, 2, 2), shade), tmp_path / f"{name}.png")
    rows = [{"prompt": "paint it", "source": f"{name}.png"} for name in ("dark", "light", "dark")]
    (tmp_path / "edits.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    swept("--rlg", "0,1", "--prompts", str(tmp_path / "edits.jsonl"))
    path = next((tmp_path / "out" / "settings" / "rlg_1").glob("*.jsonl"))
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    texts = [json.loads(line["key"]) for line in lines]
    assert [text for text, _, _ in texts] == ["paint it", "paint it"]
    assert texts[0] != texts[1]
    assert lines[0]["row"]["values"] != lines[1]["row"]["values"]  # each has noise of its own


def test_prompts_of_a_dataset_with_the_negative_of_the_run(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(text: str, negative: str) -> list[Prompt]:
        return [Prompt(text=f"{text} {number}", metadata={}, negative=negative) for number in range(3)]

    monkeypatch.setattr("flowrl.prompts.loading.read_dataset", read)
    shutil.copytree(runs / "weak" / "lora", tmp_path / "lora")
    config = yaml.safe_load((runs / "weak" / "config.yaml").read_text())
    config["prompts"]["negative"] = "blurry"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    asked = prepare(monkeypatch, str(tmp_path), *COMMON, "--prompts", "dataset:flowers:test")
    assert {prompt.negative for prompt in asked.prompts} == {"blurry"}
    assert [prompt.text for prompt in asked.prompts] == [f"dataset:flowers:test {number}" for number in range(3)]


# ---- going on --------------------------------------------------------------------------------------------------------


def test_a_finished_sweep_is_not_drawn_again(
    swept: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = swept("--rlg", "0,1", "--best-of", "2")
    said = capsys.readouterr().out.split("\nPage")[0]
    assert len(said) > 80 >= max(map(len, said.splitlines()))

    def load(asked: Any) -> TunedModels:
        raise AssertionError("the model was loaded")

    with monkeypatch.context() as patch:
        patch.setattr(sweep_run, "load_model", load)
        assert swept("--rlg", "0,1", "--best-of", "2") == first
    more = swept("--rlg", "0,1,2", "--best-of", "2,4")
    assert [by_key(more)[one["key"]] for one in first["settings"]] == first["settings"]
    assert len(more["settings"]) == 5


@pytest.mark.slow
def test_a_stopped_sweep_goes_on_where_it_was(
    runs: Path, swept: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    arguments = ("--rlg", "0,1,2", "--best-of", "1,3", "--prune", "4@2", "--batch-size", "3")
    whole = swept(*arguments, out="whole")
    drawn: list[str] = []
    draw = draw_prompts

    def stopping(model: Any, judges: Any, settings: Any, prompts: Any, **options: Any) -> Any:
        if len(drawn) in (2, 7):
            drawn.append("stop")
            raise KeyboardInterrupt
        drawn.extend(f"{settings[-1].key} {prompt.text}" for prompt in prompts)
        return draw(model, judges, settings, prompts, **options)

    monkeypatch.setattr(sweep_run, "draw_prompts", stopping)
    command = (str(runs / "strong"), *COMMON, *arguments, "--out", str(tmp_path / "out"))
    assert sweep(*command) == 130
    assert "The same command resumes from here" in capsys.readouterr().err
    assert not (tmp_path / "out" / "sweep.json").exists()
    assert sweep(*command) == 130
    assert swept(*arguments) == whole
    images = [entry for entry in drawn if entry != "stop"]
    assert len(images) == len(set(images)) == 5 * 4  # both best-of-N are drawn together


def test_a_line_that_was_cut_off_is_drawn_again(swept: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    arguments = ("--rlg", "0,1", "--batch-size", "3")  # prompt by prompt, so that batches are the same again
    whole = swept(*arguments)
    path = next((tmp_path / "out" / "settings" / "rlg_1").glob("*.jsonl"))
    text = path.read_text()
    path.write_text(text[:-40])
    assert swept(*arguments) == whole
    assert path.read_text() == text


def test_other_conditions_never_mix(swept: Callable[..., dict[str, Any]]) -> None:
    first = swept("--rlg", "0,1")
    other = swept("--rlg", "0,1", "--seed", "1")
    assert by_key(other)["rlg_0"]["scores"] != by_key(first)["rlg_0"]["scores"]
    assert swept("--rlg", "0,1") == first


# ---- what it says ----------------------------------------------------------------------------------------------------

TARGET, JUDGE = Measure(role="target", reward="geneval", part="official"), Measure(role="heldout", reward="hps")


def made(scales: dict[float, tuple[float, float]], spread: float = 0.001, count: int = 12) -> Any:
    """Results of scales with (held-out mean, diversity mean); noise of the size `spread` differs between scales."""
    columns = {}
    for number, (scale, (score, diversity)) in enumerate(scales.items()):
        noise = np.random.default_rng(number).normal(0, spread, (count, 2))
        noise -= noise.mean()
        columns[Setting(kind="rlg", scale=scale)] = {
            "geneval:official": np.full((count, 2), scale), "hps": score + noise,
            "diversity": diversity + noise[:, :1] - noise[:, :1].mean(),
        }  # fmt: skip
    costs = {setting: 20 for setting in columns}
    return results_of(columns, [TARGET, JUDGE], evaluations=costs, drifts={"": 0.5})


def test_the_sentence_names_the_peak_its_rivals_and_the_price() -> None:
    found = made({0.0: (0.2, 0.5), 1.0: (0.3, 0.45), 1.5: (0.3005, 0.4), 3.0: (0.25, 0.2)}, spread=0.003)
    said = found.sentence
    assert said.startswith("The held-out score, hps, is highest at scale 1.5: 0.3005 (95 % interval 0.299")
    assert "; scale 1 may be the best one as well, the others not (95 %, with allowance for the choice); images" in said
    assert "images of one prompt differ there 20 % less from each other" in said
    assert said.endswith("than the base model's (20 to 20 %).")
    assert [one.setting.scale for one in found.level] == [1.0]


@pytest.mark.parametrize(("scales", "words"), [
    ({0.0: (0.5, 0.5), 1.0: (0.3, 0.4)}, "highest at scale 0 (the base model)"),
    ({0.0: (0.5, 0.5), 1.0: (0.3, 0.4)}, "all other scales tried are ruled out as the best one, at 95 % with"),
    ({0.0: (0.5, 0.5), 1.0: (0.3, 0.4)}, "what diversity other scales cost stands in the table"),
    ({0.0: (0.3, 0.5), 1.0: (0.5, 0.4)}, "highest at scale 1 (the tuned model as it is)"),
    ({0.0: (0.3, 0.4), 1.0: (0.5, 0.4)}, "differ there about as much as the base model's (change "),
    ({0.0: (0.3, 0.4), 1.0: (0.5, 0.44)}, "10 % more from each other than the base model's"),
    ({-1.0: (0.3, 0.4), 1.0: (0.5, 0.2)}, "50 % less from each other than those at scale \u22121 ("),
    ({1.0: (0.5, 0.2)}, ": 0.5000 (95 % interval 0.4995 to 0.5005); what diversity other scales cost"),
])  # fmt: skip
def test_the_sentence_in_other_cases(scales: dict[float, tuple[float, float]], words: str) -> None:
    assert words in made(scales).sentence


@pytest.mark.slow
def test_the_best_of_many_scales_is_seldom_ruled_out() -> None:
    # Ten scales that are one: the best is any of them, and each must stay but for 5 of 100 sweeps.
    rng = np.random.default_rng(0)
    settings = [Setting(kind="rlg", scale=float(k)) for k in range(10)]
    ruled_out = 0
    for _ in range(200):
        columns = {
            one: {"geneval:official": np.ones((10, 1)), "hps": rng.normal(size=(10, 1)), "diversity": np.ones((10, 1))}
            for one in settings
        }
        found = results_of(columns, [TARGET, JUDGE], evaluations=dict.fromkeys(columns, 20), drifts={})
        ruled_out += found.peak.setting.scale != 0 and 0.0 not in [one.setting.scale for one in found.level]
    assert ruled_out / 200 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 200)


def test_without_a_held_out_reward_the_sentence_says_so() -> None:
    columns = {Setting(kind="rlg", scale=s): {"hps": np.array([[s], [s + 0.1]])} for s in (0.0, 1.0)}
    columns = {one: {**found, "pixel diversity": np.ones((2, 1))} for one, found in columns.items()}
    measure = Measure(role="target", reward="hps")
    found = results_of(columns, [measure], evaluations=dict.fromkeys(columns, 20), drifts={})
    assert found.sentence.startswith("The target score (no held-out reward was given), hps, is highest at scale 1")


def test_means_count_prompts_and_leave_failures_out() -> None:
    values = np.array([[1.0, 2.0], [3.0, math.nan], [5.0, 6.0]])
    found = mean_of(values)
    assert found.mean == pytest.approx(17 / 5)
    # Prompts of two, one and two images: Student's t with 1.9 degrees of freedom (Bell and McCaffrey).
    assert found.high - found.mean == found.mean - found.low == pytest.approx(9.2328, abs=1e-3)
    assert not mean_of(np.full((3, 2), math.nan)).known


@pytest.mark.parametrize("name", ["geneval:graded", "attributes", "pixel diversity", "hps"])
def test_bounds_stay_where_values_can_lie(name: str) -> None:
    columns = {
        Setting(kind="rlg", scale=s): {"geneval:graded": np.array([[0.9], [s]]), name: np.array([[0.98 - s], [0.5]])}
        for s in (0.0, 0.5)
    }
    for found in columns.values():
        found["pixel diversity"] = found[name]
    measure = Measure(role="target", reward="geneval", part="graded")
    base, one = results_of(columns, [measure], evaluations=dict.fromkeys(columns, 20), drifts={}).settings
    assert (base.means[name].high <= 1 and one.means[name].low >= 0) == (name != "hps")
    assert (one.to_base[name].low >= -1) == (name != "hps")


def test_differences_of_verdicts_leave_room_for_what_they_did_not_show() -> None:
    same = difference_of(np.ones((8, 1)), np.ones((8, 1)))
    assert same.low < 0 < same.high
    columns = {
        Setting(kind="rlg", scale=s): {"geneval:official": np.full((2, 1), s), "diversity": np.ones((2, 1))}
        for s in (0.0, 1.0)
    }
    found = results_of(columns, [TARGET], evaluations=dict.fromkeys(columns, 20), drifts={})
    assert found.peak.to_base[TARGET.name].low < 0, "two prompts are no proof"
    assert [one.setting.scale for one in found.level] == [0.0]
    apart = difference_of(np.full((4, 1), 0.5), np.full((4, 1), 0.25))  # no verdicts
    assert apart.mean == 0.25
    assert not apart.known


def test_an_unknown_sub_score_is_refused() -> None:
    row = {"values": {"geneval": [1.0], "geneval/strict": [1.0]}, "diversity": {"pixels": 0.1}}
    with pytest.raises(ValueError, match=r"no sub-score 'official': there are strict"):
        columns_of([row], [TARGET])


def test_what_a_run_was_trained_on_is_known() -> None:
    rewards = [{"name": "geneval", "weight": 1.0, "options": {"credit": "official"}}, {"name": "hps", "weight": 0}]
    assert trained_on(rewards, TARGET)
    assert not trained_on(rewards, Measure(role="heldout", reward="geneval", part="graded"))
    assert not trained_on(rewards, JUDGE)  # it was watched only


# ---- what it refuses -------------------------------------------------------------------------------------------------


def test_negative_scales_need_no_equals_sign() -> None:
    assert parse("run", "--rlg", "-1,-.5,0").rlg == "-1,-.5,0"
    assert numbers("-1, 1,-.5", "`rlg`", "") == (-1.0, 1.0, -0.5)


@pytest.mark.parametrize(("arguments", "message"), [
    (("--rlg", ""), "--rlg takes finite numbers separated by commas, such as 0,0.5,1,1.5,2,3, got nothing"),
    (("--rlg", "0,,1"), "got '0,,1'"),
    (("--rlg", "0,nan"), "finite numbers"),
    (("--rlg", "0,inf"), "finite numbers"),
    (("--rlg", "half"), "got 'half'"),
    (("--best-of", "0"), "whole numbers from 1 on"),
    (("--best-of", "1.5"), "whole numbers from 1 on"),
    (("--prune", "8"), "8@3,6"),
    (("--prune", "8@0"), "from 1 to at most 3"),
    (("--prune", "8@4"), "from 1 to at most 3"),
    (("--prune", "8@2,1"), "steps rise"),
    (("--prune", "2@1,2,3"), "start with more"),
    (("--prune", "4@1", "--keep", "1"), "--keep is the share"),
    (("--keep", "nan"), "--keep is the share"),
    (("--samples", "1"), "--samples must be at least 2, got 1: diversity"),
    (("--num-prompts", "1"), "--num-prompts must be at least 2"),
    (("--rewards", "smooth_brightness"), "write target=NAME or heldout=NAME"),
    (("--rewards", "target=brightnes"), "unknown reward"),
    (("--rewards", "heldout=hps"), "needs a target"),
    (("--rewards", "target=hps,heldout=hps"), "names hps twice"),
    (("--rewards", "target=geneval:"), "names no sub-score"),
    (("--rewards", "target=adversarial"), "adversarial"),
    (("--option", "scale=raw"), "begin with the reward"),
    (("--select", "brightnes", "--best-of", "2"), "--select: unknown reward"),
    (("--also", "nowhere"), "there is no folder nowhere"),
    (("--prompts", "nowhere.txt"), "there is no 'nowhere.txt'"),
    (("--device", "tpu"), "not available"),
])  # fmt: skip
def test_a_bad_command_line_is_refused(
    runs: Path, tmp_path: Path, arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(sweep_run, "load_model", None)  # nothing is loaded
    assert sweep(str(runs / "strong"), *COMMON, "--out", str(tmp_path / "out"), *arguments) == 1
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out" / "sweep.json").exists()


def test_sources_that_are_none_are_refused(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checkpoints(), "toy", PUBLISHED)
    with pytest.raises(ValueError, match="there is no folder"):
        called(str(tmp_path / "nothing"), *COMMON)
    with pytest.raises(ValueError, match="there is no LoRA in"):
        called(str(tmp_path), *COMMON)
    (tmp_path / "config.yaml").write_text((runs / "strong" / "config.yaml").read_text())
    with pytest.raises(ValueError, match="has no lora/ yet: finish it"):
        called(str(tmp_path), *COMMON)
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "pytorch_lora_weights.safetensors").write_bytes(
        (runs / "strong" / "lora" / "pytorch_lora_weights.safetensors").read_bytes()
    )
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(ValueError, match="give `base` MODEL"):
        called(str(alone), *COMMON)
    with pytest.raises(ValueError, match="which prompts"):
        called(str(alone), "--base", "toy", *COMMON)
    with pytest.raises(ValueError, match="`rewards` is missing"):
        called(str(alone), "--base", "toy", "--device", "cpu")


def test_models_that_make_videos_are_refused(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "pytorch_lora_weights.safetensors").touch()
    with pytest.raises(ValueError, match=r"tiny-wan makes videos \(family wan\) and flowrl sweep judges images"):
        called(str(tmp_path), "--base", "asset:tiny-wan", *COMMON)


def test_a_reward_of_images_that_the_prompts_lack_is_refused() -> None:
    reward = FunctionReward(name="edit", score=lambda inputs: None, needs=frozenset({"source_images"}), version="1")  # type: ignore[arg-type,return-value]
    bare, full = Prompt(text="a", metadata={}), Prompt(text="a", metadata={}, sources=("a.png",))
    sweep_run._check_reward("edit", reward, [full, full], measured=True)
    with pytest.raises(ValueError, match=r"'edit' needs source_images: .* all of which must name them"):
        sweep_run._check_reward("edit", reward, [full, bare], measured=True)


def test_another_base_and_one_run_twice_are_refused(runs: Path, tmp_path: Path) -> None:
    strange = tmp_path / "strange"
    (strange / "lora").mkdir(parents=True)
    (strange / "lora" / "adapter_model.safetensors").touch()
    text = (runs / "weak" / "config.yaml").read_text().replace("model: toy", "model: other")
    (strange / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match="was trained on other, this sweep is of toy"):
        called(str(runs / "strong"), *COMMON, "--also", str(strange))
    with pytest.raises(ValueError, match="one run twice"):
        called(str(runs / "strong"), *COMMON, "--also", str(runs / "weak"), "--also", str(runs / "weak"))


def test_a_second_sweep_in_the_folder_is_refused(runs: Path, tmp_path: Path) -> None:
    import fcntl

    with (tmp_path / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another sweep is still at work"):
            called(str(runs / "strong"), *COMMON, "--out", str(tmp_path))
