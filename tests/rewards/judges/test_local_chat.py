"""Judges in this process, on a tiny random Qwen2-VL with a tokenizer and a chat template made here; and one served."""

from __future__ import annotations

import copy
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import torch
from PIL import Image
from tiny_vlm import write_tiny_vlm
from torch import Tensor

from flowrl.rewards import RewardInputs, build_reward
from flowrl.rewards.judges.chat import Chat, Question, build_chat, check_chat
from flowrl.rewards.judges.local_chat import GumbelNoise, LocalChat, LocalJudge

CPU = torch.device("cpu")
WORDS = ("Yes", " Yes", "No", " No", "yes")


@pytest.fixture(scope="module")
def tiny_vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_vlm(tmp_path_factory.mktemp("vlm"), words=WORDS, generation={"repetition_penalty": 3.0})


def chat_of(folder: Path, **options: Any) -> LocalJudge:
    chat = build_chat({"model": str(folder), **options}, device=CPU, owner="reward 'x'")
    assert isinstance(chat, LocalJudge)
    return chat


def images(number: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (40 + 14 * i, 48, 3), dtype=np.uint8) for i in range(number)]


def biased(chat: LocalJudge, **logits: float) -> LocalJudge:
    """The judge with some tokens' logits raised."""
    network = copy.deepcopy(chat.network)
    head, vocab = network.lm_head, chat.processor.tokenizer.get_vocab()
    bias = torch.zeros(head.out_features)
    for token, value in logits.items():
        bias[vocab[token]] = value
    head.register_forward_hook(lambda *arguments: arguments[2] + bias)
    return replace(chat, network=network)


def by_hand(chat: LocalJudge, prompt: str, images: list[np.ndarray], steps: int = 1) -> list[Tensor]:
    """Log-probabilities of greedy answers by whole forward passes without cache, from a prompt written out."""
    processor = chat.processor
    batch = processor(text=[prompt], images=[Image.fromarray(i) for i in images] or None, return_tensors="pt")
    found = []
    for _ in range(steps):
        with torch.no_grad():
            logits = chat.network(**batch).logits[0, -1]
        found.append(torch.log_softmax(logits, dim=-1))
        batch["input_ids"] = torch.cat([batch["input_ids"], logits.argmax().reshape(1, 1)], dim=1)
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        if "mm_token_type_ids" in batch:
            kinds = batch["mm_token_type_ids"]
            batch["mm_token_type_ids"] = torch.cat([kinds, torch.zeros_like(kinds[:, :1])], dim=1)
    return found


def test_logprobs_are_those_of_the_models_own_forward_pass(tiny_vlm: Path) -> None:
    """Parts in their order, the whole vocabulary as candidates, and none of the checkpoint's repetition penalty."""
    chat = chat_of(tiny_vlm)
    first, second = images(2)
    question = Question(parts=("a", first, "b", second, "Yes?"), system="Be just.", max_tokens=4, top_logprobs=999)
    (answer,) = chat.ask([question])
    slot = "<|vision_start|><|image_pad|><|vision_end|>"
    prompt = (
        f"<|im_start|>system\nBe just.<|im_end|>\n<|im_start|>user\na{slot}b{slot}Yes?<|im_end|>\n"
        f"<|im_start|>assistant\n"
    )
    expected = by_hand(chat, prompt, [first, second], steps=4)
    tokenizer = chat.processor.tokenizer
    assert answer.text == tokenizer.decode([int(step.argmax()) for step in expected], skip_special_tokens=True)
    assert len(answer.logprobs) == 4
    for found, step in zip(answer.logprobs, expected, strict=True):
        assert sum(math.exp(value) for value in found.values()) == pytest.approx(1.0, abs=1e-5)
        for word in ("Yes", " No", "7"):
            (token,) = tokenizer.encode(word, add_special_tokens=False)
            assert found[word] == pytest.approx(float(step[token]), abs=1e-5)
    few = chat.ask([replace(question, top_logprobs=5, max_tokens=1)])[0].logprobs[0]
    values = expected[0].topk(5).values.exp().sum()
    assert sum(math.exp(value) for value in few.values()) == pytest.approx(float(values), abs=1e-5)


