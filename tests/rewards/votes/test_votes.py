"""Votes as a reward: what answers become, what is kept, what is refused; runs that people vote in."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from reward_inputs import inputs_of, random_images
from tiny_runs import TinyRuns, lasting, lora, metrics
from toy_pipeline import toy_runs

from flowrl.cli import main
from flowrl.config.train import load_config
from flowrl.profiling.subject import STAND_IN_REWARD, _with_rewards
from flowrl.rewards import RewardInputs, RewardOutput, build_reward
from flowrl.rewards.votes import ballot
from flowrl.rewards.votes.reward import VotesReward
from flowrl.runtime.journal import Journal
from flowrl.training.scoring import check_votes

ANN, BOB = "voter-ann", "voter-bob"


class Page:
    """A reward with its page open, and who votes on it."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.closing, self.folder = ExitStack(), folder
        reward: Any = build_reward("votes", options=options)
        self.reward = reward
        self.reward.open(folder / "votes", 9, self.closing)
        self.address = self.reward.address
        self.session = requests.Session()

    def state(self, voter: str = ANN) -> dict[str, Any]:
        found: dict[str, Any] = self.session.get(f"{self.address}state?voter={voter}", timeout=10).json()
        return found

    def post(self, question: Any, answer: Any, voter: Any = ANN, **more: Any) -> requests.Response:
        body = {"question": question, "voter": voter, "answer": answer}
        return self.session.post(f"{self.address}vote", json=body, timeout=10, **more)

    def answer_all(self, answers: Callable[[dict[str, Any]], str], voter: str = ANN) -> int:
        number, state = 0, self.state(voter)
        while state["stage"] == "vote":
            posted = self.post(state["question"]["number"], answers(state["question"]), voter)
            assert posted.status_code == 200, posted.text
            number, state = number + 1, posted.json()
        return number

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The journal, without its head."""
        (path,) = (self.folder / "votes").glob("journal-*.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()[1:]]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Page]]:
    with ExitStack() as pages:

        def open_page(folder: Path = tmp_path, **options: Any) -> Page:
            page = Page(folder, **options)
            pages.callback(page.closing.close)
            return page

        yield open_page


def one_group(count: int = 3, iteration: int = 0) -> RewardInputs:
    inputs = inputs_of(random_images(count), ["a red circle"] * count)
    return RewardInputs(
        prompts=inputs.prompts,
        images=inputs.images,
        metadata=inputs.metadata,
        sample_ids=inputs.sample_ids,
        group_ids=torch.zeros(count, dtype=torch.int64),
        iteration=iteration,
    )


def brightest(page: Page) -> Callable[[dict[str, Any]], str]:
    """Prefers the sample of the greater number, by what the journal calls them."""

    def answer(question: dict[str, Any]) -> str:
        first, second = (question["candidates"].index(name) for name in question["shown"])
        return "first" if first > second else "second"

    return answer


# ---- what answers become ---------------------------------------------------------------------------------------------


def test_values_are_win_rates(opened: Callable[..., Page]) -> None:
    page = opened()
    job = page.reward.ask(one_group(3))
    assert page.answer_all(brightest(page)) == 3
    output: RewardOutput = job()
    assert output.values.tolist() == [0.0, 0.5, 1.0]
    assert output.parts["answers"].tolist() == [2.0, 2.0, 2.0]


def test_a_tie_is_half_and_a_pair_that_is_skipped_counts_for_neither(opened: Callable[..., Page]) -> None:
    page = opened()
    job = page.reward.ask(one_group(3))

    def answer(question: dict[str, Any]) -> str:
        pair = sorted(question["candidates"].index(name) for name in question["shown"])
        return {(0, 1): "tie", (0, 2): "skip", (1, 2): "skip"}[(pair[0], pair[1])]

    page.answer_all(answer)
    output = job()
    assert output.values[:2].tolist() == [0.5, 0.5]
    assert output.valid.tolist() == [True, True, False]
    assert output.errors == {"skipped": 1}


def test_voters_are_averaged_and_each_is_asked_once(opened: Callable[..., Page]) -> None:
    page = opened(ask="binary", voters=2)
    job = page.reward.ask(one_group(2))
    assert page.answer_all(lambda question: "good") == 2
    assert page.state()["stage"] == "wait"
    assert page.post(0, "bad").status_code == 409
    said = iter(["good", "bad"])
    assert page.answer_all(lambda question: next(said), BOB) == 2
    assert job().values.tolist() == [1.0, 0.5]


def test_what_nobody_votes_on_is_invalid_and_never_0(opened: Callable[..., Page]) -> None:
    page = opened(ask="binary", timeout=0.05)
    job = page.reward.ask(one_group(2))
    assert "seconds" not in page.state()  # images may still be drawn: time counts from the wait
    page.post(0, "bad")
    output = job()
    assert output.valid.tolist() == [True, False]
    assert output.values[0] == 0
    assert output.errors == {"no_vote": 1}
    late = page.post(1, "good")
    assert (late.status_code, "too late" in late.json()["detail"]) == (409, True)
    assert [line["row"]["answer"] for line in page.lines] == ["bad", None]
    assert page.state() | {"words": ""} == {
        "ask": "binary",
        "words": "",
        "iterations": 9,
        "iteration": 0,
        "all": 2,
        "done": 2,
        "missing": 1,
        "stage": "train",
    }


def test_opponents_limit_the_questions_and_one_image_alone_has_none(opened: Callable[..., Page]) -> None:
    page = opened(opponents=2)
    job = page.reward.ask(one_group(5))
    assert page.answer_all(brightest(page)) == 5
    assert job().valid.all()
    alone = page.reward.ask(one_group(1, iteration=1))()
    assert alone.errors == {"group_of_one": 1}


def test_clips_and_sources_are_shown(opened: Callable[..., Page]) -> None:
    page = opened(ask="binary", timeout=0.01)
    plain = one_group(2)
    inputs = RewardInputs(
        prompts=plain.prompts,
        images=plain.images,
        metadata=plain.metadata,
        group_ids=plain.group_ids,
        sample_ids=plain.sample_ids,
        videos=plain.images[:, None].expand(2, 4, 3, 16, 16),
        fps=8.0,
        sounds=torch.zeros(2, 1, 8000),
        sound_rate=16000,
        source_images=[[plain.images[0]]] * 2,
    )
    job = page.reward.ask(inputs)
    question = page.state()["question"]
    kinds = [
        requests.get(f"{page.address}file/{name}", timeout=10).headers["content-type"]
        for name in (*question["shown"], *question["sources"])
    ]
    assert kinds == ["video/mp4", "image/png"]
    job()
    left = [path.name for path in page.reward.files.iterdir()]
    assert left == ["flowrl.lock"]  # what is shown no more is nowhere


# ---- what is kept ----------------------------------------------------------------------------------------------------


def test_a_run_that_goes_on_asks_only_what_is_open(opened: Callable[..., Page], tmp_path: Path) -> None:
    page = opened()
    job = page.reward.ask(one_group(3))
    page.answer_all(brightest(page))
    values = job().values
    again = opened()
    job = again.reward.ask(one_group(3))
    assert again.state()["stage"] == "train"
    assert torch.equal(job().values, values)
    assert len(again.lines) == 3
    # An image that looks otherwise is another one, one that a kernel rounded apart is not.
    moved, other = one_group(3), one_group(3)
    moved.images.mul_(1 - 2 / 255)
    other.images[2] = 1 - other.images[2].round()
    assert again.reward.ask(moved)().values.tolist() == values.tolist()
    again.reward.ask(other)
    assert (again.state()["stage"], again.state()["all"]) == ("vote", 9)
    assert len(again.reward.ballot._open) - again.state()["all"] + again.state()["done"] == 1


def test_questions_whose_time_was_over_stay_closed(opened: Callable[..., Page]) -> None:
    first = opened(ask="binary", timeout=0.01)
    first.reward.ask(one_group(2))()
    again = opened(ask="binary", timeout=None)
    assert again.reward.ask(one_group(2))().errors == {"no_vote": 2}


def test_half_a_line_is_dropped_and_a_line_that_is_no_vote_is_refused(opened: Callable[..., Page]) -> None:
    page = opened(ask="binary", timeout=0.01)
    job = page.reward.ask(one_group(2))
    page.post(0, "good")
    job()
    (path,) = (page.folder / "votes").glob("*.jsonl")
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"key": "[0, 0')
    opened(ask="binary")
    assert path.read_bytes() == whole
    for line, words in (
        ('{"key": "[1]", "row": {}}', "holds no vote at key"),
        ('{"key": 7, "row": {"looks": []}}', "holds no vote at key"),
        ('{"key": "[0, 0, [1], 2, null]", "row": {"looks": ["zz"], "answer": "good"}}', "holds no vote"),
        ("[1", "cannot be read"),
    ):
        path.write_bytes(whole + line.encode() + b"\n")
        with pytest.raises(ValueError, match=words):
            opened(ask="binary")
    rows = [json.loads(line) for line in whole.decode().splitlines()[1:]]
    for row in rows:  # of images at another size
        row["row"]["looks"] = ["00ff"]
    path.write_text("\n".join(map(json.dumps, ["of before", *rows])) + "\n")
    again = opened(ask="binary")
    again.reward.ask(one_group(2))
    assert (again.state()["stage"], again.state()["done"]) == ("vote", 0)


def test_a_journal_without_its_first_line_keeps_all_answers(tmp_path: Path) -> None:
    with Journal(tmp_path, {"asked": "a"}) as journal:
        journal.path.write_text("")
    with Journal(tmp_path, {"asked": "a"}) as journal:
        journal.add("b", {"answer": "good"})
    with Journal(tmp_path, {"asked": "a"}) as journal:
        assert journal.rows == {"b": {"answer": "good"}}


def test_a_full_disk_loses_nothing_and_ends_the_run_in_words(
    opened: Callable[..., Page], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = opened(ask="binary")
    job = page.reward.ask(one_group(3))
    page.post(0, "good")
    before = page.lines

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    refused = page.post(1, "good")
    assert (refused.status_code, refused.json()["error"]) == (507, "not_kept")
    assert page.lines == before
    with pytest.raises(ValueError, match="votes cannot be written: no space is left"):
        job()


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_requests_are_refused_in_words_and_lose_nothing(opened: Callable[..., Page]) -> None:
    page = opened(ask="binary")
    page.reward.ask(one_group(2))
    root = page.address.rsplit("/", 2)[0]
    for address in (f"{root}/", f"{root}/wrong/vote", f"{page.address[:-3]}/state"):
        assert requests.post(address, json={}, timeout=10).status_code == 404
    for name in ("99.png", "..%2fjournal", "%2e%2e", ".", "%00"):
        assert requests.get(f"{page.address}file/{name}", timeout=10).status_code in (404, 200), name
    assert requests.get(f"{page.address}file/99.png", timeout=10).json()["error"] == "unknown"
    for headers, status in (
        ({"Host": "evil.example"}, 400),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Referer": "http://evil.example/"}, 403),
    ):
        assert page.post(0, "good", headers=headers).status_code == status, headers
    for body, kind, status in (
        (b"{", "application/json", 422),
        (b"\xff", "application/json", 422),
        (b"[" * 3000, "application/json", 422),
        (b'{"question": 0}', "application/json", 422),
        (b"7", "application/json", 422),
        (b" " * 5000 + b"7", "application/json", 413),
        (b'{"question": 0, "voter": "voter-ann", "answer": "good"}', "text/plain", 415),
    ):
        headers = {"content-type": kind}
        answered = requests.post(f"{page.address}vote", data=body, headers=headers, timeout=10)
        assert answered.status_code == status, body[:20]
        assert answered.json()["detail"].endswith(".")
    for question, answer, voter, status in (
        (9, "good", ANN, 404),
        (-1, "good", ANN, 404),
        (True, "good", ANN, 422),
        ("0", "good", ANN, 422),
        (0, "first", ANN, 422),
        (0, None, ANN, 422),
        (0, ["good"], ANN, 422),
        (0, "good", "short", 422),
        (0, "good", None, 422),
        (0, "good", "<script>xx", 422),
    ):
        assert page.post(question, answer, voter).status_code == status, (question, answer, voter)
    assert requests.get(f"{page.address}state", timeout=10).status_code == 422
    assert requests.put(f"{page.address}vote", timeout=10).status_code == 405
    assert page.lines == []
    own = {"Origin": root, "Sec-Fetch-Site": "same-origin"}
    assert page.post(0, "good", headers=own).status_code == 200
    assert page.post(0, "good", headers=own).json()["error"] == "twice"
    assert len(page.lines) == 1


def test_the_page_loads_only_itself_and_prompts_never_become_html(opened: Callable[..., Page]) -> None:
    page = opened()
    shown = requests.get(page.address, timeout=10)
    assert "script-src 'self'" in shown.text
    assert shown.headers["referrer-policy"] == "no-referrer"
    script = requests.get(f"{page.address}page.js", timeout=10)
    assert script.headers["content-type"].startswith("text/javascript")
    assert "innerHTML" not in script.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("timeout: 0", "timeout must be a number of seconds above 0"),
        ("timeout: -1", "timeout must be"),
        ("timeout: .nan", "timeout"),
        ("timeout: .inf", "timeout"),
        ("timeout: soon", "timeout"),
        ("voters: 0", "voters must be at least 1"),
        ("port: 70000", "port must lie in"),
        ("port: -1", "port must lie in"),
        ("opponents: 3", "opponents must be an even number"),
        ("ask: binary, opponents: 2", "with ask: pairwise"),
        ("ask: stars", "ask"),
        ("question: ' '", "question must be a text"),
    ],
)
def test_options_are_refused_before_anything_loads(
    toys: TinyRuns, capsys: pytest.CaptureFixture[str], options: str, words: str
) -> None:
    rewards = f"rewards=[{{name: votes, options: {{{options}}}}}]"
    assert main(["train", str(toys.config), f"out={toys.folder / 'no'}", rewards]) == 1
    assert words in capsys.readouterr().err
    assert not (toys.folder / "no").exists()


def test_places_where_nobody_can_be_asked_are_refused(toys: TinyRuns, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        options = f"rewards=[{{name: votes, options: {{port: {taken.getsockname()[1]}}}}}]"
        assert main(["train", str(toys.config), f"out={toys.folder / 'no'}", options]) == 1
    assert "Address already in use" in capsys.readouterr().err
    assert main(["train", str(toys.config), f"out={toys.folder / 'no'}", "eval.rewards=[{name: votes}]"]) == 1
    assert "people are asked about images of training alone" in capsys.readouterr().err
    config = load_config(toys.config, ["rewards=[{name: votes}]"])
    with pytest.raises(ValueError, match="one page, and 2 processes train"):
        check_votes(config, 2, here=True)
    with pytest.raises(ValueError, match="does not judge an item by itself"):
        build_reward("noisy", options={"reward": "votes"})
    with pytest.raises(ValueError, match="while a run trains"):
        build_reward("votes")(one_group(2))


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def toys(tmp_path: Path) -> Iterator[TinyRuns]:
    yield from toy_runs(tmp_path, rewards=[{"name": "votes", "options": {"ask": "binary"}}], num_iterations=3)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lets somebody vote in every run, as its pixels say; numbers of the questions that were put."""
    counts, opening = list[int](), VotesReward.open

    def open_page(reward: VotesReward, folder: Path, iterations: int, closing: ExitStack) -> None:
        opening(reward, folder, iterations, closing)
        ended, page = threading.Event(), Page.__new__(Page)
        page.address, page.session = reward.address, requests.Session()

        def vote() -> None:
            while not ended.wait(0.02):
                number = page.answer_all(lambda question: judged(reward, question))
                if number:
                    counts.append(number)

        voter = threading.Thread(target=vote, daemon=True)
        voter.start()
        closing.callback(page.session.close)
        closing.callback(voter.join)
        closing.callback(ended.set)

    def judged(reward: VotesReward, question: dict[str, Any]) -> str:
        ask = reward.ballot._asked[question["number"]]
        look = sum(ask.looks[0]) // 16  # of which the toy has 2 x 2 pixels
        return "skip" if look % 7 == 0 else "good" if look % 2 else "bad"

    monkeypatch.setattr(VotesReward, "open", open_page)
    return counts


