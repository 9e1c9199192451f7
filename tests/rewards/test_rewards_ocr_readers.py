"""Text reading by a vision-language model and by PaddleOCR, each of a stand-in."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from scripted_judges import JUDGE, level, script, text_of
from tiny_clip import inputs_of
from torch import Tensor

from flowrl.rewards import build_reward, reward_options
from flowrl.rewards.judges.chat import Answer, Question

pytest.importorskip("rapidfuzz")
SAID = {0: "HELLO", 1: " Hello\nthere ", 2: "(No text).", 3: ""}


def greys(*levels: int) -> Tensor:
    """Images of one 8-bit level each."""
    return (torch.tensor(levels).float() / 255)[:, None, None, None].expand(-1, 3, 16, 16).clone()


def test_a_judge_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(question: Question) -> Answer:
        return Answer(error="timeout") if level(question) == 9 else Answer(text=SAID[level(question)])

    judge = script(monkeypatch, answer)
    reward = build_reward("ocr", options={"reader": "vlm", "judge": JUDGE})
    assert (reward.kind, reward.waits) == ("remote", True)
    output = reward(inputs_of(greys(0, 1, 2, 3, 9), ['a sign "Hello"'] * 5))
    assert output.valid.tolist() == [True, True, True, True, False]
    assert output.values[:4].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert output.parts["extra"][1] == 5  # "there"
    assert output.errors == {"reader_error": 1}
    assert judge.calls == [5]
    assert "(no text)" in text_of(judge.asked[0])
    assert judge.asked[0].max_tokens > 100
    skipped = reward(inputs_of(greys(0), ["no quotes"]))
    assert skipped.errors == {"empty_target": 1}


def test_frames_of_videos_are_read_by_the_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fourth frame; the mean of those above 0."""
    script(monkeypatch, lambda question: Answer(text=SAID[level(question)]))
    frames = greys(0, 9, 9, 9, 2, 9)[None]
    reward = build_reward("ocr", options={"reader": "vlm", "judge": JUDGE})
    output = reward(inputs_of(frames[:, 0], ['"hello"'], videos=frames, fps=8.0))
    assert output.values.tolist() == [1.0]


class Paddle:
    """PaddleOCR 2's class: boxes, texts and confidences by the red of the first pixel."""

    made: dict[str, Any]

    def __init__(self, **given: Any) -> None:
        Paddle.made = given

    def ocr(self, image: np.ndarray, cls: bool) -> Any:
        if image[0, 0, 0] == 9:
            raise RuntimeError("the network failed")
        return [None] if image[0, 0, 0] == 2 else [[[[[0, 0]], ("Hel", 0.9)], [[[0, 9]], ("lo", 0.4)]]]


def test_paddle_reads_red_first_and_keeps_what_it_is_sure_of(monkeypatch: pytest.MonkeyPatch) -> None:
    package, paddle = ModuleType("paddleocr"), ModuleType("paddle")
    package.PaddleOCR = Paddle  # type: ignore[attr-defined]
    paddle.__version__ = "2.6.2"  # type: ignore[attr-defined]
    find, version = importlib.util.find_spec, importlib.metadata.version
    for name, module in (("paddleocr", package), ("paddle", paddle)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: n if n in ("paddleocr", "paddle") else find(n))
    monkeypatch.setattr(importlib.metadata, "version", lambda n: "2.9.1" if n == "paddleocr" else version(n))
    images = greys(0, 2, 9)
    images[:, 2] = 0.5  # blue first would read another level
    for sure, value in ((0.0, 1.0), (0.5, 0.6)):
        reward = build_reward("ocr", options={"reader": "paddle", "min_confidence": sure})
        output = reward(inputs_of(images, ['"hello"'] * 3))
        assert output.values[:2].tolist() == pytest.approx([value, 0.0])
        assert output.errors == {"reader_error": 1}
        assert reward.version.endswith(f"confidence-{sure:g}:angle-False:paddleocr-2.9.1:paddle-2.6.2")
    assert Paddle.made["lang"] == "en"
    assert not Paddle.made["use_angle_cls"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reader": "vlm"}, "goes with judge"),
        ({"judge": JUDGE}, "goes with judge"),
        ({"template": "x.txt"}, "template is what"),
        ({"reader": "vlm", "judge": JUDGE, "workers": 2}, "not for reader vlm"),
        ({"reader": "vlm", "judge": JUDGE, "template": "./none.txt"}, "cannot be read"),
        ({"reader": "tesseract"}, "reader must be one of"),
    ],
)
def test_options_that_contradict_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        reward_options("ocr", options)


def test_paddle_that_is_not_there_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "paddle" else find(n))
    with pytest.raises(ValueError, match="pip install 'paddleocr<3' paddlepaddle"):
        reward_options("ocr", {"reader": "paddle"})
