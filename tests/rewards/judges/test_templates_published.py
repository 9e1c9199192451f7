"""Published texts of judges: byte for byte those of their repositories, asked as these ask, and their images' size."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scripted_judges import JUDGE, edits, grey, script, text_of, yes
from tiny_clip import inputs_of

from flowrl.benchmarks.unigenbench.items import MEANINGS
from flowrl.evaluation.unigenbench.unigenbench import read_wording
from flowrl.rewards import build_reward, reward_options, to_uint8
from flowrl.rewards.hpsv3 import Hpsv3
from flowrl.rewards.judges.chat import Answer, Question, build_chat, check_chat
from flowrl.rewards.judges.templates import load_template, load_templates, read_template
from flowrl.rewards.video_align import VideoAlign

FOLDER = Path(__file__).parents[3] / "rewards" / "templates" / "published"
DIGESTS = {
    "hpsv3/hpsv3": "e61d58f3c7d3be656ccd024f5c0cd8c001cf9a2122305d52b59e60d94147e0f2",
    "video_align/video_align": "fd7862ecb43bbe39144c6a45a52f886c95a659afb2a231655fd990c2e459976c",
    "flow_grpo/final_score": "186871d19e99398c680b2138a4c4f540d886a20265453a0a57abe37eaeb5e9f6",
    "flow_grpo/aesthetic": "14a112e01d0fd4ce0f7abd7a61a5af4c8411cd6b6f27241f5192817e67fdba04",
    "unified_reward/dimensions": "75d52d3ae771f89b682db3b74cdaca1c7bde373a39162bc1c9dabd63cdc9b851",
    "unified_reward/dimensions_words": "88d1d1c5f0fba9dc6f112022ffbabf86f6ad64df58047a7c7293814f91c39ea9",
    "unified_reward/edit_quality": "ddb40baa511dbf2fd619474e5a0fcd043c6325f976bfc8fd1f8b9fbf4c521113",
    "unified_reward/edit_instruction": "b9c27cd063664e5f363a5039623cf27a0358e7900dcd8b4cfdb48569d843fc7c",
    "unified_reward/pairwise": "0fd2f5c43a06516503fde3e64ffc98fff6f3a8815b5eac8dc5f0d81cee686614",
    "unified_reward/pairwise_flex": "bd0c2d5635a7b6b3f382416789dad5c71563d9b68eeacfe75ece5795dff5ebda",
    "unified_reward/pairwise_think": "342f6a4bd0efdae0ca754259d78404e534aae5f1c5527dd47f6062028305e3ff",
    "flow_factory/rational": "10524a1e9631ac561a4a3db1186f85360a95026cd52dd5552484c618647ef2e4",
    "flow_factory/rational_edit": "eada6fd6084ff2fd2571eaebd3dbbcbe8810edb0ea9a4427e37a4f2f5ddc72f0",
    "edit_r1/edit_score": "95f05ede22a065da5f0ac3fad0975eee02a28838c86a9a6d054ba19ecc8fc9e3",
    "edit_r1/edit_score_plain": "a8d035cb4947a1ff52352c49782e91115e1c5cab62cc060dacaccc91488be909",
    "edit_score/edit_instruction": "80bac216c8f7b47ed23475b960fdb9a126abfe92e9f2496f538f85aefca1a1f2",
    "edit_score/edit_quality": "8249deba103d112dddd4c2e7fe1d5a1c40fe3143dc640a422a19aced0d260c78",
    "unigenbench/unigenbench_en": "dd957f5dccfa9477ff1bc9bfa8a1d85237a980efdfa8383fde0353be72d2c718",
    "unigenbench/unigenbench_zh": "b01ad25f6b8f0dbc6d5ea7f19e5c5bfeb0b53e833fe8c34a328652e700e21e42",
    "t2v_metrics/vqascore_chat": "62f2d2261ae08ded34666ceb69baaf745d6c0b7c24743cf8860633280fdb3e35",
    "edit_reward/dim1": "9b25bbc2775fabc09964c9cf44234d8e5c20e4c6c4dd00a0d7851459e22bfe73",
    "edit_reward/dim2": "c9f328f27cfc7fa7a93fe57b15caf088b35acb8bf5293b4a493270358f539ffb",
    "edit_reward/overall": "dd6d6894a787a23c1f475c89a2a9c7900fc3ed3202254bd21b1c5ced71a23a8b",
    "edit_reward/overall_detail": "8309a74572347739707600d97ab69ae7538d96af1326783e359c1ce94478e1b2",
    "hpsv3/hpsv3_plus": "70d200140c707aebe7e744c2d8b4dfada118a7593db830a3327e1bfd25ff1c33",
    "t2v_metrics/clip_flant5": "0807505f41bb93c263302a30615bd415751437cf06ac393b21d93f836e25d05c",
}
"""SHA-256 of each text as it was taken from its repository at the commit that SOURCE beside it names."""


def test_texts_are_those_of_the_repositories() -> None:
    found = {str(path.relative_to(FOLDER).with_suffix("")): path.read_bytes() for path in FOLDER.glob("*/*.txt")}
    assert DIGESTS.items() <= {name: hashlib.sha256(text).hexdigest() for name, text in found.items()}.items()


@pytest.mark.parametrize("source", sorted(path.name for path in FOLDER.iterdir()))
def test_a_source_names_its_commit_and_brings_its_licence(source: str) -> None:
    said = (FOLDER / source / "SOURCE").read_text()
    assert re.search(r" at [0-9a-f]{40}\b|hpsv3 1\.0\.0", said)
    licence = (FOLDER / source / "LICENSE").read_text()
    kind = next(word for word in ("MIT", "Apache-2.0", "CC BY 4.0") if f"Licence: {word}" in said)
    assert {"MIT": "MIT License", "Apache-2.0": "Apache License", "CC BY 4.0": "CC BY 4.0"}[kind] in licence
    if holder := re.search(r"Copyright \([cC]\) \d{4} [\w ]+", said):
        assert holder[0].split(")", 1)[1].split()[1] in licence


def test_flow_grpo_asks_for_unified_reward_as_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """flow_grpo/rewards.py, unifiedreward_score_sglang: resized to 512 x 512, image, then a text that says <image>."""
    judge = script(monkeypatch, lambda question: Answer(text="Final Score: 4"))
    images = torch.rand(1, 3, 24, 40, generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"judge": JUDGE, "style": "final_score"}
    reward = build_reward("unified_reward", options=options)
    assert reward(inputs_of(images, ["a {prompt} of <image>"])).values.tolist() == pytest.approx([0.8])
    assert reward.version.endswith(":size-512x512")
    image, text = judge.asked[0].parts
    assert np.array_equal(image, np.asarray(Image.fromarray(to_uint8(images)[0]).resize((512, 512))))  # type: ignore[arg-type]
    assert isinstance(text, str)
    assert text.startswith("<image>\nYou are given a text caption and a generated image based on that caption.")
    assert text.endswith("Your task is provided as follows:\nText Caption: [a {prompt} of <image>]")
    for more, side in (({"judge": {**JUDGE, "size": None}}, (24, 40)), ({"template": "own"}, (24, 40)),
                       ({"judge": {**JUDGE, "size": [30, 20]}}, (30, 20))):  # fmt: skip
        build_reward("unified_reward", options=options | more)(inputs_of(images, ["a"]))
        assert [p.shape[:2] for p in judge.asked[-1].parts if isinstance(p, np.ndarray)] == [side]


def test_rational_rewards_stand_between_their_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The five parts of Flow-Factory's message, white space included, and its system turn."""
    judge = script(monkeypatch, lambda question: Answer(text="## Score: 4"))
    build_reward("unified_reward", options={"judge": JUDGE, "style": "rational_edit"})(edits([50]))
    question = judge.asked[0]
    head, _, between, _, after = question.parts
    assert str(head).startswith("User Instruction: ")
    assert str(head).endswith("\nYou are provided with two images:\n1. Source Image ")
    assert between == "\n2. Edited Image "
    assert str(after).startswith(
        "\n\nGive your analysis and judgement following guidelines in the system prompt. \n\nTo do"
    )
    assert question.system is not None
    assert question.system.startswith("You are an expert image editing evaluator.")
    assert question.system.endswith("better image edits (if any).")


