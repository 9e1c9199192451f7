"""Prompts that are longer than what a text encoder reads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from toy_pipeline import Toy
from transformers import AutoTokenizer

from flowrl.config.train import resolve_path
from flowrl.pipelines.shared.prompt_embeddings import num_cut
from flowrl.prompts.loading import Prompt
from flowrl.training.parts import tell_cut_prompts
from flowrl.training.prompting import RunPrompts

SHORT, LONG = "a photo of a red circle", "a photo of a red circle " * 6


def test_prompts_beyond_the_limit_are_counted_by_the_encoder_that_reads_most() -> None:
    folder = resolve_path("asset:tiny-sd3")
    clip, t5 = (AutoTokenizer.from_pretrained(folder / name) for name in ("tokenizer", "tokenizer_3"))
    exactly = len(t5(LONG)["input_ids"])
    parts = {"vae": None, "tokenizer": clip, "tokenizer_3": t5}
    assert num_cut(parts, 16, [SHORT, LONG, LONG]) == 2
    assert [num_cut(parts, limit, [LONG]) for limit in (exactly - 1, exactly)] == [1, 0]
    assert num_cut({"tokenizer": clip}, 16, [SHORT, LONG]) == 1
    assert num_cut({"tokenizer": None}, 16, [LONG]) == 0
    assert num_cut({"vae": None, "processor": SimpleNamespace(tokenizer=t5)}, 16, [SHORT, LONG]) == 1


def test_a_run_says_how_many_prompts_are_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline, rows = Toy(), [Prompt(text=text, metadata={}) for text in (SHORT, LONG, LONG)]
    prompts = RunPrompts(train=tuple(rows[:2]), held_out=tuple(rows[2:]))
    tell_cut_prompts(pipeline, prompts)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(Toy, "num_cut", lambda self, texts: sum(text == LONG for text in texts))
    tell_cut_prompts(pipeline, prompts)
    assert "1 of 2 prompts" in capsys.readouterr().out
