"""`flowrl compare` end to end on tiny runs: what it trains, what it leaves alone, how it goes on, what it refuses."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import IO, Any

import pytest
import yaml
from tiny_runs import TinyRuns, metrics, tiny_runs
from toy_pipeline import toy_runs

import flowrl
import flowrl.comparing.measure as compare_measure
import flowrl.comparing.trainings as compare_run
from flowrl.cli import main
from flowrl.comparing.measure import image_spread
from flowrl.comparing.question import ask, base_key, evaluated_rewards, parse_budget, read_journal
from flowrl.comparing.trainings import spent_share, standing
from flowrl.config.train import load_config
from flowrl.pipelines import PIPELINES, Pipeline
from flowrl.training import parts
from flowrl.training.run import Run
from flowrl.trajectory import Schedule

BUDGET = ("--budget", "nfe=100", "--evals", "1")  # two iterations of 56
FAMILY = PIPELINES["sd3"]
START_PROCESS = compare_run.start_process


class Trained:
    """A training that has run in this process; a stand-in for the one that `flowrl compare` starts."""

    def __init__(self, code: int) -> None:
        self.code = code

    def poll(self) -> int:
        return self.code

    def send_signal(self, sig: int, /) -> None:
        pass


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were started; they run in this process."""
    commands: list[list[str]] = []

    def train(arguments: Sequence[str], log: Path, lock: IO[Any], environment: Mapping[str, str]) -> Trained:
        commands.append(list(arguments))
        with log.open("a") as output, redirect_stdout(output), redirect_stderr(output):
            return Trained(main(arguments))

    monkeypatch.setattr(compare_run, "start_process", train)
    monkeypatch.setattr(compare_run, "_LOOK_EVERY", 0.0)
    for name in ("KL_PROMPTS", "DIVERSITY_PROMPTS", "DIVERSITY_SEEDS"):
        monkeypatch.setattr(compare_measure, name, 2)
    return commands


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRuns]:
    """Two configurations: `tiny_slow` and `tiny_fast`, which learns with twice the rate."""
    for runs in toy_runs(tmp_path_factory.mktemp("compare")):
        write_methods(runs)
        yield runs


def write_methods(runs: TinyRuns) -> None:
    config = yaml.safe_load(runs.config.read_text())
    config["prompts"]["eval"] = config["prompts"]["train"]
    config["eval"] = {"num_images": 2}
    write(runs.folder / "tiny_slow.yaml", config)
    write(runs.folder / "tiny_fast.yaml", config | {"optim": {"lr": 0.02}})


