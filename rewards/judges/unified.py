"""Images rated by a judge that writes down its score: UnifiedReward, aesthetic judges, RationalRewards, edit ratings.

    style           asked for                                      one reward             published use
    final_score     "Final Score: X", X in 1 .. 5                  X / 5                  flow_grpo
    dimensions      alignment, coherence, style, each 1 .. 5       weighted mean, raw     Pref-GRPO, verl-omni, UniRL
    aesthetic       <Score>X</Score>, a whole number 1 .. 5        X / 5                  flow_grpo with Qwen2.5-VL
    rational        a score 1 .. 4 for each aspect, or N/A         (mean - 1) / 3         RationalRewards-8B-T2I
    rational_edit   the same, of an edited image                   (mean - 1) / 3         RationalRewards-8B-Edit
    edit            quality and instruction, two of 0 .. 25 each   weighted mean, raw     Pref-GRPO, UnifiedReward-Edit

UnifiedReward (arXiv 2503.05236): checkpoints CodeGoat24/UnifiedReward-* on the hub, TIGER-Lab/RationalRewards-8B-*.
Each style is asked in its published words: final_score and aesthetic in those of yifan123/flow_grpo, dimensions and
edit in those of CodeGoat24/UnifiedReward, rational in those of X-GenGroup/Flow-Factory; see
`flowrl.rewards.judges.templates`. Checkpoints before UnifiedReward 2.0 rate each word too: for these take `template:
published/unified_reward/dimensions_words.txt`. An answer without a score has failed; most published code scores it 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, Literal

import torch

from flowrl.prompts.loading import Prompt
from flowrl.rewards.base import Reward, RewardInputs, RewardOutput
from flowrl.rewards.base.prompt_needs import no_source
from flowrl.rewards.judges import asking
from flowrl.rewards.judges.answers import parse_score
from flowrl.rewards.judges.chat import Answer, Chat, OneJudge, Question, check_chat, score_schema
from flowrl.rewards.judges.templates import Template, digest_of, load_templates

Style = Literal["final_score", "dimensions", "aesthetic", "rational", "rational_edit", "edit"]
Scale = Literal["raw", "divided", "unit"]
_BOTH = ("edit_instruction", "rational_edit")  # templates that show the source image and the edited one
RATING = r"(\d+(?:\.\d+)?)"


@dataclass(frozen=True, kw_only=True, slots=True)
class RatingStyle:
    """A style: its templates, their `source`, the images' `size`, the range of scores, their usual scale, and how long
    answers are. `pattern` finds a rating in the answer, with NAME where there are several `dimensions`."""

    templates: tuple[str, ...]
    low: float
    high: float
    scale: Scale
    max_tokens: int
    temperature: float = 0.0
    dimensions: tuple[str, ...] = ()
    edits: bool = False
    pattern: str = ""
    source: str
    size: int | None = None


STYLES: dict[str, RatingStyle] = {
    "final_score": RatingStyle(
        templates=("final_score",), source="flow_grpo", size=512, low=1, high=5, scale="divided", max_tokens=4096,
        pattern=rf"final score\W{{0,4}}[:\uff1a]\W{{0,4}}?{RATING}",
    ),
    "dimensions": RatingStyle(
        templates=("dimensions",), source="unified_reward", low=1, high=5, scale="raw", max_tokens=4096,
        dimensions=("alignment", "coherence", "style"),
        # "Alignment Score (1-5): 4" and "Alignment: 4", with the colon of either width and bold marks around.
        pattern=rf"(?m)^\W*NAME\W{{0,4}}(?:score)?\W{{0,4}}(?:\(1\s*-\s*5\))?\W{{0,4}}[:\uff1a]\W{{0,4}}?{RATING}",
    ),
    "aesthetic": RatingStyle(
        templates=("aesthetic",), source="flow_grpo", low=1, high=5, scale="divided", max_tokens=2048,
        pattern=r"<score>\s*(\d+)\s*</score>",
    ),
    "rational": RatingStyle(
        templates=("rational",), source="flow_factory", low=1, high=4, scale="unit", max_tokens=2048, temperature=0.1
    ),
    "rational_edit": RatingStyle(
        templates=("rational_edit",), source="flow_factory", low=1, high=4, scale="unit", max_tokens=2048,
        temperature=0.1, edits=True,
    ),
    "edit": RatingStyle(
        templates=("edit_quality", "edit_instruction"), source="unified_reward", low=0, high=25, scale="raw",
        max_tokens=4096,
        dimensions=("quality", "instruction"), edits=True,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class UnifiedReward(OneJudge):
    """UnifiedReward's written rating of each image, or of each edit of a source image, cut to the scale; sub-scores are
    unscaled. An answer without its score fails ("unparsed"), as does an edit without source image ("missing_field")."""

    judge: Mapping[str, Any]
    """Which one, see `flowrl.rewards.judges.chat`. Unless it has a `size`, or `template` is given, style final_score
    resizes images to 512 x 512, as its published use does."""
    style: Style = "dimensions"
    """What is asked for, see the module."""
    scale: Scale | None = None
    """`raw`; `divided`, by the top of the scale; `unit`, (x - low) / (high - low). Null is the style's own."""
    weights: Mapping[str, float] | None = None
    """Weights of the dimensions, only for `dimensions` (alignment, coherence, style) and `edit` (quality, instruction);
    null weighs all alike. What has weight 0 need not be answered, and in `edit` is not asked. For dimensions whose
    advantages are combined rather than their scores, name the reward once for each."""
    num_frames: int = 1
    """Frames of a video shown in one question, evenly spaced; 1 shows `images`."""
    template: str | None = None
    """A text file instead of the published text, for `edit` a folder with edit_quality.txt and edit_instruction.txt;
    or `own`."""
    max_tokens: int | None = None
    """Length of an answer; null is the style's own."""
    temperature: float | None = None
    """0 is greedy; null is the style's own. A sampled answer is seeded by iteration and sample."""

    def __post_init__(self) -> None:
        if self.weights is not None and not self.ask.dimensions:
            raise ValueError(f"style {self.style!r} has one score, so weights mean nothing: leave them out.")
        self.full_weights()
        if self.num_frames < 1 or (self.num_frames > 1 and self.ask.edits):
            raise ValueError(
                f"num_frames must be at least 1, and 1 for style {self.style!r} if it judges edits, got "
                f"{self.num_frames}."
            )
        asking.check_answer_options(self.max_tokens, self.temperature)
        self.templates()
        check_chat(self.judge)

    @property
    def ask(self) -> RatingStyle:
        """What the style asks for."""
        return STYLES[self.style]

    @property
    def tokens(self) -> int:
        """Length of an answer."""
        return self.max_tokens or self.ask.max_tokens

    @property
    def heat(self) -> float:
        """Temperature of an answer."""
        return self.ask.temperature if self.temperature is None else self.temperature

    def full_weights(self) -> dict[str, float]:
        """The weights of all dimensions."""
        return asking.full_weights(self.weights, self.ask.dimensions)

    def templates(self) -> dict[str, Template]:
        """The style's templates, or those that take their place, by name."""
        images = {name: 2 if name in _BOTH else self.num_frames for name in self.ask.templates}
        return load_templates(images, self.template, source=self.ask.source)

    def lacks(self, prompt: Prompt) -> str | None:
        """A source image, where edits are judged."""
        return no_source(prompt) if self.ask.edits else None

    def build(self, device: torch.device) -> Reward:
        """Makes the reward; loads the judge, if it runs here."""
        ask, weights, templates = self.ask, self.full_weights(), self.templates()
        if self.style == "edit":
            templates = {name: words for name, words in templates.items() if weights[name.removeprefix("edit_")] > 0}
        listed = ",".join(f"{name}-{weight:g}" for name, weight in weights.items())
        return asking.judged_reward(
            "unified_reward",
            partial(self._score, templates=templates),
            judge=self.judge if self.template is not None or ask.size is None else {"size": ask.size, **self.judge},
            device=device,
            needs=({"source_images"} if ask.edits else set()) | ({"videos"} if self.num_frames > 1 else set()),
            version=f"{self.style}:{self.scale or ask.scale}:{listed}:frames-{self.num_frames}:"
            f"max_tokens-{self.tokens}:temperature-{self.heat:g}:template-{digest_of(templates)}",
        )

    def _score(self, inputs: RewardInputs, *, chat: Chat, templates: Mapping[str, Template]) -> RewardOutput:
        style, weights = self.ask, self.full_weights()

        def ask(item: int) -> list[Question]:
            shown = asking.shown_of(inputs, item, self.num_frames if self.num_frames > 1 else None)
            both = [asking.source_of(inputs, item), *shown] if style.edits else shown
            asked = [
                words.question(
                    shown if name == "edit_quality" else both,
                    {"prompt": inputs.prompts[item]},
                    max_tokens=self.tokens,
                    temperature=self.heat,
                    seed=asking.draw_seed(self.style, inputs, item, self.heat),
                )
                for name, words in templates.items()
            ]
            if self.style != "edit":
                return asked
            return [replace(question, schema=score_schema(2, int(style.low), int(style.high))) for question in asked]

        def read(item: int, answers: list[Answer]) -> asking.JudgedItem:
            if (error := asking.first_error(answers)) is not None:
                raise asking.NoScore(error)
            texts = {name: answer.text for name, answer in zip(templates, answers, strict=True)}
            ratings = read_ratings(self.style, texts, weights)
            if ratings is None:
                raise asking.NoScore(asking.UNPARSED)
            whole = asking.weighted_mean(ratings, weights) if style.dimensions else sum(ratings.values())
            scale = self.scale or style.scale
            return asking.JudgedItem(
                value=scale_rating(whole, low=style.low, high=style.high, scale=scale), parts=ratings
            )

        parts = [name for name in style.dimensions if weights[name] > 0]
        return asking.judge_items(inputs, chat, ask, read, parts=parts)


