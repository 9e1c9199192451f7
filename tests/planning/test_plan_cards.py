"""Shipped configurations against their own plans: each fits the card that it names."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
from counted_operations import measured_once

from flowrl.config.base import config_files, find_config
from flowrl.config.train import load_config
from flowrl.pipelines import family as family_named
from flowrl.planning import family_route
from flowrl.planning.fits import card_gib, fit
from flowrl.planning.gather import Plan, gather
from flowrl.planning.memory import CARDS, GIB, checkpoint_bytes
from flowrl.planning.outlook import outlook_of, process_words
from flowrl.planning.text import memory_lines
from flowrl.planning.throughput import Pace
from flowrl.planning.verdict import card_of, in_the_way, verdict
from flowrl.training.parts import model_family

pytestmark = pytest.mark.slow

DOCS = Path(__file__).resolve().parents[2] / "docs" / "cards.md"
REAL = sorted(name for name in config_files() if not name.startswith("tiny_"))
NAMED = re.compile(r"cards? of (\d+) GB")
USED = (
    "cogvideox", "flux", "flux2", "hunyuan_video", "kontext", "ltx_video", "qwen_image", "qwen_image_edit", "sana",
    "sd", "sd3", "sdxl", "wan", "z_image",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured_once(monkeypatch)
    monkeypatch.setattr(family_route, "decode_flops", lambda *given: None)


@cache
def plan_of(name: str, *overrides: str) -> Plan:
    config = load_config(find_config(name), list(overrides))
    parallel = config.parallel
    processes = parallel.shard * parallel.context * (parallel.replicate or 1)
    own = model_family(config.pipeline)
    return gather(config, name, own, processes=processes, pace=Pace(range=None, told=""))


@cache
def comments(name: str) -> str:
    lines = find_config(name).read_text(encoding="utf-8").splitlines()
    return " ".join(line.partition("#")[2].strip() for line in lines)


# ---- what configurations say -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REAL)
def test_a_configuration_fits_the_card_that_it_names(name: str) -> None:
    named = {int(card) for card in NAMED.findall(comments(name))}
    assert len(named) == 1, "a configuration says once for which card it is: For a card of 80 GB, by flowrl plan."
    (card,) = named
    assert card_of(name) in (None, card)
    # A budget of one iteration counts the same memory.
    memory = plan_of(name, "num_iterations=1", "optim.warmup=0").memory
    assert memory is not None
    assert memory.peak <= CARDS[card] * GIB
    if card_of(name) is None:  # the smallest that holds it, so that nobody is sent to a larger one
        smaller = [size for size in CARDS if size < card and size != 48]
        assert all(memory.peak > card_gib(size) * GIB for size in smaller)


def test_every_family_that_users_run_fits_a_small_card() -> None:
    """By a preset, or by what `--card 24` sets."""
    fitting: dict[str, set[int]] = {}
    for name in REAL:
        found = load_config(find_config(name)).pipeline
        fitting.setdefault(model_family(found).name, set()).update(map(int, NAMED.findall(comments(name))))
    assert {name for name in USED if family_named(name).name in fitting} == set(USED)
    for name in REAL:
        own = model_family(load_config(find_config(name)).pipeline).name
        if own in USED and 24 not in fitting[own]:
            plan = plan_of(name, "num_iterations=1", "optim.warmup=0")
            assert plan.facts is not None
            if fit(plan.facts, plan.settings, plan.choices, 24).overrides is not None:
                fitting[own].add(24)
    assert {name: min(fitting[name]) for name in USED} == dict.fromkeys(USED, 24)


def test_the_table_of_presets_is_that_of_the_plans() -> None:
    text = DOCS.read_text(encoding="utf-8")
    told = re.findall(r"`(\w+)(?: --card (\d+))?` \| ([\d.]+)", text)
    assert {name for name, card, _ in told if not card} == {name for name in REAL if card_of(name) is not None}
    for name, card, gib in told:
        plan = plan_of(name, "num_iterations=1", "optim.warmup=0")
        assert plan.memory is not None
        assert plan.facts is not None
        memory = fit(plan.facts, plan.settings, plan.choices, int(card)).memory if card else plan.memory
        assert f"{memory.peak / GIB:.3g}" == gib, (name, card)


# ---- verdicts --------------------------------------------------------------------------------------------------------


def words(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())


def test_the_verdict_of_a_preset_is_about_the_card_in_its_name() -> None:
    name = "qwen_image_grpo_pickscore_24gb"
    assert words(verdict(plan_of(name, "num_iterations=1"), card_of(name))).startswith("fits 24 GB as it is: at most ")


def test_the_verdict_says_what_to_set_and_what_each_setting_gains() -> None:
    plan = plan_of("flux_grpo_pickscore", "num_iterations=1")
    assert plan.facts is not None
    assert plan.memory is not None
    found = fit(plan.facts, plan.settings, plan.choices, 24)
    assert found.overrides is not None
    lines = verdict(plan, 24)
    assert words(lines).startswith(f"fits 24 GB with {' '.join(found.overrides)}: at most ")
    for overrides, gain in found.gains:
        assert any(overrides in line and f"{gain / GIB:.3g} GiB" in line for line in lines)
    assert words(verdict(plan, None)).startswith("fits 80 GB as it is")  # the smallest that does


def test_the_verdict_says_why_nothing_will_do() -> None:
    plan = plan_of("flux_dance_grpo_full", "num_iterations=1", "optim.warmup=0")
    text = words(verdict(plan, 24))
    assert text.startswith("does not fit 24 GB with any setting, because it takes at least ")
    assert "too much; most of it is sampling, decoding, scoring 1 image (" in text
    assert plan.facts is not None
    found = fit(plan.facts, plan.settings, plan.choices, 24)
    early = replace(found.memory, start=2 * found.memory.peak)
    assert "most of it is what embeds the prompts at the start (" in in_the_way(replace(found, memory=early))
    unknown = words(verdict(replace(plan, memory=None, facts=None, unknown="nothing is known"), 24))
    assert unknown == "whether it fits a card is not known: nothing is known"


@pytest.mark.parametrize("name", ["qwen_image_grpo_pickscore_40gb", "wan_14b_t2v_grpo_ocr_40gb"])
def test_a_preset_in_8_bits_fits_a_smaller_card_in_4(name: str) -> None:
    plan = plan_of(name, "num_iterations=1")
    assert plan.facts is not None
    found = fit(plan.facts, plan.settings, plan.choices, 24)
    assert found.overrides is not None
    assert "pipeline.quantize=nf4" in found.overrides


def test_settings_for_flux_on_smaller_cards() -> None:
    plan = plan_of("flux_grpo_pickscore", "num_iterations=1")
    assert plan.facts is not None
    lines = memory_lines(plan)
    told = "\n".join(lines[lines.index("To fit a card") :])
    assert told in DOCS.read_text(encoding="utf-8")
    for card, part in ((24, "pipeline.quantize=nf4"), (40, "pipeline.gradient_checkpointing=true")):
        found = fit(plan.facts, plan.settings, plan.choices, card)
        assert found.overrides is not None
        assert part in found.overrides
        assert "pipeline.free_text_encoders=true" in found.overrides
        assert f"{card} GB {' '.join(found.overrides)}: at most" in words(lines)
        again = plan_of("flux_grpo_pickscore", "num_iterations=1", *found.overrides).memory
        assert again is not None
        assert again.peak == found.memory.peak
        assert any(text.startswith("pipeline.quantize") for text in found.overrides) == (card == 24)
    assert "80 GB fits as it is" in words(lines)


FULL = {
    "flux_dance_grpo_full": 11.9,
    "flux_branch_grpo_full": 11.9,
    "flux_g2rpo_full": 11.9,
    "hunyuan_video_dance_grpo_full": 12.8,
    "qwen_image_dance_grpo_full": 20.4,
    "wan22_t2v_grpo_full": 2 * 14.3,
}
"""Published runs of all weights -> billions of them."""


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("name", FULL)
def test_runs_of_all_weights_fit_eight_and_sixteen_cards(name: str, copies: int) -> None:
    fewer = ("updates_per_rollout=1",) if (name, copies) == ("flux_branch_grpo_full", 2) else ()
    plan = plan_of(name, "num_iterations=1", "optim.warmup=0", f"parallel.replicate={copies}", *fewer)
    assert plan.network is not None
    assert plan.memory is not None
    assert (plan.settings.shard, plan.processes) == (8, 8 * copies)
    assert plan.network.trained == plan.network.parameters == pytest.approx(FULL[name] * 1e9, rel=0.01)
    assert plan.memory.held["denoiser, float32, 1/8"] == 4 * plan.network.parameters // 8
    assert plan.memory.peak < card_gib(80) * GIB
    told = words(process_words(plan, outlook_of(plan, 80)))
    where = (
        "2 copies of the model, each in 8 parts on one machine" if copies == 2 else "1 copy of the model, in 8 parts"
    )
    assert f"{8 * copies} processes hold {where}; a machine of 8 needs at most " in told
    assert plan.memory.machine(plan.settings) < 1024 * GIB


# ---- ten plans by hand -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hand:
    """A transformer by its published dimensions, and what of it can be written down without running it.

    Attributes:
        billions: its published parameters.
        width: of a token, d.
        blocks: L.
        image: tokens of an image or clip.
        text: of a prompt.
        wide: of the feed-forward layer where it is not four times the width.
        crossed: whether text is read by cross-attention, else it runs through the blocks with the image.
        twice: blocks in which the image attends to itself once more.
    """

    billions: float
    width: int
    blocks: int
    image: int
    text: int
    wide: int = 0
    crossed: bool = False
    twice: int = 0

    @property
    def flops(self) -> float:
        """24 d² L n + 4 n² d L, of tokens that read text by cross-attention 8 d² L n + 4 d² L m + 4 n m d L more."""
        d, n, m, layers = self.width, self.image, self.text, self.blocks
        again = self.twice * (8 * d * d * n + 4 * n * n * d)
        if not self.crossed:
            return 24 * d * d * layers * (n + m) + 4 * (n + m) ** 2 * d * layers + again
        own = 8 * d * d * n + 4 * n * n * d + 4 * d * (self.wide or 4 * d) * n
        return layers * (own + 4 * d * d * n + 4 * d * d * m + 4 * n * m * d)


TEN = {
    "sd35m_grpo_geneval": Hand(2.24, 1536, 24, 32 * 32, 77 + 128, twice=13),
    "sd35m_grpo_clip_24gb": Hand(2.24, 1536, 24, 32 * 32, 77 + 128, twice=13),
    "flux_grpo_pickscore": Hand(11.9, 3072, 19 + 38, 32 * 32, 128),
    "kontext_grpo_edit": Hand(11.9, 3072, 19 + 38, 2 * 32 * 32, 128),
    "qwen_image_grpo_pickscore": Hand(20.4, 3072, 60, 32 * 32, 512),
    "wan_t2v_grpo_ocr": Hand(1.42, 1536, 30, 9 * 15 * 26, 512, wide=8960, crossed=True),
    "wan_14b_t2v_grpo_ocr_80gb": Hand(14.3, 5120, 40, 9 * 15 * 26, 512, wide=13824, crossed=True),
    "hunyuan_video_dance_grpo": Hand(12.8, 3072, 20 + 40, 14 * 30 * 30, 256),
    "cogvideox_grpo": Hand(1.69, 1920, 30, 5 * 30 * 45, 226),
    "ltx_video_grpo": Hand(1.92, 2048, 28, 6 * 8 * 12, 128, crossed=True),
}


@pytest.mark.parametrize("name", TEN)
def test_ten_plans_against_hand_counts_and_published_sizes(name: str) -> None:
    plan, hand = plan_of(name, "num_iterations=1"), TEN[name]
    network, facts = plan.network, plan.facts
    assert network is not None
    assert facts is not None
    assert network.parameters / 1e9 == pytest.approx(hand.billions, rel=0.01)
    adapted = 2 * network.trained * (hand.image + hand.text)  # products with the LoRA, of which some see fewer tokens
    assert hand.flops < network.forward < 1.06 * hand.flops + adapted
    if not hand.crossed:
        assert network.attended == hand.image + hand.text
    assert plan.memory is not None
    own = next(size for label, size in plan.memory.held.items() if label.startswith("LoRA"))
    assert own == network.trained * (4 + 4 + 8 + 8 + 4 * plan.slots)  # weight, gradient, its sum, both moments, copies
    denoiser = next(size for label, size in plan.memory.held.items() if label.startswith("denoiser"))
    assert denoiser / 2e9 == pytest.approx(hand.billions, rel=0.01)
    assert checkpoint_bytes(network.trained, plan.slots) == network.trained * (4 + 8 + 4 * plan.slots)


@pytest.mark.parametrize(("name", "layers"), [
    ("cogvideox_grpo", 30 * 4), ("wan_t2v_grpo_ocr", 30 * 8), ("wan_14b_t2v_grpo_ocr_80gb", 40 * 8),
])  # fmt: skip
def test_a_lora_is_rank_times_inputs_and_outputs_of_its_layers(name: str, layers: int) -> None:
    plan = plan_of(name, "num_iterations=1")
    assert plan.network is not None
    assert plan.network.trained == layers * (plan.config.policy.lora_rank or 32) * 2 * TEN[name].width
