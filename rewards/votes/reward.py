"""Votes of people on a run's images, on the run's own page, as a reward; see docs/rewards.md.

{name: votes, options: {ask: pairwise, voters: 2, timeout: 3600}}
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from flowrl.config.sections import at_least
from flowrl.media.videos import save_mp4
from flowrl.rewards.base import Model, RewardInputs, RewardOutput, output_of, to_uint8
from flowrl.rewards.comparing.comparators import group_places
from flowrl.rewards.comparing.tournaments import ring_pairs, win_rate
from flowrl.rewards.serving.own_page import elsewhere, page_server
from flowrl.rewards.serving.wire_images import image_file
from flowrl.rewards.votes.ballot import VALUES, Ballot, VoteQuestion, make_app
from flowrl.runtime.randomness import counter_choice, counter_seed
from flowrl.runtime.scrubbing import say as print
from flowrl.runtime.temporary import TemporaryFolder

ANSWERS = {"pairwise": ("first", "second", "tie", "skip"), "binary": ("good", "bad", "skip")}
QUESTIONS = {"pairwise": "Which of the two is better?", "binary": "Is this good?"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Votes:
    """Votes of people on a page of the run: `win_rate` of the comparisons, where a tie is half, or 1 for good and 0 for
    bad; the mean over voters, in [0, 1].

    Images are shown as soon as they are drawn. Those without a vote are invalid ("no_vote", "skipped") and stop no run.
    Answers are kept in folder `votes` of the run. The part `answers` is an image's number of answers with a value.
    """

    judges: ClassVar[tuple[str, ...]] = ("groups",)
    addresses: ClassVar[tuple[str, ...]] = ("port", "timeout")
    models: ClassVar[tuple[Model, ...]] = ()
    asks_people: ClassVar[bool] = True
    ask: Literal["pairwise", "binary"] = "pairwise"
    """`pairwise`: which of two images of a prompt is better, or a tie; `binary`: whether one is good or bad."""
    question: str | None = None
    """The question to people; null asks which is better, or whether it is good."""
    opponents: int | None = None
    """Compares each image with only this many others, drawn at random; even. Null: with all, N(N-1)/2 questions."""
    voters: int = 1
    """Answers that a question waits for, skips included."""
    timeout: float | None = 1800.0
    """Seconds that training waits for votes once an iteration's images are drawn; null sets no limit."""
    port: int = 0
    """Port of the page on 127.0.0.1; 0 takes a free one."""

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
    """A `Reward` that asks at once and gets its answers later."""

    name, differentiable, waits = "votes", False, True
    needs = frozenset({"prompts", "images", "group_ids", "sample_ids", "sounds"})
    address = ""

    def __init__(self, options: Votes) -> None:
        self.options, self.words = options, options.question or QUESTIONS[options.ask]
        self.kind = "pairwise" if options.ask == "pairwise" else "groupwise"
        opponents = options.opponents or "all"
        self.version = f"votes:{options.ask}:voters-{options.voters}:opponents-{opponents}:{self.words}"

    def open(self, folder: Path, iterations: int, closing: ExitStack) -> None:
        """Opens the page of a run, and prints its address.

        Args:
            folder: keeps the answers.
            iterations: number of the run's iterations.
            closing: closes the page.

        Raises:
            ValueError: the port is taken, a package is not installed, or the folder holds something else.
        """
        options = self.options
        self.ballot = Ballot(folder, {"asked": self.version}, voters=options.voters, timeout=options.timeout)
        closing.enter_context(self.ballot.journal)
        self.files, self.number = Path(closing.enter_context(TemporaryFolder("flowrl-votes-"))), 0
        facts = {"ask": options.ask, "words": self.words, "iterations": iterations}
        app = partial(make_app, self.ballot, self.files, ANSWERS[options.ask], facts)
        server, self.address, bound = page_server(app, options.port, "the run", posts=True)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [closing.enter_context(bound)]}, daemon=True)
        thread.start()
        closing.callback(thread.join, 5)
        closing.callback(setattr, server, "should_exit", True)
        print(f"People vote on this page, which only this machine can open:\n{self.address}")
        print(elsewhere(self.address), flush=True)

    def __call__(self, inputs: RewardInputs) -> RewardOutput:
        return self.ask(inputs)()

    def ask(self, inputs: RewardInputs) -> Callable[[], RewardOutput]:
        """Asks questions about samples; the result waits for the answers."""
        if not self.address:
            raise ValueError("reward 'votes' asks people while a run trains, and nowhere else: take another reward.")
        films, groups, ids = inputs.videos, group_places(inputs), inputs.sample_ids.tolist()
        shown = self._show(inputs)
        small = to_uint8(adaptive_avg_pool2d(inputs.images.float() if films is None else films.mean(1), 8))
        files, asked = [*shown], list[tuple[VoteQuestion, list[int]]]()
        for group, places in groups.items():
            given = [self._still(image) for image in inputs.source_images[places[0]]] if inputs.source_images else []
            files += given
            for own in self._questions(inputs.iteration, group, places):
                page = {"shown": [shown[k] for k in own], "candidates": [shown[k] for k in places], "sources": given}
                about = (inputs.iteration, group, [ids[k] for k in own], inputs.prompts[own[0]])
                asked.append((VoteQuestion(about=about, looks=[small[k].tobytes() for k in own], page=page), own))
        self.ballot.put([ask for ask, _ in asked])

        def result() -> RewardOutput:
            self.ballot.wait([ask for ask, _ in asked], partial(self._tell, inputs.iteration))
            for name in files:
                (self.files / name).unlink(missing_ok=True)
            return self._output(inputs, groups.values(), asked)

        return result

    def _questions(self, iteration: int, group: int, places: np.ndarray) -> list[list[int]]:
        """The samples of each question about a group, the left one first; chance draws the sides."""
        if self.options.ask == "binary":
            return [[place] for place in places.tolist()]
        count = len(places)
        pairs = ring_pairs(counter_choice(count, count, "opponents", iteration, group), self.options.opponents or count)
        turns = [counter_seed("sides", iteration, group, *pair) % 2 for pair in pairs.tolist()]
        return [places[pair[::-1] if turn else pair].tolist() for pair, turn in zip(pairs, turns, strict=True)]

    def _output(
        self, inputs: RewardInputs, groups: Iterable[np.ndarray], asked: Sequence[tuple[VoteQuestion, list[int]]]
    ) -> RewardOutput:
        batch = len(inputs)
        values, answers, wins_BB = np.full(batch, np.nan), np.zeros(batch), np.full((batch, batch), np.nan)
        errors = ["group_of_one"] * batch
        for ask, own in asked:
            wins_BB[own[0], own[-1]] = values[own[0]] = ask.value
            answers[own] += sum(said in VALUES for said in ask.answers.values())
            for k in own:
                errors[k] = "skipped" if "skip" in ask.answers.values() and errors[k] != "no_vote" else "no_vote"
        for places in groups if self.options.ask == "pairwise" else ():
            values[places] = win_rate(wins_BB[np.ix_(places, places)])
        return output_of(values.tolist(), inputs, {"answers": answers.tolist()}, errors)

    def _tell(self, iteration: int, left: int, deadline: float) -> None:
        end = time.time() + deadline - time.monotonic()
        until = "" if math.isinf(deadline) else time.strftime(", until %H:%M:%S", time.localtime(end))
        print(f"Iteration {iteration} waits for votes on {left} questions{until}: {self.address}", flush=True)

    def _still(self, image: Tensor) -> str:
        self.number += 1
        (self.files / f"{self.number}.png").write_bytes(image_file(to_uint8(image[None])[0], "png"))
        return f"{self.number}.png"

    def _show(self, inputs: RewardInputs) -> list[str]:
        """Files of the samples: images, or clips with their sound."""
        if inputs.videos is None:
            return [self._still(image) for image in inputs.images]
        first, self.number = self.number + 1, self.number + len(inputs)
        for k, video in enumerate(inputs.videos.cpu()):
            heard = None if inputs.sounds is None else (inputs.sounds[k].cpu(), inputs.sound_rate or 1)
            save_mp4(video, self.files / f"{first + k}.mp4", inputs.fps or 8.0, heard)
        return [f"{first + k}.mp4" for k in range(len(inputs))]