def test_answers_do_not_depend_on_the_batch(tiny_vlm: Path) -> None:
    chat = chat_of(tiny_vlm)
    shown = images(3)
    questions = [Question(parts=(image, "Is it a dog?" * (i + 1)), top_logprobs=999) for i, image in enumerate(shown)]
    questions += [Question(parts=("No image?",), top_logprobs=999, max_tokens=2)]
    questions += [Question(parts=(*shown[:2], "Alike?"), top_logprobs=999)]
    together = chat.ask(questions)
    assert len({answer.logprobs[0]["Yes"] for answer in together}) == 5
    order = [3, 1, 4, 2, 0]
    for batch_size in (1, 2):
        again = replace(chat, options=replace(chat.options, batch_size=batch_size)).ask([questions[i] for i in order])
        for place, answer in zip(order, again, strict=True):
            assert answer.tokens == together[place].tokens
            for found, wanted in zip(answer.logprobs, together[place].logprobs, strict=True):
                assert found == pytest.approx(wanted, abs=1e-5)


def test_words_that_are_the_models_mark_of_an_image_fail_alone(tiny_vlm: Path) -> None:
    """Its processor would look for an image there, and the whole batch would be lost."""
    chat = chat_of(tiny_vlm)
    token = chat.processor.image_token
    (image,) = images(1)
    bad, good = Question(parts=(image, f"a {token} b")), Question(parts=(image, "a b"), top_logprobs=2)
    answers = chat.ask([bad, good, replace(good, system=token)])
    assert [answer.error for answer in answers] == ["image_token", None, "image_token"]
    assert answers[1].logprobs == chat.ask([good])[0].logprobs


def test_sampled_answers_follow_the_softmax_at_the_temperature() -> None:
    """Frequencies of 4000 draws from counters, within 4 standard errors; the scores themselves do not vary."""
    draws, scores = 4000, torch.tensor([2.0, 0.0, 1.0, -30.0])
    noise = GumbelNoise([Question(parts=(), temperature=2.0, seed=i) for i in range(draws)], 0, prompt_length=3)
    chosen = noise(torch.zeros(draws, 3, dtype=torch.int64), scores.expand(draws, 4)).argmax(1)
    frequency = torch.bincount(chosen, minlength=4) / draws
    expected = np.exp(np.array([1.0, 0.0, 0.5, -15.0]))
    expected /= expected.sum()
    assert np.all(np.abs(frequency.numpy() - expected) <= 4 * np.sqrt(expected * (1 - expected) / draws) + 1e-12)
    later = noise(torch.zeros(draws, 4, dtype=torch.int64), scores.expand(draws, 4)).argmax(1)
    assert bool((later != chosen).any())


def test_sampled_answers_go_by_their_seed(tiny_vlm: Path) -> None:
    chat = chat_of(tiny_vlm)
    image = images(1)[0]

    def ask(*seeds: int) -> list[str]:
        parts = (image, "Well?")
        return [
            answer.text
            for answer in chat.ask([Question(parts=parts, max_tokens=5, temperature=1.0, seed=s) for s in seeds])
        ]

    state = torch.random.get_rng_state()
    texts = ask(0, 1, 2, 3)
    assert len(set(texts)) == 4
    assert ask(3, 1) == [texts[3], texts[1]]
    assert torch.equal(state, torch.random.get_rng_state())


def test_answers_end_at_an_end_token(tiny_vlm: Path) -> None:
    chat = chat_of(tiny_vlm)
    question = Question(parts=("Well?",), max_tokens=5)
    (cut,) = chat.ask([question])
    assert (cut.error, bool(cut.text)) == ("truncated", True)
    ended = biased(chat, **{"<|im_end|>": 200.0}).ask([question, replace(question, top_logprobs=5)])
    assert [(answer.text, answer.error) for answer in ended] == [("", None)] * 2
    assert [len(answer.logprobs) for answer in ended] == [0, 1]
    assert ended[0].tokens == cut.tokens - 4
    assert chat.ask([replace(question, max_tokens=1)])[0].error is None
    assert biased(chat, Yes=math.nan).ask([replace(question, top_logprobs=5)])[0].error == "not_finite"


