"""What configurations say beside their keys: where each number is from, which code was read, and no bytes by heart.

`make lint` runs this file: it reads texts and imports no torch.
"""

from __future__ import annotations

import re

import pytest
from house import listed

from flowrl.config.base import config_files, find_config

SOURCED = sorted(name for name in config_files() if not name.startswith("tiny_"))
REAL = [name for name in SOURCED if name.startswith("sd35m_")]
TEXTS = {name: find_config(name).read_text(encoding="utf-8") for name in SOURCED}


def comments(text: str) -> str:
    return " ".join(line.partition("#")[2].strip() for line in text.splitlines())


# ---- sources ---------------------------------------------------------------------------------------------------------

NUMBER = re.compile(r"(?<![\w./-])[-+]?\d[\d.]*(?:e[-+]?\d+)?(?![\w./-])")
TAG = re.compile(r"\[([a-z]+)\]")


def unsourced(text: str) -> list[str]:
    """Key lines with a number whose comment, or the comment above, names no source that the head declares.

    A width may stand under its height, which is one number in the sources.
    """
    declared = {match[1] for match in re.finditer(r"^#   \[([a-z]+)\]", text, flags=re.MULTILINE)}
    wrong, above, key_above = [], "", ""
    for line in text.splitlines():
        code, _, comment = line.partition("#")
        sources = comment if not code.strip() else comment + above
        if NUMBER.search(code.partition(":")[2]) and not declared & set(TAG.findall(sources)):
            pair = code.strip().startswith("width:") and key_above.startswith("height:")
            wrong += [] if pair else [line.strip()]
        above = comment if not code.strip() and key_above else ""  # the head speaks for no line
        key_above = code.strip() or key_above
    return wrong


def test_every_number_has_a_source() -> None:
    found = {name: wrong for name in SOURCED if (wrong := unsourced(TEXTS[name]))}
    assert not found, listed(found)


@pytest.mark.parametrize(
    ("line", "good"),
    [
        ("seed: 42  # [paper]", True),
        ("# [paper]\nseed: 42", True),
        ("seed: 42", False),
        ("seed: 42  # table 3", False),
        ("seed: 42  # [rumour]", False),
        ("# [paper]\nout: x\nseed: 42", False),
        ("out: x  # [paper]\nseed: 42", False),
        ("optim: {lr: 1.0e-4}", False),
        ("splits: [0, 3]", False),
        ("model: stable-diffusion-3.5-medium", True),
        ("kernel: dpm2", True),
        ("height: 512  # [paper]\nwidth: 512", True),
    ],
)
def test_the_search_for_sources_finds_what_it_should(line: str, good: bool) -> None:
    assert (unsourced(f"# Head.\n#   [paper]  a paper\nrecipe: grpo\n{line}\n") == []) is good


SOURCE = re.compile(r"^#   \[([a-z]+)\] +(.*(?:\n#    +.*)*)", re.MULTILINE)


def without_commit(text: str) -> list[str]:
    """Sources of the head that are code and do not say which: `owner/name at 1a2b3c4`."""
    stated = {match[1]: match[2] for match in SOURCE.finditer(text)}
    named = re.compile(r"[\w-]+/[\w.-]+ at [0-9a-f]{7}\b")
    code = [tag for tag, words in stated.items() if tag in ("repo", "code", "lora", "ff", "spec") or "github" in words]
    return [tag for tag in code if not named.search(stated[tag])]


def other_commits(name: str) -> list[str]:
    """Code that the head names at another commit than the one that is read, or that `COMMITS` does not know."""
    named = re.findall(r"([\w-]+/[\w.-]+) at ([0-9a-f]{7})\b", TEXTS[name])
    return [f"{code} at {commit}" for code, commit in named if OTHER_COMMITS.get(name, COMMITS.get(code)) != commit]


def test_every_repository_names_the_commit_that_was_read() -> None:
    found = {name: wrong for name in SOURCED if (wrong := without_commit(TEXTS[name]) + other_commits(name))}
    assert not found, listed(found)


def test_the_search_for_commits_finds_what_it_should() -> None:
    head = (
        "#   [repo]  a/b at 1a2b3c4, x.py\n#   [code]  a/b, x.py\n#   [lora]  its script,\n#           a/b at 1a2b3c4\n"
    )
    assert without_commit(head + "#   [paper]  table 3\n") == ["code"]


COMMITS = {
    "CodeGoat24/Pref-GRPO": "3e787f6",
    "Fredreic1849/BranchGRPO": "19fbb9f",
    "Harahan/RTDMD": "bdfabaa",
    "Luo-Yihong/DGPO": "01ceb4b",
    "NVlabs/DiffusionNFT": "24af555",
    "NVlabs/GDPO": "b080e63",
    "Shredded-Pork/Flash-GRPO": "4211013",
    "PKU-YuanGroup/Edit-R1": "4217f25",
    "Shredded-Pork/TempFlow-GRPO": "e66824e",
    "Tencent-Hunyuan/MixGRPO": "e5cdd6a",
    "Tencent-Hunyuan/UniRL": "1a7b501",
    "X-GenGroup/Flow-Factory": "a0b2bc5",
    "X-GenGroup/PaCo-RL": "08caac6",
    "XueZeyue/DanceGRPO": "15cc71d",
    "YunzeTong/TurningPoint-GRPO": "994d26a",
    "bcmi/Granular-GRPO": "04ee954",
    "kvablack/ddpo-pytorch": "1958463",
    "scxue/advantage_weighted_matching": "be51372",
    "showlab/Adv-GRPO": "8287f90",
    "yifan123/flow_grpo": "9745241",
    "zghhui/OmniNFT": "c8293e7",
}
"""One version of each is read."""
OTHER_COMMITS = {"sd35m_rft": "ac4c86e", "qwen_image_21_grpo": "5f6cda1"}
"""Where that version lacks what is read: of flow_grpo it was taken out before, to Flow-Factory it came after."""


def head(name: str) -> str:
    """A configuration's lines before its first key."""
    return TEXTS[name][: re.search(r"^\w", TEXTS[name], flags=re.MULTILINE).start()]  # type: ignore[union-attr]


def test_heads_say_that_it_was_not_run() -> None:
    assert [name for name in SOURCED if "Not run here" not in head(name)] == []


def test_heads_say_what_the_rest_is() -> None:
    of_none = [name for name in REAL if not any(word in head(name) for word in ("arXiv", "flow_grpo", "UniRL"))]
    assert not of_none, of_none
    on_geneval = [name for name in REAL if "\nbase: sd35m_grpo_geneval" in TEXTS[name]]
    bases = ("from sd35m_grpo_geneval", "sd35m_mixgrpo")
    silent = [name for name in on_geneval if not any(base in head(name) for base in bases)]
    assert not silent, silent


# ---- bytes -----------------------------------------------------------------------------------------------------------

NAMED = re.compile(r"cards? of (\d+) GB")
BYTES = re.compile(r"\d[\d.,]* ?(?:[KMGT]i?B|bytes)\b")


def test_no_comment_tells_bytes_by_heart() -> None:
    found = {name: wrong for name in SOURCED if (wrong := BYTES.findall(NAMED.sub("", comments(TEXTS[name]))))}
    assert not found, listed(found)