def test_edit_scores_ask_in_their_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = script(monkeypatch, lambda question: yes(0.5))
    build_reward("edit_score", options={"judge": JUDGE})(edits([50]))
    assert "\nRequirements: need 0\nYou need to rate the editing result from 0 to 5" in text_of(judge.asked[-1])
    build_reward("edit_score", options={"judge": JUDGE, "requirement": None})(edits([50]))
    assert "\nRequirements: \nYou need" in text_of(judge.asked[-1])
    texts = load_templates({"edit_instruction": 2, "edit_quality": 1}, None, source="edit_score")
    other = load_templates({"edit_instruction": 2, "edit_quality": 1}, None, source="unified_reward")
    for name, words in texts.items():
        assert "From scale 0 to 25: \n" in words.user
        assert words.user.endswith("]\n" if name == "edit_quality" else "{prompt}\n")
        assert words.digest != other[name].digest


def test_heads_on_qwen_read_the_published_text() -> None:
    for text, tokens in ((Hpsv3().text(), 1), (VideoAlign().text(), 3)):
        assert text.startswith("\nYou are tasked with evaluating a generated ")
        assert len(re.findall(r"<\|\w+\|>", text)) == tokens
        assert text.endswith("\nEND\n")
        assert text.count("{prompt}") == 1
    assert Hpsv3(template="own").text() != Hpsv3().text()


