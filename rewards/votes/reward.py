"""What people say of a run's images on its own page, as a reward; see docs/rewards.md.

{name: votes, options: {ask: pairwise, voters: 2, timeout: 3600}}
"""

from __future__ import annotations

import math
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from flowrl.config.sections import at_least
from flowrl.media.images import save_png
from flowrl.media.videos import save_mp4
from flowrl.rewards.base import Model, RewardInputs, RewardOutput, output_of, to_uint8
from flowrl.rewards.comparing.tournaments import all_pairs, ring_pairs, win_rate
from flowrl.rewards.comparing.verdicts import group_places
from flowrl.rewards.serving.own_page import elsewhere, page_server
from flowrl.rewards.votes.ballot import Ballot, Question
from flowrl.rewards.votes.vote_page import make_app
from flowrl.runtime.randomness import counter_choice, counter_seed
from flowrl.runtime.scrubbing import say as print

ANSWERS = {"pairwise": ("first", "second", "tie", "skip"), "binary": ("good", "bad", "skip")}
QUESTIONS = {"pairwise": "Which of the two is better?", "binary": "Is this good?"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Votes:
    """What people say on a page of the run: `win_rate` of the comparisons, a tie being half, or 1 for good and 0 for
    bad; the mean over voters, in [0, 1].

    Images are shown as soon as they are drawn. What nobody voted on is invalid ("no_vote", "skipped") and stops no run.
    Answers are kept in `votes.jsonl` of the run folder. The part `answers` is how many answers with a value an image
    has.
    """

    judges: ClassVar[tuple[str, ...]] = ("groups",)
    addresses: ClassVar[tuple[str, ...]] = ("port", "timeout")
    models: ClassVar[tuple[Model, ...]] = ()
    ask: Literal["pairwise", "binary"] = "pairwise"
    """`pairwise`: which of two images of a prompt is better, or a tie; `binary`: whether one is good or bad."""
    question: str | None = None
    """What people are asked; null asks which is better, or whether it is good."""
    opponents: int | None = None
    """Compares each image with so many others only, drawn at random; even. Null: with all, N(N-1)/2 questions."""
    voters: int = 1
    """Answers that a question waits for, skips among them."""
    timeout: float | None = 1800.0
    """Seconds that training waits for votes once an iteration's images are drawn; null waits without an end."""
    port: int = 0
    """Of the page on 127.0.0.1; 0 takes a free one."""

    def __post_init__(self) -> None:
        at_least(1, self, "voters")
        if self.timeout is not None and not 0 < self.timeout < math.inf:
            raise ValueError(f"timeout must be a number of seconds above 0, or null, got {self.timeout}.")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port must lie in 0 .. 65535, got {self.port}.")
        if self.opponents is not None and (self.ask == "binary" or self.opponents < 2 or self.opponents % 2):
            raise ValueError(
                f"opponents must be an even number of at least 2, with ask: pairwise, or null, got {self.opponents}."
            )
        if self.question is not None and not 0 < len(self.question.strip()) <= 300:
            raise ValueError("question must be a text of 1 to 300 letters, or null.")

    def build(self, device: torch.device) -> VotesReward:
        """Makes the reward; a run opens its page."""
        return VotesReward(self)


class VotesReward:
    """A `Reward` that asks at once and is answered later."""

    name, differentiable, waits = "votes", False, True
    needs = frozenset({"prompts", "images", "group_ids", "sample_ids", "sounds"})

    def __init__(self, options: Votes) -> None:
        self.options, self.address = options, ""
        self.kind = "pairwise" if options.ask == "pairwise" else "groupwise"
        self.words = options.question or QUESTIONS[options.ask]
        self.ballot = Ballot(voters=options.voters, timeout=options.timeout, allowed=ANSWERS[options.ask])
        self._shown: dict[int, Callable[[Path], Path]] = {}  # writes an image or a clip, by its number on the page
        self._next = 0
        self._lock = threading.Lock()
        self._folder = Path()

    @property
    def version(self) -> str:
        """What was asked of how many."""
        asked = self.options
        return f"votes:{asked.ask}:voters-{asked.voters}:opponents-{asked.opponents or 'all'}:{self.words}"

    def open(self, path: Path, iterations: int, closing: ExitStack) -> None:
        """Opens the page of a run, and says where it is.

        Args:
            path: keeps the answers.
            iterations: of the run.
            closing: closes the page.

        Raises:
            ValueError: the port is taken, a package is not installed, or the file holds something else.
        """
        self.ballot.open(path)
        self._folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="votes-")))
        facts = {"ask": self.options.ask, "words": self.words, "iterations": iterations}
        app = partial(make_app, self.ballot, self.file, ANSWERS[self.options.ask], facts)
        server, self.address, bound = page_server(app, self.options.port, "the run", posts=True)
        closing.enter_context(bound)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True, name="votes")
        thread.start()
        closing.callback(thread.join, 5)
        closing.callback(setattr, server, "should_exit", True)
        print(f"People vote on this page, which only this machine can open:\n{self.address}")
        print(elsewhere(self.address), flush=True)

    def file(self, number: int) -> Path | None:
        """The file of an image or a clip, written when the page asks first; None where it is shown no more."""
        with self._lock:
            found = next(self._folder.glob(f"{number}.*"), None)
            return found or (self._shown[number](self._folder / str(number)) if number in self._shown else None)

    def __call__(self, inputs: RewardInputs) -> RewardOutput:
        return self.ask(inputs)()

    def ask(self, inputs: RewardInputs) -> Callable[[], RewardOutput]:
        """Puts questions about samples; what is returned waits for the answers."""
        if not self.address:
            raise ValueError("reward 'votes' asks people while a run trains, and nowhere else: take another reward.")
        shown, pixels = self._show(inputs), inputs.images if inputs.videos is None else inputs.videos.mean(1)
        small = to_uint8(adaptive_avg_pool2d(pixels.detach().float(), 8)).reshape(len(inputs), -1)
        looks, ids = [one.tobytes().hex() for one in small], inputs.sample_ids.tolist()
        sources = [
            [self._add(_still(image)) for image in inputs.source_images[place]] if inputs.source_images else []
            for place in range(len(inputs))
        ]
        groups = group_places(inputs)
        asked: list[tuple[Question, list[int]]] = []
        for group, places in groups.items():
            for own in self._of_group(inputs.iteration, group, places):
                about = {"iteration": inputs.iteration, "group": group, "prompt": inputs.prompts[own[0]]}
                about |= {"samples": [ids[place] for place in own], "looks": [looks[place] for place in own]}
                beside = {"sources": sources[own[0]], "candidates": [shown[place] for place in places.tolist()]}
                asked.append((Question(about=about, shown=[shown[place] for place in own], beside=beside), own))
        self.ballot.put([question for question, _ in asked])

        def result() -> RewardOutput:
            self.ballot.wait([question for question, _ in asked], partial(self._tell, inputs.iteration))
            with self._lock:
                for number in [*shown, *(number for own in sources for number in own)]:
                    del self._shown[number]
                    for path in self._folder.glob(f"{number}.*"):
                        path.unlink(missing_ok=True)
            return self._output(inputs, list(groups.values()), asked)

        return result

    def _of_group(self, iteration: int, group: int, places: np.ndarray) -> list[list[int]]:
        """The samples of each question about a group, the left one first; chance draws the sides."""
        if self.options.ask == "binary":
            return [[place] for place in places.tolist()]
        count, most = len(places), self.options.opponents
        if most is None or most >= count - 1:
            pairs = all_pairs(count)
        else:
            pairs = ring_pairs(counter_choice(count, count, "opponents", iteration, group), most)
        turns = [counter_seed("sides", iteration, group, *pair) % 2 for pair in pairs.tolist()]
        return [places[pair[::-1] if turn else pair].tolist() for pair, turn in zip(pairs, turns, strict=True)]

    def _output(
        self, inputs: RewardInputs, groups: Sequence[np.ndarray], asked: Sequence[tuple[Question, list[int]]]
    ) -> RewardOutput:
        values, answers = np.full(len(inputs), np.nan), np.zeros(len(inputs))
        wins_BB, errors = np.full((len(inputs), len(inputs)), np.nan), ["group_of_one"] * len(inputs)
        for question, own in asked:
            for place in own:
                said = list(question.answers.values())
                answers[place] += sum(one not in (None, "skip") for one in said)
                errors[place] = "skipped" if "skip" in said and errors[place] != "no_vote" else "no_vote"
            if len(own) == 2:
                wins_BB[own[0], own[1]] = question.value
            else:
                values[own[0]] = question.value
        if self.options.ask == "pairwise":
            for places in groups:
                values[places] = win_rate(wins_BB[np.ix_(places, places)])
        return output_of(values.tolist(), inputs, {"answers": answers.tolist()}, errors)

    def _tell(self, iteration: int, left: int, deadline: float) -> None:
        seconds = deadline - time.monotonic()
        until = "" if math.isinf(seconds) else time.strftime(", until %H:%M:%S", time.localtime(time.time() + seconds))
        print(f"Iteration {iteration} waits for votes on {left} questions{until}: {self.address}", flush=True)

    def _add(self, write: Callable[[Path], Path]) -> int:
        with self._lock:
            self._shown[self._next] = write
            self._next += 1
            return self._next - 1

    def _show(self, inputs: RewardInputs) -> list[int]:
        """Numbers of the samples on the page, images or clips with their sound."""
        if inputs.videos is None:
            return [self._add(_still(image)) for image in inputs.images]
        fps, rate, sounds = inputs.fps or 8.0, inputs.sound_rate, inputs.sounds
        heard = [None if sounds is None or rate is None else (sounds[k].cpu(), rate) for k in range(len(inputs))]
        frames = [torch.from_numpy(to_uint8(video)).permute(0, 3, 1, 2) for video in inputs.videos]

        def clip(number: int, path: Path) -> Path:
            return save_mp4(frames[number].float() / 255, path.with_suffix(".mp4"), fps, heard[number])

        return [self._add(partial(clip, number)) for number in range(len(inputs))]


def _still(image: Tensor) -> Callable[[Path], Path]:
    drawn = Image.fromarray(to_uint8(image[None])[0])
    return lambda path: save_png(drawn, path.with_suffix(".png"))
