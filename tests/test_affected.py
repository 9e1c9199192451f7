"""`make affected` finds the tests that a change can reach, and takes the nearest that fit."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest
from affected import KEPT, Checkout, changed_files, choose, distances, imported, is_test, read_checkout, told
from duration_table import Table
from house import ROOT

FILES = {
    "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["tests/helpers"]\n',
    "flowrl/__init__.py": "",
    "flowrl/cli.py": 'import importlib\ndef main(name):\n    importlib.import_module(f"flowrl.commands.{name}")\n',
    "flowrl/commands/list.py": "",
    "flowrl/far.py": "def f():\n    if True:\n        from flowrl.samplers.step import go\n",
    "samplers/__init__.py": 'TABLE = {"step": "flowrl.samplers.step:Step"}\n',
    "samplers/step.py": "def go(): pass\n",
    "samplers/words.json": "{}",
    "samplers/reader.py": 'PATH = "words.json"\n',
    "configs/sd3/sd3_grpo.yaml": "",
    "tests/conftest.py": "import pytest\nimport checker\n@pytest.fixture\ndef folder():\n    import maker\n",
    "tests/helpers/checker.py": "",
    "tests/helpers/maker.py": "",
    "tests/helpers/lone.py": "import flowrl.far\n",
    "tests/samplers/test_step.py": "from flowrl.samplers import TABLE\n",
    "tests/test_far.py": "from lone import x\n",
    "tests/test_cli.py": "from flowrl import cli\n",
    "tests/test_folder.py": "def test_a(folder): pass\n",
    "tests/test_data.py": "from flowrl.samplers.reader import PATH\n",
    "tests/test_configs.py": 'FOLDER = "configs"\n',
    "tests/test_named.py": 'NAME = "sd3_grpo"\n',
    "tests/test_sd3.py": 'NAME = "sd3"\n',
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    root = tmp_path_factory.mktemp("checkout")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return read_checkout(root)


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        ("samplers/step.py", {"tests/samplers/test_step.py": 2, "tests/test_far.py": 3}),
        ("flowrl/commands/list.py", {"tests/test_cli.py": 2}),
        ("tests/helpers/maker.py", {"tests/test_folder.py": 2}),
        ("samplers/words.json", {"tests/test_data.py": 2}),
        ("configs/sd3/sd3_grpo.yaml", {"tests/test_configs.py": 1, "tests/test_named.py": 1}),
        ("configs/sd3/other.yaml", {"tests/test_configs.py": 1}),
        ("tests/test_sd3.py", {"tests/test_sd3.py": 0}),
        ("docs/page.md", {}),
    ],
)
def test_a_change_reaches_what_uses_it(made: Checkout, changed: str, reached: dict[str, int]) -> None:
    found = distances(made, [changed])
    assert {name: steps for name, steps in found.items() if is_test(name)} == reached


@pytest.mark.parametrize(("changed", "steps"), [("tests/conftest.py", 1), ("tests/helpers/checker.py", 2)])
def test_what_every_test_uses_reaches_every_test(made: Checkout, changed: str, steps: int) -> None:
    found = distances(made, [changed])
    assert {name: found.get(name) for name in FILES if is_test(name)} == {
        name: steps for name in FILES if is_test(name)
    }


def test_what_is_kept_is_renewed_with_the_file(made: Checkout) -> None:
    assert read_checkout(made.root).uses == made.uses
    path = made.root / "tests" / "test_sd3.py"
    path.write_text("import flowrl.far\n")
    assert read_checkout(made.root).uses["tests/test_sd3.py"] == {"flowrl/far.py"}
    path.write_text(FILES["tests/test_sd3.py"])
    assert (made.root / KEPT).is_file()


# ---- choice ----------------------------------------------------------------------------------------------------------

TABLE = Table(
    files={"tests/test_near.py": 50.0, "tests/test_b.py": 10.0, "tests/test_a.py": 5.0, "tests/test_step.py": 9.0},
    tests={"tests/test_near.py::dear": 30.0, "tests/test_near.py::slow": 15.0, "tests/test_b.py::one": 4.0},
    slow=frozenset({"tests/test_near.py::slow"}),
)
FOUND = {
    "samplers/step.py": 0,
    "tests/test_near.py": 1,
    "tests/test_a.py": 2,
    "tests/test_b.py": 2,
    "tests/test_step.py": 4,
}


def test_the_nearest_run_first_and_of_those_the_cheapest() -> None:
    every = choose(TABLE, FOUND, ["samplers/step.py"], 0)
    assert every.files == ("tests/test_step.py", "tests/test_near.py", "tests/test_a.py", "tests/test_b.py")
    assert (every.seconds, every.without, every.left) == (59.0, (), {})


def test_what_does_not_fit_runs_in_part_or_is_left_out() -> None:
    some = choose(TABLE, FOUND, ["samplers/step.py"], 21)
    assert some.files == ("tests/test_step.py", "tests/test_near.py", "tests/test_a.py")
    assert some.without == ("tests/test_near.py::dear",)
    assert some.left == {"tests/test_b.py": 10.0}
    assert some.seconds == 19.0
    assert "left out, because they do not fit: 1 files (10 s) and 1 tests" in list(told(some, ["a"]))[1]


def test_changed_tests_always_run() -> None:
    found = {"tests/test_near.py": 0, "tests/test_a.py": 0}
    assert choose(TABLE, found, list(found), 1).files == ("tests/test_a.py", "tests/test_near.py")


# ---- this checkout ---------------------------------------------------------------------------------------------------


def test_imports_are_those_that_python_reads() -> None:
    for text in list(read_checkout().texts.values())[::40]:
        nodes = list(ast.walk(ast.parse(text)))
        wanted = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        wanted |= {
            f"{node.module}.{alias.name}" for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
        }
        assert imported(text) == wanted


@pytest.mark.slow
def test_files_of_this_checkout_reach_their_tests() -> None:
    checkout = read_checkout()
    for changed, test in {
        "samplers/kernels.py": "tests/samplers/test_kernels.py",
        "rewards/ocr.py": "tests/rewards/test_rewards_ocr.py",
        "pipelines/families/wan.py": "tests/pipelines/families/test_pipeline_families.py",
        "flowrl/commands/eval.py": "tests/evaluation/test_evaluation_command.py",
        "configs/sd3/sd35m_nft.yaml": "tests/test_config_comments.py",
        "pipelines/published.json": "tests/pipelines/families/test_pipeline_families.py",
        "docs/cards.md": "tests/planning/test_plan_cards.py",
        "tests/golden/toy_grpo.json": "tests/test_golden_toy.py",
        "Makefile": "tests/test_packaging.py",
    }.items():
        assert test in distances(checkout, [changed]), changed


def test_no_test_is_out_of_reach_of_a_change_of_all_product() -> None:
    """Those that are left use no product: they run where a file that they name changes."""
    checkout = read_checkout()
    found = distances(checkout, [name for name in checkout.modules.values() if not name.startswith("tests/")])
    missing = sorted(name for name in checkout.texts if is_test(name) and name not in found)
    assert missing == ["tests/test_durations.py", "tests/test_launch_files.py"]


def test_changed_files_are_those_of_git_and_new_ones(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    git("init", "--quiet")
    for name in ("a.py", "b.py", "c.py"):
        (tmp_path / name).write_text("1")
    git("add", ".")
    git("commit", "--quiet", "-m", "one")
    (tmp_path / "a.py").write_text("2")
    (tmp_path / "b.py").unlink()
    (tmp_path / "new one.py").write_text("3")
    assert changed_files(tmp_path, "HEAD") == ["a.py", "b.py", "new one.py"]
    assert changed_files(ROOT, "HEAD") == sorted(changed_files(ROOT, "HEAD"))