def test_yes_no_reward_of_a_local_judge(tiny_vlm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.rand(3, 3, 40, 48, generator=torch.Generator().manual_seed(0))
    inputs = RewardInputs(
        prompts=["a dog", "two cats on a mat", "red"], images=images, metadata=[{}, {}, {}],
        group_ids=torch.zeros(3, dtype=torch.int64), sample_ids=torch.arange(3),
    )  # fmt: skip
    chats: dict[str, Chat] = {"free": biased(chat_of(tiny_vlm), Yes=8.0, No=8.0)}
    chats["yes"] = biased(chat_of(tiny_vlm), Yes=300.0, No=100.0)
    values = {}
    for name, chat in chats.items():
        monkeypatch.setattr(LocalChat, "build", lambda *_, chat=chat: chat)
        reward = build_reward("yes_no", options={"judge": {"model": str(tiny_vlm)}})
        assert reward.kind == "pointwise"
        values[name] = reward(inputs).values
        for i in range(3):
            torch.testing.assert_close(reward(inputs[[i]]).values, values[name][i : i + 1], rtol=0, atol=1e-5)
    torch.testing.assert_close(values["yes"], torch.ones(3))
    assert len({round(value, 4) for value in values["free"].tolist()}) == 3


def test_version_tells_weights_and_dtypes_apart(tiny_vlm: Path) -> None:
    chat = chat_of(tiny_vlm)
    half = chat_of(tiny_vlm, dtype="bfloat16")
    assert next(half.network.parameters()).dtype == torch.bfloat16
    assert half.ask([Question(parts=(images(1)[0], "Well?"), top_logprobs=5)])[0].error is None
    other = replace(chat, network=copy.deepcopy(chat.network))
    other.network.lm_head.weight.data[0, 0] += 1
    assert len({chat.version, half.version, other.version}) == 3


def test_local_judge_errors(tiny_vlm: Path, tmp_path: Path) -> None:
    for options, message in (
        ({"model": "./no-such-folder"}, "there is no folder"),
        ({"model": str(tiny_vlm), "batch_size": 0}, "batch_size must be at least 1"),
        ({"model": str(tiny_vlm), "dtype": "int8"}, "dtype must be one of float32, bfloat16, float16"),
    ):
        with pytest.raises(ValueError, match=message):
            check_chat(options, owner="reward 'x'")
    with pytest.raises(ValueError, match="could not load the vision-language model"):
        chat_of(tmp_path)
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in tiny_vlm.iterdir():
        if file.name != "chat_template.jinja":
            (bare / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ValueError, match="has no chat template"):
        chat_of(bare)


@pytest.fixture
def served(tmp_path: Path, warm_python: str) -> Iterator[tuple[Path, str]]:
    """The tiny model behind `transformers serve`, on a free port of this machine."""
    folder = write_tiny_vlm(tmp_path / "served", words=WORDS, generation={})
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = str(Path(sys.executable).with_name("transformers"))
    command = [warm_python, server, "serve", str(folder), "--device", "cpu"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)], stdout=log, stderr=log, env=dict(os.environ)
        )
        try:
            with requests.Session() as session:
                session.trust_env = False
                until = time.monotonic() + 240
                while True:
                    assert process.poll() is None, (tmp_path / "log").read_text()
                    assert time.monotonic() < until, (tmp_path / "log").read_text()
                    try:
                        if session.get(f"http://127.0.0.1:{port}/health", timeout=5).ok:
                            break
                    except requests.ConnectionError:
                        time.sleep(0.1)
            yield folder, f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            process.wait(20)


@pytest.mark.slow
def test_a_served_judge_answers_as_the_one_in_this_process(served: tuple[Path, str]) -> None:
    """`transformers serve` gives texts, with images and system turns; unlike vLLM it leaves out log-probabilities."""
    folder, address = served
    remote = build_chat(
        {"server": address, "model": str(folder), "image_format": "png"}, device=CPU, owner="reward 'x'"
    )
    first, second = images(2)
    questions = [
        Question(parts=(first, "Is it?"), max_tokens=6),
        Question(parts=("before", second, first, "after"), system="Judge.", max_tokens=6),
        Question(parts=("No image?",)),
    ]
    here, there = chat_of(folder).ask(questions), remote.ask(questions)
    assert [answer.text for answer in there] == [answer.text for answer in here]
    assert [answer.tokens for answer in there] == [answer.tokens for answer in here]
    assert [answer.error for answer in there] == [answer.error for answer in here]
    assert len({answer.text for answer in there}) == 3
    assert remote.ask([replace(questions[0], top_logprobs=20)])[0].error == "no_logprobs"
    other = build_chat({"server": address, "model": "another", "image_format": "png"}, device=CPU, owner="reward 'x'")
    assert other.ask(questions[:1])[0].error == "status_400"
