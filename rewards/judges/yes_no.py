"""Questions with a short answer: does the judge say yes, or what the prompt's record expects?

{name: yes_no, judge: {...}}                                              does the image match the prompt?
{name: yes_no, judge: {...}, score: mass}                                 VQAScore (arXiv 2404.01291), asked as it asks
                                                      with template: published/t2v_metrics/vqascore_chat.txt
{name: yes_no, judge: {...}, questions_field: vqa_list, aggregation: gm}  Soft-TIFA, of GenEval 2
{name: yes_no, judge: {...}, inverted: true, num_frames: 8}               anomalies in videos, as Cosmos-Reason1
{name: yes_no, judge: {...}, score: word, average: 4, temperature: 0.7}   of judges that reason, or lack logprobs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import torch

from flowrl.config.sections import at_least
from flowrl.prompts.loading import Prompt
from flowrl.rewards.base import Reward, RewardInputs, RewardOutput
from flowrl.rewards.base.prompt_needs import no_reference, no_source
from flowrl.rewards.judges import asking
from flowrl.rewards.judges.answers import answer_forms, answer_mass, parse_word
from flowrl.rewards.judges.answers import yes_no as yes_no_score
from flowrl.rewards.judges.chat import TOP_LOGPROBS, Answer, Chat, OneJudge, Pixels, Question, check_chat
from flowrl.rewards.judges.templates import Template, load_template

WORD_TOKENS = 512
BAD = "bad_field"
"""Why an item failed: its field of questions is not a list of questions with answers."""

Forms = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class YesNo(OneJudge):
    """A judge's answer to a question about the image, in [0, 1]; greedy, one token, unless the word is read."""

    judge: Mapping[str, Any]
    """Which model answers, see `flowrl.rewards.judges.chat`."""
    template: str | None = None
    """A text file with the question, see `flowrl.rewards.judges.templates`; its fields are {prompt}, and {question}
    with `questions_field`. Null is our own: does the image match the prompt, for `inverted` is there an anomaly."""
    score: Literal["odds", "mass", "word"] | None = None
    """`odds` (null without questions): `sigmoid(lp_yes - lp_no)`; `mass` (null with them): the probability of yes, or
    of the expected answer, as it is, so that a judge which would say something else gives little; `word`: 1 if the last
    yes or no in the text is the good one, else 0."""
    inverted: bool = False
    """Whether no is the good answer: `sigmoid(lp_no - lp_yes)`, the probability of no, 1 for no."""
    questions_field: str | None = None
    """Field of the prompt's record with a list of [question, expected answer], or of mappings with the keys question
    and answer. A count is expected as a digit or as a word."""
    aggregation: Literal["am", "gm"] = "am"
    """`am` arithmetic, `gm` geometric mean over the questions of a prompt; both are logged."""
    with_sources: bool = False
    """Whether the judge first sees the images that the prompt's instruction is about."""
    with_references: bool = False
    """Whether it then sees the reference images."""
    num_frames: int | None = None
    """Frames of a video that the judge sees, spread evenly; null for the image, or the first frame."""
    average: int = 1
    """Draws of which the mean is taken, for `word`; those that cannot be read are left out."""
    temperature: float = 0.0
    """Temperature of the draws."""
    max_tokens: int | None = None
    """Length of an answer at most, for `word`; null for 512."""

    def __post_init__(self) -> None:
        check_chat(self.judge)
        if self.questions_field is not None and (self.score not in (None, "mass") or self.inverted):
            raise ValueError(
                f"questions of the prompt's record are scored by the probability of the expected answer, so "
                f"questions_field goes with score: mass and inverted: false, got score: {self.score}, inverted: "
                f"{self.inverted}."
            )
        if self.questions_field is None and self.aggregation != "am":
            raise ValueError(f"aggregation {self.aggregation!r} is about several questions: set questions_field too.")
        if self.score != "word" and (self.average != 1 or self.temperature != 0.0 or self.max_tokens is not None):
            raise ValueError(
                "average, temperature and max_tokens are for score: word; the others read the log-probabilities of the "
                "first token, which are the same in every draw."
            )
        if self.average < 1 or (self.average > 1 and not self.temperature > 0):
            raise ValueError(
                f"average must be 1, or more draws with a temperature above 0, at which they differ, got average "
                f"{self.average} at temperature {self.temperature:g}."
            )
        asking.check_answer_options(self.max_tokens, self.temperature)
        at_least(1, self, "num_frames")
        self.words()

    @property
    def reads(self) -> str:
        """The option `score` with its default filled in."""
        return self.score or ("odds" if self.questions_field is None else "mass")

    @property
    def tokens(self) -> int:
        """Length of an answer at most."""
        return (self.max_tokens or WORD_TOKENS) if self.reads == "word" else 1

    def words(self) -> Template:
        """The user's template, or ours for the case."""
        asks = self.questions_field is not None
        return load_template("one_word" if asks else "anomaly" if self.inverted else "yes_no", self.template)

    def lacks(self, prompt: Prompt) -> str | None:
        """Questions, source and reference images, as far as the options ask for them."""
        if self.with_sources and (lack := no_source(prompt)) is not None:
            return lack
        if self.with_references and (lack := no_reference(prompt)) is not None:
            return lack
        try:
            self._expectations(prompt.metadata)
        except asking.NoScore:
            return (
                f"needs questions in the field {self.questions_field!r} of its record, and has "
                f"{prompt.metadata.get(str(self.questions_field))!r}: write [[question, expected answer], ...]"
            )
        return None

    def build(self, device: torch.device) -> Reward:
        """Makes the reward; loads the judge, if it runs here."""
        words = self.words()
        needs = {
            "metadata": self.questions_field is not None,
            "source_images": self.with_sources,
            "reference_images": self.with_references,
            "videos": self.num_frames is not None,
        }
        seen = "+".join(name for name, needed in needs.items() if needed) or "images"

        def score(inputs: RewardInputs, *, chat: Chat) -> RewardOutput:
            good: dict[int, list[Forms]] = {}  # of the questions of each item, in their order

            def ask(item: int) -> list[Question]:
                expected, images = self._expectations(inputs.metadata[item]), self._images(inputs, item)
                good[item] = [forms for _, forms in expected for _ in range(self.average)]
                return [
                    words.question(
                        images,
                        {"prompt": inputs.prompts[item]} | ({} if text is None else {"question": text}),
                        max_tokens=self.tokens,
                        temperature=self.temperature,
                        top_logprobs=0 if self.reads == "word" else TOP_LOGPROBS,
                        seed=asking.draw_seed("yes_no", inputs, item, self.temperature, draw),
                    )
                    for text, _ in expected
                    for draw in range(self.average)
                ]

            def read(item: int, answers: list[Answer]) -> asking.JudgedItem:
                scores = self._read(good[item], answers)
                means = {"am": fmean(scores), "gm": asking.geometric_mean(scores)}
                return asking.JudgedItem(value=means[self.aggregation], parts=means)

            return asking.judge_items(
                inputs, chat, ask, read, parts=() if self.questions_field is None else ("am", "gm")
            )

        return asking.judged_reward(
            "yes_no",
            score,
            judge=self.judge,
            device=device,
            needs={name for name, needed in needs.items() if needed},
            version=f"{self.reads}:{'no' if self.inverted else 'yes'}:{self.aggregation}:{seen}:"
            f"{self.num_frames or 1}-frames:{self.average}-draws:temperature-{self.temperature:g}:{self.tokens}-tokens:"
            f"{words.digest}",
        )

    def _expectations(self, metadata: Mapping[str, Any]) -> list[tuple[str | None, Forms]]:
        """Questions of an item's record with the forms of their answers."""
        if self.questions_field is None:
            return [(None, ("no",) if self.inverted else ("yes",))]
        listed = metadata.get(self.questions_field)
        if listed is None or listed == []:
            raise asking.NoScore(asking.MISSING)
        found: list[tuple[str | None, Forms]] = []
        for entry in listed if isinstance(listed, list) else [None]:
            pair = [entry.get("question"), entry.get("answer")] if isinstance(entry, Mapping) else entry
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise asking.NoScore(BAD)
            question, answer = pair
            if isinstance(answer, bool):  # what an unquoted yes is to YAML
                answer = "yes" if answer else "no"
            if not isinstance(question, str) or not isinstance(answer, str | int) or not str(answer).strip():
                raise asking.NoScore(BAD)
            found.append((question, answer_forms(answer)))
        return found

    def _images(self, inputs: RewardInputs, item: int) -> list[Pixels]:
        """What the judge sees, in its order: sources, references, then what was made."""
        images: list[Pixels] = []
        for wanted, given in (
            (self.with_sources, inputs.source_images),
            (self.with_references, inputs.reference_images),
        ):
            if wanted and not (given and given[item]):
                raise asking.NoScore(asking.MISSING)
            if wanted and given:
                images += [asking.pixels_of(image) for image in given[item]]
        return [*images, *asking.shown_of(inputs, item, self.num_frames)]

    def _read(self, forms: Sequence[Forms], answers: Sequence[Answer]) -> list[float]:
        """The scores of an item's questions."""
        scores: list[float | None] = []
        for good, answer in zip(forms, answers, strict=True):
            first, score = answer.logprobs[0] if answer.logprobs else {}, None
            if answer.error:
                pass
            elif self.reads == "word":
                word = parse_word(answer.text, ("yes", "no"))
                score = None if word is None else float(word in good)
            elif self.reads == "mass":
                score = answer_mass(first, good) if first else None
            else:
                score = yes_no_score(first, yes="no", no="yes") if self.inverted else yes_no_score(first)
            scores.append(score)
        # Draws repeat one question, so a lost one costs precision; questions differ, so without one it is another mean.
        found = [score for score in scores if score is not None] if self.reads == "word" else []
        return found or asking.all_of(answers, scores)
