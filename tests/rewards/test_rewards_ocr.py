"""Text reading: its arithmetic in closed form, what the packaged models read off drawn images, and a fake reader."""

from __future__ import annotations

import importlib.util
import math
import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from torch import Tensor

from flowrl.rewards import Reward, RewardInputs, build_reward, ocr, reward_options
from flowrl.rewards.base.outputs import check_output
from flowrl.rewards.ocr import normalise_text, text_reward


def reward_of(read: str, target: str, **options: Any) -> float:
    return text_reward(normalise_text(read, "nospace_lower"), normalise_text(target, "nospace_lower"), **options)


@pytest.mark.parametrize(
    ("read", "target", "value"),
    [
        ("Hello World", "hello world", 1.0),
        ("helo world", "Hello World", 0.9),
        ("XXhelloworldYY", "Hello World", 1.0),
        ("", "Hello", 0.0),
        ("something long that has nothing to do with it", "Hello", 0.0),
        ("hell0", "hello", 0.8),
        ("World Hello", "Hello World", 0.2),
        ("HelloHello", "Hello", 1.0),
    ],
)
def test_reward_of_read_and_target(read: str, target: str, value: float) -> None:
    assert reward_of(read, target) == pytest.approx(value, abs=1e-12)


def test_surplus_text_around_the_target_costs_what_it_is_set_to() -> None:
    """'HELLO' with two more letters of five: free, a fifth each at penalty 1 as by edit distance, never below 0."""
    penalties = [0.0, 0.25, 1.0, 9.0]
    assert [reward_of("xHELLOx", "hello", extra_text_penalty=p) for p in penalties] == pytest.approx([1, 0.9, 0.6, 0])
    assert reward_of("xHELLOx", "hello", substring_ok=False) == pytest.approx(0.6)
    assert reward_of("HELLO", "hello", extra_text_penalty=9.0) == 1.0


def test_normalisations() -> None:
    text = " \uff26\uff4c\uff4f\uff57 \ufb01nd\tStra\u00dfe "  # full-width letters, a ligature, a sharp s
    assert normalise_text(text, "none") == text
    assert normalise_text(text, "nospace_lower") == "\uff46\uff4c\uff4f\uff57\ufb01ndstra\u00dfe"
    assert normalise_text(text, "nfkc") == "flowfindstrasse"


# What the packaged models read.


def drawn(text: str, *, size: int = 64, side: int = 512, ink: str = "black", paper: str = "white") -> Image.Image:
    image = Image.new("RGB", (side, side), paper)
    font = ImageFont.load_default(size)
    ImageDraw.Draw(image).text((side / 2, side / 2), text, fill=ink, font=font, anchor="mm", align="center")
    return image


def noisy(image: Image.Image, sigma: float) -> Image.Image:
    noise = np.random.default_rng(0).normal(0, sigma, (*image.size[::-1], 3))
    return Image.fromarray(np.clip(np.asarray(image, dtype=np.float64) + noise, 0, 255).astype(np.uint8))


def inputs_of(images: list[Image.Image], prompts: list[str], metadata: Any = None) -> RewardInputs:
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
    return RewardInputs(
        prompts=prompts,
        images=pixels.permute(0, 3, 1, 2).float() / 255.0,
        metadata=metadata or [{} for _ in prompts],
        group_ids=torch.arange(len(prompts)),
        sample_ids=torch.arange(len(prompts)),
    )


@pytest.fixture(scope="module")
def reader() -> Reward:
    return build_reward("ocr", options={"workers": 2})


@pytest.mark.slow
def test_drawn_text_is_read_without_a_connection(reader: Reward, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any, **options: Any) -> None:
        raise AssertionError("reading text must not open a connection")

    monkeypatch.setattr(socket, "socket", refused)
    hello = drawn("HELLO")
    cases = [(drawn(text), text) for text in ("Hello World", "Hello\nWorld", "NASA 2049", "abc123", "Now Boarding")]
    cases += [(hello, "HELLO"), (drawn("OPEN", size=32), "OPEN"), (drawn("HELLO", size=16), "HELLO")]
    cases += [(drawn("Flow GRPO", ink="red", paper="blue"), "Flow GRPO")]
    cases += [(hello.rotate(15, fillcolor="white"), "HELLO"), (hello.rotate(-90, fillcolor="white"), "HELLO")]
    cases += [(noisy(hello, 60.0), "HELLO"), (hello.filter(ImageFilter.GaussianBlur(4)), "HELLO")]
    images, texts = [image for image, _ in cases], [text for _, text in cases]
    output = check_output(reader(inputs_of(images, [f'a sign that says "{t}"' for t in texts])), len(cases), "ocr")
    assert output.values.tolist() == [1.0] * len(cases)
    assert output.parts["found"].tolist() == [1.0] * len(cases)
    assert output.parts["extra"].tolist() == [0.0] * len(cases)


