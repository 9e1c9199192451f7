"""The page by symptom names every sign and warning that a run can show, and states no threshold of them."""

from __future__ import annotations

import re
from pathlib import Path

from flowrl.config.train import TrainConfig
from flowrl.runs.vital_signs import ALARMS, SIGNS

PAGE = (Path(__file__).resolve().parents[2] / "docs/troubleshooting.md").read_text()


def test_every_warning_and_sign_is_on_the_page() -> None:
    names = set(ALARMS)
    assert len(names) == 12, names
    assert {name for name in names if f"`{name}`" not in PAGE} == set()
    assert {sign.key for sign in SIGNS if f"`{sign.key}`" not in PAGE} == set()


def test_the_page_states_no_threshold() -> None:
    signs = PAGE.split("## It runs, and learns nothing")[1].split("## Ask for help")[0]
    numbers = set(re.findall(r"(?<![\w.])\d[\d.e]*", signs))
    assert numbers <= {"0", "1"}, "name the metric, and leave the number to the code"


def test_keys_and_files_on_the_page_exist() -> None:
    for path in re.findall(r"`(flowrl/[\w/]+\.py)`", PAGE):
        assert (Path(__file__).resolve().parents[2] / path).is_file(), path
    for link in re.findall(r"\]\((\w+\.md)\)", PAGE):
        assert (Path(__file__).resolve().parents[2] / "docs" / link).is_file(), link
    keys = TrainConfig.__dataclass_fields__.keys()
    for key in re.findall(r"`(\w+)(?:\.\w+)?=[^`]*`", PAGE):
        assert key in keys or key.isupper(), key