def read_ratings(style: Style, texts: Mapping[str, str], weights: Mapping[str, float]) -> dict[str, float] | None:
    """The ratings in a judge's answers, unscaled, by name; None where one that counts is not there."""
    ask = STYLES[style]
    ratings: dict[str, float | None] = {}
    if style == "edit":
        for name, text in texts.items():
            pair = asking.number_list(text, 2, ask.low, ask.high)
            ratings[name.removeprefix("edit_")] = None if pair is None else fmean(pair)
    elif style in ("rational", "rational_edit"):
        body = re.split(r"(?im)^\W*summary\b", texts[style])[0]
        scores = [float(number) for number in re.findall(rf"(?im)^\W*score\W{{0,4}}[:\uff1a]\W{{0,4}}?{RATING}", body)]
        # The mean of the aspects; those that say N/A do not count.
        ratings = {"mean": fmean([min(max(score, 1.0), 4.0) for score in scores]) if scores else None}
    else:
        names = [name for name in ask.dimensions if weights[name] > 0] or ["score"]
        ratings = {
            name: parse_score(texts[style], pattern=ask.pattern.replace("NAME", name), low=ask.low, high=ask.high)
            for name in names
        }
    found = {name: rating for name, rating in ratings.items() if rating is not None}
    return found if found and len(found) == len(ratings) else None


def scale_rating(rating: float, *, low: float, high: float, scale: Scale) -> float:
    """A rating on low .. high as it is, divided by `high`, or moved to 0 .. 1."""
    if scale == "unit":
        return (rating - low) / (high - low)
    return rating / high if scale == "divided" else rating