@pytest.mark.slow
def test_blank_noise_and_wrong_words_and_order_of_the_batch(reader: Reward) -> None:
    """Blank paper and noise 0; HELLO for HELP 1 - 2/4, for JELLO 1 - 1/5; alone and in another order the same."""
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (512, 512, 3), dtype=np.uint8))
    blank, hello = Image.new("RGB", (512, 512), "white"), drawn("HELLO")
    inputs = inputs_of([blank, noise, hello, hello], [f'"{t}"' for t in ("HELLO", "HELLO", "HELP", "JELLO")])
    values = reader(inputs).values
    assert values.tolist() == pytest.approx([0.0, 0.0, 0.5, 0.8])
    assert reader(inputs[[3, 1]]).values.tolist() == values[[3, 1]].tolist()
    assert reader(inputs[[2]]).values.tolist() == values[[2]].tolist()


@pytest.mark.slow
def test_the_angle_classifier_reads_upside_down_text() -> None:
    upright = build_reward("ocr")
    turning = build_reward("ocr", options={"angle_classifier": True})
    images = [drawn("Hello World").rotate(angle, fillcolor="white") for angle in (90, 180)]
    inputs = inputs_of(images, ['"Hello World"'] * 2)
    assert turning(inputs).values.tolist() == [1.0, 1.0]
    assert max(upright(inputs).values.tolist()) < 1.0
    assert turning.version != upright.version
    assert "PP-OCR" in upright.version


# Rules around the reading, with a reader that says what an image's first pixel stands for.

WORDS = ["", "HELLO", "HELP", "HELLO there"]
BROKEN = len(WORDS)


def code(*words: int) -> Tensor:
    images = torch.zeros(len(words), 3, 4, 4)
    images[:, 0, 0, 0] = torch.tensor(words) / 255.0
    return images


def fake(image: np.ndarray) -> str | None:
    return None if image[0, 0, 0] == BROKEN else WORDS[image[0, 0, 0]]


@pytest.fixture
def fake_ocr(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Reward]:
    monkeypatch.setattr(ocr.Ocr, "_rapidocr", lambda options: fake)
    return lambda **options: build_reward("ocr", options=options)


def coded(words: list[int], prompts: list[str], **fields: Any) -> RewardInputs:
    batch = len(words)
    given: dict[str, Any] = {"metadata": [{} for _ in words], "images": code(*words)} | fields
    return RewardInputs(prompts=prompts, group_ids=torch.arange(batch), sample_ids=torch.arange(batch), **given)


def test_items_without_a_target_or_a_reading_are_invalid_not_0(fake_ocr: Callable[..., Reward]) -> None:
    inputs = coded([1, 1, 1, BROKEN, 0], ['"hello"', "no quotes", 'only " "', '"hello"', '"hello"'])
    output = check_output(fake_ocr()(inputs), 5, "ocr")
    assert output.valid.tolist() == [True, False, False, False, True]
    assert output.values[output.valid].tolist() == [1.0, 0.0]
    assert output.errors == {"empty_target": 2, "reader_error": 1}
    nothing = fake_ocr()(inputs[[1, 2]])
    assert nothing.errors == {"empty_target": 2}
    assert bool(nothing.values.isnan().all())


def test_empty_targets_by_option(fake_ocr: Callable[..., Reward]) -> None:
    inputs = coded([0, 1, 1], ["no quotes", "no quotes", "hello"])
    assert fake_ocr(on_empty_target="blank")(inputs).values.tolist() == [1.0, 0.0, 0.0]
    assert fake_ocr(on_empty_target="prompt")(inputs).values.tolist() == pytest.approx([0.0, 1 - 7 / 8, 1.0])