@pytest.mark.parametrize("language", ["en", "zh"])
def test_unigenbench_words_and_the_place_of_the_image(language: Any) -> None:
    published, own = read_wording(language, None, None), read_wording(language, "own", "own")
    assert (published.own, own.own) == (False, True)
    assert published.meanings.keys() == own.meanings.keys() == MEANINGS[language].keys()
    assert set(published.meanings.values()).isdisjoint(own.meanings.values())
    fields = dict.fromkeys(("prompt", "testpoints", "definitions", "descriptions"), "x")
    image = np.zeros((1, 1, 3), np.uint8)
    first = published.template.parts([image], fields)
    last = read_wording(language, None, None, image_last=True).template.parts([image], fields)
    assert [type(part) for part in first] == [np.ndarray, str]
    assert (last[0], last[1]) == (first[1], image)
    assert str(first[1]).endswith("</description>\n" + " " * (12 if language == "en" else 8))
    assert "\u300c\nx\n\u300d" in str(first[1])


def test_what_template_may_say(tmp_path: Path) -> None:
    assert load_template("pairwise", "published/unified_reward/pairwise_think.txt").user.startswith("Given a caption")
    assert read_template("yes_no", None) == read_template("yes_no", "own")
    assert "does this figure show" in read_template("yes_no", "published/t2v_metrics/vqascore_chat.txt").lower()
    with pytest.raises(ValueError, match=r"did you mean 'published/hpsv3/hpsv3.txt'"):
        Hpsv3(template="published/hpsv3/hps.txt")
    with pytest.raises(ValueError, match=r"template must be given: .*PaCo-RL.* states no licence.*template: own"):
        reward_options("grid_consistency", {"judge": JUDGE})
    (tmp_path / "mine.txt").write_text("  {prompt}  \n")
    assert load_template("final_score", str(tmp_path / "mine.txt"), source="flow_grpo").user == "{prompt}"
    (tmp_path / "misspelt").mkdir()
    (tmp_path / "misspelt" / "edit_qualty.txt").write_text("Rate it.")
    with pytest.raises(ValueError, match=r"holds none of the files .*: edit_instruction\.txt, edit_quality\.txt"):
        load_templates({"edit_instruction": 2, "edit_quality": 1}, str(tmp_path / "misspelt"), source="edit_score")
    folder = load_templates({"edit_instruction": 2, "edit_quality": 1}, "published/unified_reward", source="edit_score")
    assert folder == load_templates({"edit_instruction": 2, "edit_quality": 1}, None, source="unified_reward")


def test_a_judge_sees_an_image_of_several_questions_resized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = script(monkeypatch, lambda question: yes(0.5))
    chat = build_chat({"model": "here", "size": 8}, device=torch.device("cpu"))
    image, other = to_uint8(grey([10, 20], size=16))
    small = np.zeros((8, 8, 3), np.uint8)
    chat.ask([Question(parts=(image, "a")), Question(parts=("b", image, other)), Question(parts=(small,))])
    shown = [part for question in judge.asked for part in question.parts if isinstance(part, np.ndarray)]
    assert [part.shape for part in shown] == [(8, 8, 3)] * 4
    assert shown[0] is shown[1]
    assert shown[3] is small
    assert chat.version == "scripted-judge:size-8x8"
    for size in (0, [8, 5000]):
        with pytest.raises(ValueError, match="size must be 1 to 4096 pixels"):
            check_chat(JUDGE | {"size": size})
