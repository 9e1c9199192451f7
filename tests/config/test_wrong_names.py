"""What a wrong key is answered with: the key meant by a slip, by a habit, or by a term of another toolkit."""

from __future__ import annotations

import copy
import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from config_files import MINIMAL, minimal_file, refusal

from flowrl.config.foreign import foreign_words
from flowrl.config.spelling import closest, edit_distance
from flowrl.config.strict_yaml import dotted_keys, parse_yaml
from flowrl.config.train import ConfigError, TrainConfig, load_config

WORDS = foreign_words()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return minimal_file(tmp_path)


@cache
def own_keys() -> list[str]:
    return sorted(set(dotted_keys(TrainConfig)))


def typos(word: str) -> set[str]:
    """Every deletion and swap of neighbours, and one substitution and one insertion at each place."""
    slips = {word[:i] + word[i + 1 :] for i in range(len(word))}
    slips |= {word[:i] + word[i + 1] + word[i] + word[i + 2 :] for i in range(len(word) - 1)}
    slips |= {word[:i] + "z" + word[i + 1 :] for i in range(len(word))}
    slips |= {word[:i] + "s" + word[i:] for i in range(len(word) + 1)}
    return slips - {word, ""}


@pytest.mark.slow
def test_every_single_typo_of_every_key_is_refused_with_the_right_name(monkeypatch: pytest.MonkeyPatch) -> None:
    data = parse_yaml(MINIMAL, "x")
    path = Path("run.yaml")
    monkeypatch.setattr("flowrl.config.train.read_with_base", lambda _: copy.deepcopy(data))  # parsing is the slow part
    monkeypatch.setattr("flowrl.runtime.failures.MAX_TOLD", 1000)
    tried = 0
    for dotted in own_keys():
        prefix, _, name = dotted.rpartition(".")
        node = data
        for part in prefix.split(".") if prefix else []:
            empty: Any = {"rewards": [{"name": "geneval"}], "teachers": [{}]}.get(part, {})
            node = node[int(part)] if part.isdecimal() else node.setdefault(part, empty)
        siblings = {key.rpartition(".")[2] for key in own_keys() if key.rpartition(".")[0] == prefix}
        slips = sorted(typos(name) - siblings)
        node |= dict.fromkeys(slips, 1)
        with pytest.raises(ConfigError) as caught:  # which tells of all of them
            load_config(path)
        head, *lines = str(caught.value).splitlines()
        assert head == f"{path}: {len(slips)} keys are wrong"
        for slip, line in zip(slips, lines, strict=True):
            nearest = {s for s in siblings if abs(len(slip) - len(s)) <= 1 and edit_distance(slip, s) == 1}
            assert f"unknown key '{prefix + '.' if prefix else ''}{slip}'" in line
            suggested = line.rpartition("did you mean '")[2].rstrip("'?").rpartition(".")[2]
            assert suggested in nearest, (slip, line)
            assert suggested == name or len(nearest) > 1, (slip, line)
            tried += 1
        data = parse_yaml(MINIMAL, "x")
    assert tried > 1500


@pytest.mark.parametrize("term", sorted(WORDS.keys))
def test_terms_of_other_toolkits_are_answered_with_our_key(path: Path, term: str) -> None:
    ours = WORDS.keys[term]
    assert ours.split(" ")[0] in own_keys()
    assert term not in {field.name for field in dataclasses.fields(TrainConfig)}
    message = refusal(path, f"{term}=1")
    assert ours in message or "did you mean" in message  # a term one slip away from a key of ours reads as a slip
    assert f"override '{term}=1'" in message


@pytest.mark.parametrize(
    ("override", "ours"),
    [
        ("num_generations=8", "group_size"),
        ("sample.num_image_per_prompt=8", "group_size"),
        ("sampler.eta=1", "sampler.noise_level"),
        ("beta=0.04", "kl_coef"),
        ("train.beta=0.04", "kl_coef"),
        ("sampler.sde_type=cps", "sampler.kernel"),
        ("sampler.num_inference_steps=4", "sampler.num_steps"),
        ("learning_rate=1e-4", "optim.lr"),
        ("resume_from=runs/a", "resume"),
        ("lora_rank=4", "policy.lora_rank"),
        ("global_std=true", "adv_std"),
        ("noise_level=0.7", "sampler.noise_level"),
        ("shift=3", "sampler.shift"),
        ("timestep_fraction=0.6", "sampler.trained_fraction with trained_steps: leading"),
        ("batch_size=4", "eval.batch_size' or 'micro_batch_size"),
        ("lr=1", "optim.lr"),
    ],
)
def test_habits_find_our_name(path: Path, override: str, ours: str) -> None:
    assert f"is called '{ours}" in refusal(path, override)


@pytest.mark.parametrize("term", sorted(WORDS.absent))
def test_what_there_is_not_here_is_said(path: Path, term: str) -> None:
    message = refusal(path, f"{term}=1")
    assert message.endswith(f"unknown key '{term}': {WORDS.absent[term]}")
    assert "is called" not in message
    assert term not in WORDS.keys


def test_our_own_keys_are_named_before_terms_of_other_toolkits(path: Path) -> None:
    for term in WORDS.keys:
        own = [key for key in own_keys() if key.rpartition(".")[2] == term]
        assert not own or any(f"'{term}' is called '{key}'" in refusal(path, f"{term}=1") for key in own)


def test_unlike_anything_lists_the_keys_of_the_section(path: Path) -> None:
    assert "the keys here are optim.name, optim.lr" in refusal(path, "optim.qqqqqq=1")


def test_foreign_values_are_answered_with_ours(path: Path) -> None:
    for key, values in WORDS.values.items():
        for theirs, ours in values.items():
            message = refusal(path, f"{key}={theirs}")
            assert f"did you mean '{ours}'" in message
            assert repr(parse_yaml(theirs, "x")) in message


def test_edit_distance_and_closest() -> None:
    assert edit_distance("kernel", "kernal") == 1
    assert edit_distance("ab", "ba") == 1
    assert edit_distance("", "abc") == 3
    assert edit_distance("kitten", "sitting") == 3
    assert closest("l", ["lr", "eps"]) == "lr"
    assert closest("zzzz", ["lr", "eps"]) is None