def test_where_the_target_comes_from(fake_ocr: Callable[..., Reward]) -> None:
    prompts = ['"hello" and "help"', "'help' is there", "the sign says help today"]
    inputs = coded([1, 2, 2], prompts)
    assert fake_ocr()(inputs).valid.tolist() == [True, False, False]
    either = fake_ocr(target_regex="\"([^\"]*)\"|'([^']*)'")(inputs)
    assert either.values[:2].tolist() == [1.0, 1.0]
    whole_match = fake_ocr(target_regex=r"(?<=says )\w+")(inputs)
    assert whole_match.values[2:].tolist() == [1.0]
    metadata = [{"text": "HELP"}, {"text": 3}, {}]
    fields = fake_ocr(target_field="text")(coded([2, 2, 2], prompts, metadata=metadata))
    assert fields.valid.tolist() == [True, False, False]
    assert (fields.values[0].item(), fields.errors) == (1.0, {"missing_field": 2})


def test_options_reach_the_arithmetic(fake_ocr: Callable[..., Reward]) -> None:
    inputs = coded([3, 1], ['"HELLO"', '"hello"'])
    assert fake_ocr()(inputs).values.tolist() == [1.0, 1.0]
    assert fake_ocr(substring_ok=False)(inputs).values.tolist() == [0.0, 1.0]
    assert fake_ocr(extra_text_penalty=0.5)(inputs).values.tolist() == pytest.approx([0.5, 1.0])
    assert fake_ocr(normalise="none")(inputs).values.tolist() == [1.0, 0.0]
    versions = [fake_ocr(**o).version for o in ({}, {"substring_ok": False}, {"extra_text_penalty": 0.5})]
    assert len(set(versions)) == 3


def test_videos_are_read_at_every_fourth_frame_and_averaged_where_something_was_read(
    fake_ocr: Callable[..., Reward],
) -> None:
    """Frames 0, 4, 8 of nine: HELLO, nothing, HELP for the target HELLO: mean of 1 and 0.6; others are not read."""
    frames = [[1, 3, 3, 3, 0, 3, 3, 3, 2], [0, 1, 1, 1, 0, 1, 1, 1, 0], [BROKEN, 1, 1, 1, 1, 1, 1, 1, 1]]
    videos = torch.stack([code(*video) for video in frames])
    inputs = coded([0, 0, 0], ['"HELLO"'] * 3, images=videos[:, 0].contiguous(), videos=videos)
    output = check_output(fake_ocr()(inputs), 3, "ocr")
    assert output.values[:2].tolist() == pytest.approx([0.8, 0.0])
    assert output.valid.tolist() == [True, True, False]
    assert output.errors == {"reader_error": 1}


def test_readers_are_not_shared_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that another thread enters while it reads would mix images up: here it would raise."""
    made = []

    def make(options: ocr.Ocr) -> Callable[[np.ndarray], str | None]:
        lock = threading.Lock()
        made.append(lock)

        def read(image: np.ndarray) -> str | None:
            assert lock.acquire(blocking=False)
            threading.Event().wait(0.01)
            lock.release()
            return fake(image)

        return read

    monkeypatch.setattr(ocr.Ocr, "_rapidocr", make)
    words = [1, 2, 0, 3] * 4
    reward = build_reward("ocr", options={"workers": 3})
    values = reward(coded(words, ['"HELLO"'] * 16)).values
    assert values.tolist() == pytest.approx([1.0, 0.6, 0.0, 1.0] * 4)
    assert 1 < len(made) <= 3


def test_options_that_cannot_work_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"target_regex": "("}, r"target_regex '\(' is not a regular expression"),
        ({"extra_text_penalty": -1}, "extra_text_penalty must be at least 0, got -1"),
        ({"extra_text_penalty": math.nan}, "extra_text_penalty must be a finite number"),
        ({"min_confidence": 1}, r"min_confidence must lie in \[0, 1\), got 1"),
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"normalise": "lower"}, "must be one of nospace_lower, nfkc, none, got 'lower'"),
        ({"on_empty_target": "one"}, "must be one of skip, blank, prompt, got 'one'"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            reward_options("ocr", options)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "rapidocr" else find(name))
    with pytest.raises(ValueError, match=r"rapidocr must be installed: .* pip install -e '\.\[ocr\]'"):
        reward_options("ocr", {})
    with pytest.raises(ValueError, match="the target is empty"):
        text_reward("a", "")