def test_a_run_with_a_voter_resumes_as_one_that_never_stopped(
    toys: TinyRuns, asked: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = toys.train("whole", "prompts_per_step=1", "rollout_batch_size=4")
    total = sum(asked)
    assert total == 12
    said = capsys.readouterr().out
    assert said.count("People vote on this page") == 1
    assert said.count(" waits for votes on ") <= 3
    rows = metrics(whole)
    assert 0 < rows[0]["reward"] < 1
    assert rows[0]["reward/votes/answers"] <= 1
    # Stopped after one iteration, when the second had been answered in part.
    part = toys.train("part", "prompts_per_step=1", "num_iterations=1")
    (journal,) = (part / "votes").glob("*.jsonl")
    (told,) = (whole / "votes").glob("*.jsonl")
    lines = told.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[: 1 + 4 + 3]) + lines[8][:40])
    asked.clear()
    more = ["num_iterations=3", "rewards.0.options.timeout=600", "rewards.0.options.port=0"]
    assert main(["train", f"resume={part}", *more]) == 0
    assert sum(asked) == 12 - 4 - 3
    assert metrics(part) == rows
    assert lora(part) == lora(whole)
    assert lasting(part)["counters"] == lasting(whole)["counters"]


@pytest.mark.parametrize(
    "recipe",
    [
        [],
        ["recipe=forward", "objective.name=nft", "sampler.kernel=ode", "sampler.num_steps=6"],
        ["recipe=preference", "objective.name=dpo", "sampler.kernel=ode", "sampler.num_steps=6"],
        ["adv_std=global", "updates_per_rollout=2", "rollout_batch_size=4"],
    ],
    ids=["grpo", "forward", "preference", "pieces"],
)
def test_a_run_that_nobody_votes_in_goes_on_and_learns_nothing(toys: TinyRuns, recipe: list[str]) -> None:
    options = "rewards=[{name: votes, options: {ask: binary, timeout: 0.01}}]"
    run = toys.train("alone", options, *recipe)
    rows = metrics(run)
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    assert {row["reward_errors/votes/no_vote"] for row in rows} == {8}
    assert all(row.get("reward") is None for row in rows)
    from tiny_runs import lora_tensors

    assert all(not bool(tensor.any()) for name, tensor in lora_tensors(run).items() if "lora_B" in name)


def test_one_vote_in_an_iteration_stops_no_run(toys: TinyRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single value is the same for all images that have one, and says nothing of the reward."""
    putting = ballot.Ballot.put

    def put(self: ballot.Ballot, asked: Any) -> None:
        putting(self, asked)
        asked[0].answers[ANN] = "good"

    monkeypatch.setattr(ballot.Ballot, "put", put)
    run = toys.train("one", "rewards=[{name: votes, options: {ask: binary, timeout: 0.01}}]", "num_iterations=5")
    assert [row["reward"] for row in metrics(run)] == [1.0] * 5


def test_a_step_that_is_only_measured_asks_nobody(toys: TinyRuns) -> None:
    config, absent = _with_rewards(load_config(toys.config, ["rewards=[{name: votes}, {name: geneval, weight: 0}]"]))
    assert [entry.name for entry in config.rewards] == ["geneval", STAND_IN_REWARD]
    assert absent == [("votes", "a step that is only measured asks no people")]