def write(path: Path, config: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture
def compare(tiny: TinyRuns, started: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command, in the folder of the configurations."""
    monkeypatch.chdir(tiny.folder)
    return lambda *arguments: main(["compare", *arguments])


@pytest.fixture
def compared(tiny: TinyRuns, compare: Callable[..., int], started: list[list[str]]) -> Iterator[Path]:
    """A finished comparison of two methods and two seeds, made once and copied for each test."""
    made, copy = tiny.folder / "made", tiny.folder / "cmp"
    if not made.exists():
        assert compare("tiny_slow.yaml", "--out", "cmp", "tiny_fast.yaml", "--num-seeds", "2", *BUDGET) == 0
        assert len(started) == 4
        shutil.copytree(copy, made)
        started.clear()
    else:
        shutil.copytree(made, copy)
    yield copy
    shutil.rmtree(copy)


@pytest.mark.slow
def test_from_python_a_finished_comparison_has_a_row_per_method(compared: Path, started: list[list[str]]) -> None:
    files = ["tiny_slow.yaml", "tiny_fast.yaml"]
    found = flowrl.compare(files, out="cmp", num_seeds=2, budget=BUDGET[1], evals=1, show=False)
    assert started == [], "nothing is trained again"
    assert {row.name for row in found.methods} == {"tiny_slow", "tiny_fast"}
    assert found.baseline == "tiny_slow"
    assert [len(row.seed_scores) for row in found.methods] == [2, 2]
    assert "tiny_fast" in found._repr_html_()
    assert found.missing == {}


def test_every_run_is_an_ordinary_one_and_the_first_evaluation_is_shared(compared: Path) -> None:
    names = ["tiny_slow-s0", "tiny_fast-s0", "tiny_slow-s1", "tiny_fast-s1"]
    assert list(read_journal(compared)["runs"]) == names
    for name in names:
        config = yaml.safe_load((compared / name / "config.yaml").read_text())
        assert (config["seed"], config["budget"]["nfe"]) == (int(name[-1]), 100)
        assert config["eval"]["initial"] == (name == names[0])
        rows = metrics(compared / name)
        assert [row["iteration"] for row in rows if "reward" in row] == [0, 1]
        assert rows[-1]["nfe/total"] == 112
        assert "eval/reward/brightness" in rows[-1]
        assert (compared / name / "eval" / "iteration_000000.jsonl").exists() == (name == names[0])
    assert {entry["state"] for entry in read_journal(compared)["runs"].values()} == {"finished"}


def test_the_table_and_the_page_are_written(compared: Path, compare: Callable[..., int]) -> None:
    page, table = (compared / f"compare.{kind}" for kind in ("html", "md"))
    assert "://" not in page.read_text()
    assert "Difference to slow" in page.read_text()
    assert page.read_text().count("<img") == 6  # two prompts before training and of two methods
    old = table.read_text()
    assert "| slow * |" in old
    found = json.loads((compared / "results.json").read_text())
    assert list(found["methods"]) == ["tiny_fast", "tiny_slow"]
    assert found["provenance"][0].startswith("budget: nfe=100")
    assert "| fast |" in old
    assert "2 training seeds" in old
    for measured in compared.glob("*/measure.json"):
        measured.rename(measured.with_suffix(".kept"))
    assert compare("--out", "cmp", "--report-only", "--baseline", "tiny_fast") == 0
    assert not list(compared.glob("*/measure.json"))  # only written again, nothing is measured
    assert "Final models" not in table.read_text()
    for kept in compared.glob("*/measure.kept"):
        kept.rename(kept.with_suffix(".json"))
    assert "| fast * |" in table.read_text()
    assert "Difference to fast" in table.read_text()


def test_the_same_command_again_trains_nothing(
    compared: Path, compare: Callable[..., int], started: list[list[str]]
) -> None:
    before = {path: path.read_bytes() for path in compared.glob("*/metrics.jsonl")}
    assert compare("tiny_slow.yaml", "tiny_fast.yaml", "--num-seeds", "2", *BUDGET, "--out", "cmp") == 0
    assert compare("--out", "cmp") == 0
    assert started == []
    assert len(before) == 4
    assert before == {path: path.read_bytes() for path in compared.glob("*/metrics.jsonl")}


@pytest.mark.slow
def test_an_interrupted_comparison_goes_on_to_the_same_end(
    compared: Path, compare: Callable[..., int], started: list[list[str]], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    wanted = metrics(compared / "tiny_slow-s0")
    command = ("tiny_slow.yaml", "--num-seeds", "2", *BUDGET, "--out", "again")
    train = compare_run.start_process

    def interrupted(*arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(Run, "should_stop", lambda run: any("reward" in row for row in metrics(run.folder)))
            process = train(*arguments)
        signal.raise_signal(signal.SIGINT)
        return process

    with monkeypatch.context() as patch:
        patch.setattr(compare_run, "start_process", interrupted)
        assert compare(*command) == 130
    assert "flowrl compare --out again" in capsys.readouterr().out
    assert [entry["state"] for entry in read_journal(Path("again"))["runs"].values()] == ["stopped", "waiting"]
    assert [row["iteration"] for row in metrics(Path("again/tiny_slow-s0")) if "reward" in row] == [0]

    assert compare("--out", "again") == 0
    assert [arguments[1] for arguments in started[1:]] == ["resume=again/tiny_slow-s0", "tiny_slow.yaml"]
    assert metrics(Path("again/tiny_slow-s0")) == wanted


@pytest.mark.slow
def test_a_failing_run_is_named_and_does_not_stop_the_others(
    tiny: TinyRuns, compare: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    config = yaml.safe_load((tiny.folder / "tiny_slow.yaml").read_text())
    source = "def bad(images, prompts, metadata):\n    raise ValueError('the judge is away')\n"
    (tiny.folder / "bad.py").write_text(source)
    config["rewards"] = [{"file": str(tiny.folder / "bad.py"), "function": "bad", "label": "brightness"}]
    write(tiny.folder / "broken.yaml", config)
    assert compare("broken.yaml", "tiny_slow.yaml", "--num-seeds", "1", *BUDGET, "--out", "half") == 1
    out = capsys.readouterr().out
    assert "1 of 2 runs finished, 1 failed:" in out
    assert "the judge is away" in out
    assert (tiny.folder / "half" / "tiny_slow-s0" / "eval" / "iteration_000000.jsonl").exists()
    assert "broken-s0: failed" in (tiny.folder / "half" / "compare.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tiny_slow.yaml", "tiny_fast.yaml", "--budget", "nfe=200"), "the budget was nfe=100, not nfe=200"),
        (("tiny_slow.yaml", "tiny_fast.yaml", "optim.lr=1"), "the overrides were none, not optim.lr=1"),
        (("tiny_slow.yaml",), "tiny_fast is missing"),
        (("tiny_slow.yaml", "tiny_fast.yaml", "--evals", "3"), "--evals was 1, not 3"),
        (("tiny_slow.yaml", "tiny_fast.yaml", "--num-seeds", "1"), "it has 2 seeds, not 1"),
        (("tiny_slow.yaml", "tiny_slow.yaml"), "are both called tiny_slow"),
        (("tiny_slow.yaml", "seed=3"), "sets seed of every run itself"),
        (("--budget", "seconds=100"), "the budget was nfe=100, not seconds=100"),
        (("--baseline", "nobody"), "--baseline: unknown method 'nobody'"),
        (("--report-only", "--metric", "eval/reward/brightnes"), "did you mean eval/reward/brightness?"),
    ],
)
def test_another_question_is_refused(
    compared: Path, compare: Callable[..., int], started: list[list[str]], capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...], message: str,
) -> None:  # fmt: skip
    journal = (compared / "compare.json").read_bytes()
    assert compare(*arguments, "--out", "cmp") == 1
    assert message in capsys.readouterr().err
    assert started == []
    assert (compared / "compare.json").read_bytes() == journal


def test_an_edited_configuration_is_refused(
    compared: Path, tiny: TinyRuns, compare: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny.folder / "tiny_fast.yaml"
    old = path.read_text()
    path.write_text(old.replace("lr: 0.02", "lr: 0.03"))
    try:
        assert compare("tiny_slow.yaml", "tiny_fast.yaml", "--out", "cmp") == 1
    finally:
        path.write_text(old)
    assert "tiny_fast had other settings: optim.lr was 0.02, not 0.03" in capsys.readouterr().err


def test_methods_and_seeds_may_be_added(compared: Path, tiny: TinyRuns) -> None:
    shutil.copy("tiny_fast.yaml", "tiny_third.yaml")
    words = ["tiny_slow.yaml", "tiny_third.yaml", "tiny_fast.yaml"]
    asked = ask(words, read_journal(compared), num_seeds=3, budget=None, evals=None)
    assert list(asked.methods) == ["tiny_slow", "tiny_fast", "tiny_third"] == list(asked.settings)
    assert asked.runs[:4] == [("tiny_slow", 0), ("tiny_fast", 0), ("tiny_third", 0), ("tiny_slow", 1)]
    assert len(asked.runs) == 9
    assert (asked.budget, asked.limit, asked.evals) == ("nfe", 100.0, 1)


def test_two_comparisons_in_one_folder_are_refused(
    compared: Path, compare: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    with (compared / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert compare("--out", "cmp") == 1
    assert "is still at work in cmp" in capsys.readouterr().err


def test_a_folder_of_something_else_is_refused(
    tiny: TinyRuns, compare: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    (tiny.folder / "mine").mkdir()
    (tiny.folder / "mine" / "thesis.txt").write_text("x")
    assert compare("tiny_slow.yaml", *BUDGET, "--out", "mine") == 1
    assert "holds no comparison" in capsys.readouterr().err
    assert [path.name for path in (tiny.folder / "mine").iterdir()] == ["thesis.txt"]
    assert compare("--report-only", "--out", "nothing") == 1
    assert "nothing holds no comparison" in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_training_process(
    tmp_path: Path,
    tiny_sd3_folder: Path,
    compare: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    warm_python: str,
) -> None:
    write_methods(tiny_runs(tmp_path, tiny_sd3_folder))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(PIPELINES, "sd3", FAMILY)  # which the process has
    monkeypatch.setattr(compare_run, "start_process", START_PROCESS)
    monkeypatch.setattr(sys, "executable", warm_python)
    monkeypatch.setattr(compare_run, "_LOOK_EVERY", 0.1)
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    assert compare("tiny_slow.yaml", "--num-seeds", "1", "--budget", "images=8", "--evals", "1", "--out", "real") == 0
    out, error = capsys.readouterr()
    assert "started   tiny_slow-s0" in error
    assert "1 of 1 run finished." in out
    assert "one training seed" in out.replace("\n", " ")
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "Starting real/tiny_slow-s0" in (tmp_path / "real" / "logs" / "tiny_slow-s0.log").read_text()


@pytest.mark.parametrize(
    ("override", "message"),
    [("optim.rl=1", "did you mean"), ("sampler.kernel=cpz", "tiny_slow.yaml: sampler.kernel must be one of")],
)
def test_what_a_training_would_refuse_is_refused_before_any_starts(
    tiny: TinyRuns, compare: Callable[..., int], started: list[list[str]], capsys: pytest.CaptureFixture[str],
    override: str, message: str,
) -> None:  # fmt: skip
    assert compare("tiny_slow.yaml", *BUDGET, "--out", "typo", override) == 1
    assert message in capsys.readouterr().err
    assert started == []
    assert not (tiny.folder / "typo").exists()


def test_methods_without_a_common_number_are_refused_before_any_starts(
    tiny: TinyRuns, compare: Callable[..., int], started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The table would refuse them, after every training."""
    config = yaml.safe_load((tiny.folder / "tiny_slow.yaml").read_text())
    write(tiny.folder / "other.yaml", config | {"rewards": [{"name": "jpeg_compressibility"}]})
    command = ("tiny_slow.yaml", "other.yaml", *BUDGET, "--out", "apart")
    assert compare(*command) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "other.yaml: its evaluations measure jpeg_compressibility and not brightness" in error
    assert compare(*command, "--metric", "eval/reward/jpeg_compressibility") == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "tiny_slow.yaml: its evaluations measure brightness and not jpeg_compressibility" in error
    assert started == []
    assert not (tiny.folder / "apart").exists()


@pytest.mark.slow
def test_what_evaluations_measure_is_what_a_run_logs(tiny: TinyRuns) -> None:
    more = [{"name": name} for name in ("jpeg_compressibility", "jpeg_incompressibility")]
    config = yaml.safe_load((tiny.folder / "tiny_slow.yaml").read_text())
    config["eval"] |= {
        "rewards": [config["rewards"][0], *more, more[0] | {"options": {"scale": "ddpo"}}, more[0] | {"label": "third"}]
    }
    path, out = write(tiny.folder / "several.yaml", config), tiny.folder / "logged"
    assert main(["train", str(path), f"out={out}", "num_iterations=1", "eval_every=1"]) == 0
    row = next(row for row in metrics(out) if "eval/reward/third" in row)
    logged = {key.removeprefix("eval/reward/") for key in row if key.startswith("eval/reward/")}
    names = {name for name in logged if "/" not in name and not name.endswith(("_low", "_high", "_invalid_ratio"))}
    measured = evaluated_rewards(load_config(path))
    assert set(measured) == names
    assert measured[-2] == "jpeg_compressibility_2"
    assert "brightness_2" not in measured, "trained on with the same options: once is enough"


@pytest.mark.parametrize("setting", [
    "pipeline.num_frames=9", "pipeline.fps=8", "pipeline.options={t5: false}", "sampler.shift=3", "eval.height=64",
    "eval.width=64", "eval.shift=training", "eval.rewards=[{name: jpeg_compressibility}]", "prompts.negative=blurry",
    "eval.seed=1",
])  # fmt: skip
def test_runs_share_the_first_evaluation_only_where_it_is_the_same(tiny: TinyRuns, setting: str) -> None:
    path = tiny.folder / "tiny_slow.yaml"
    plain = base_key(load_config(path))
    assert base_key(load_config(path, ["optim.lr=0.5", "seed=3"])) == plain
    assert base_key(load_config(path, [setting])) != plain


@pytest.mark.usefixtures("started")
def test_distances_are_measured_on_the_noise_levels_of_the_evaluation(
    tmp_path: Path, tiny_sd3_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a shift may go by the size that was trained on, or by the one that is drawn."""
    monkeypatch.setitem(PIPELINES, "sd3", FAMILY)  # the toy has one size
    runs = tiny_runs(tmp_path, tiny_sd3_folder)
    run = runs.train("run", f"prompts.eval={tmp_path / 'prompts.txt'}", "eval_every=1", "num_iterations=1")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["eval"] |= {"height": 48, "width": 56, "shift": "training"}
    write(run / "config.yaml", config)
    seen: list[tuple[int, ...]] = []
    whole = parts.eval_schedule

    def spy(settings: Any, trained: Pipeline, drawn: Pipeline) -> Schedule:
        seen.extend((trained.image_shape, drawn.image_shape))
        return whole(settings, trained, drawn)

    monkeypatch.setattr(compare_measure, "eval_schedule", spy)
    assert compare_measure.measure(run)["kl"] > 0
    assert seen[1] == (3, 48, 56) != seen[0]


def test_standing_tells_what_is_spent_and_what_is_left() -> None:
    runs = {"a-s0": {"state": "finished", "wall_seconds": 100.0}, "b-s0": {"state": "running", "wall_seconds": 0.0},
            "a-s1": {"state": "waiting", "wall_seconds": 0.0}}  # fmt: skip
    # b spent 25 % more in 25 s: 100 s a budget, so 50 s for its other half, and 100 s for the waiting one.
    assert standing(runs, [("b-s0", 0.5, 0.25, 25.0)]) == [
        "  b-s0  running  50%  left 0:00:50",
        "1 of 3 finished, 1 waiting  left 0:02:30",
    ]


def test_the_spent_share_is_read_from_whole_lines(compared: Path, tmp_path: Path) -> None:
    question = ask([], read_journal(compared), num_seeds=None, evals=None, budget=None)
    assert spent_share(tmp_path, question) == 0.0
    rows = [{"iteration": 0, "nfe/total": 25}, {"iteration": 1, "note": 1}]
    text = "\n".join(json.dumps(row) for row in rows) + '\n{"iteration": 2, "nfe/to'
    (tmp_path / "metrics.jsonl").write_text(text)
    assert spent_share(tmp_path, question) == 0.25


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("nfe=2e5", ("nfe", 200_000.0)), ("seconds=1.5", ("seconds", 1.5)), ("images=10", ("images", 10.0))],
)
def test_budgets_are_read(text: str, wanted: tuple[str, float]) -> None:
    assert parse_budget(text) == wanted


@pytest.mark.parametrize("text", ["nfe", "hours=3", "nfe=0", "nfe=inf", "nfe=many", "seconds=-1", "nfe=nan"])
def test_wrong_budgets_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"`budget` .* give nfe=NUMBER"):
        parse_budget(text)


def test_settings_alone_are_no_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "a=tiny.yaml", f"--out={tmp_path / 'all'}", "--budget=nfe=100"]) == 1
    assert "give the configurations to compare (a=tiny.yaml is a setting of all runs)" in capsys.readouterr().err
    assert not (tmp_path / "all").exists()


def test_image_spread_is_the_mean_distance_of_pairs() -> None:
    import torch

    flat = torch.tensor([0.0, 0.5, 1.0]).view(3, 1, 1, 1).expand(3, 3, 32, 32)
    assert image_spread(flat) == pytest.approx((0.5 + 1.0 + 0.5) / 3, abs=1e-12)
