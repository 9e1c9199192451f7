"""Which kernels are tried where a gradient is not finite, on one process and on two, and what float16's scale does."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import Attention
from torch import nn
from warm_forks import start_forks

from flowrl.config.sections import ParallelConfig
from flowrl.pipelines.arithmetic import attention
from flowrl.pipelines.arithmetic.attention import give_kernel
from flowrl.pipelines.arithmetic.attention_words import Known, usable
from flowrl.training import second_kernel
from flowrl.training.learner import GradientSum, NotFinite, Statistics
from flowrl.training.processes.devices import accelerator_of
from flowrl.training.processes.mesh import Layout
from flowrl.training.run import Run
from flowrl.training.second_kernel import apply_finite

NAN, HUGE = float("nan"), 1e39  # the largest number of float32 is 3e38
KNOWN = Known(head_sizes=(8,))
Answer = float | BaseException | Callable[[int], float]
"""What a kernel gives: a gradient, an error, or a gradient by the power of the loss scale."""


def one_process() -> Any:
    return SimpleNamespace(processes=1, main=True, device=torch.device("cpu"), of_all=lambda mine: [mine])


@dataclass(kw_only=True)
class Updates:
    """Updates of one number through one real attention in bfloat16, whose kernels give what a test says."""

    answers: dict[str, Answer]
    losses: dict[str, float] = field(default_factory=dict)
    dtype: str = "bfloat16"
    attention: str = "native"
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    run: Any = field(default_factory=one_process)
    counters: dict[str, Any] = field(default_factory=dict)
    tried: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.network = Attention(query_dim=16, heads=2, dim_head=8).to(torch.bfloat16)
        give_kernel([self.network], self.attention, KNOWN, torch.bfloat16, "cpu")
        self.processor = self.network.processor
        self.weight = nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0)
        self.stats = Statistics("kl")
        settings = SimpleNamespace(pipeline=SimpleNamespace(dtype=self.dtype), parallel=self.parallel)
        family = SimpleNamespace(attends=lambda place: KNOWN)
        self.ready: Any = SimpleNamespace(family=family, location="", config=settings)
        self.pipeline: Any = SimpleNamespace(attention=self.attention, denoiser=self.network)

    @property
    def kernel(self) -> str:
        """The kernel that the attention has now: the own one has the own processor."""
        if self.network.processor is self.processor:
            return self.attention
        _, _, word = type(self.network.processor).__name__.partition("2_0")
        return word.removeprefix("_") or "native"

    def descend(self, gradient: GradientSum, stats: Statistics) -> None:
        """Adds up the gradient that the kernel of now gives; its loss is the same number, or that of `losses`."""
        self.tried.append(self.kernel)
        answer = self.answers[self.kernel]
        if isinstance(answer, BaseException):
            raise answer
        value = answer(gradient.counters["loss_scale_log2"]) if callable(answer) else answer
        stats.mean(None, loss=torch.tensor([self.losses.get(self.kernel, value)]), kl=torch.tensor([1.0]))
        gradient.add(self.weight.sum())  # back-propagation as ever
        gradient.total[0] += value - 1

    def update(self, *, again: bool = True) -> float | None:
        """The norm of an update; None where it was left out."""
        wide: dict[str, Any] = {"sum_dtype": lambda device: torch.float64, "settle": lambda: None}
        policy: Any = SimpleNamespace(split=None, parameters={"weight": self.weight}, trained=[self.weight], **wide)
        gradient = GradientSum(policy, self.counters, scale_loss=self.dtype == "float16")
        self.tried.clear()
        self.descend(gradient, self.stats)
        how = (self.run, self.optimizer, 1e9, 7)
        norm = apply_finite(self.ready, self.pipeline, (gradient, self.stats), self.descend if again else None, how)
        return None if norm is None else float(norm)


# ---- kernels that fail -----------------------------------------------------------------------------------------------

ERRORS = (
    torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB"),
    NotImplementedError("no backward pass"),
    ValueError("this mask is refused"),
    RuntimeError("backend='inductor' raised"),
    AssertionError("head size"),
)


@pytest.mark.parametrize("fails", ERRORS, ids=lambda error: type(error).__name__)
def test_a_kernel_that_cannot_run_is_named_with_its_reason_and_the_next_one_is_tried(
    capsys: pytest.CaptureFixture[str], fails: Exception
) -> None:
    updates = Updates(answers={"native": NAN, "float32": fails, "math": 2.0})
    assert updates.update() == 2.0
    assert updates.tried == ["native", "float32", "math"]
    assert (updates.kernel, updates.weight.item()) == ("native", -2.0)
    reason = f"{type(fails).__name__}: {' '.join(str(fails).split())}"
    said = (
        "flowrl: warning, iteration 7: the gradient is not finite under pipeline.attention=native; float32 could not "
        f"run ({reason}), and under math it is, so this update takes that one. If it comes back, set "
        "pipeline.attention=math\n"
    )
    assert capsys.readouterr().err == said


def test_where_no_kernel_helps_the_run_ends_with_what_began_it() -> None:
    updates = Updates(answers={"native": NAN, "float32": ERRORS[0], "math": HUGE})
    wanted = (
        r"iteration 7: the gradient is not finite under pipeline.attention=native, math; float32 could not run "
        r"\(OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\), so no step was taken: lower optim.lr"
    )
    with pytest.raises(NotFinite, match=wanted):
        updates.update()
    assert (updates.kernel, updates.weight.item(), updates.weight.grad) == ("native", 0.0, None)


def test_a_kernel_that_is_refused_is_named_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(word: str, **_: Any) -> None:
        if word == "float32":
            raise torch.OutOfMemoryError("of the check")

    updates = Updates(answers={"native": NAN, "math": 2.0})
    monkeypatch.setattr(attention, "check_backward", check)
    assert updates.update() == 2.0
    assert "float32 could not run (OutOfMemoryError: of the check), and under math" in capsys.readouterr().err


def test_the_own_kernel_is_put_back_unchecked_whatever_was_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own check would fail on a device that is full, or broken by the other kernel."""
    updates = Updates(answers={"math": NAN, "native": 1.0, "float32": KeyboardInterrupt()}, attention="math")

    def check(word: str, **_: Any) -> None:
        assert word != "math"

    monkeypatch.setattr(attention, "check_backward", check)
    assert updates.update() == 1.0
    assert updates.network.processor is updates.processor
    updates.answers["native"] = NAN
    with pytest.raises(KeyboardInterrupt):
        updates.update()
    assert updates.network.processor is updates.processor


# ---- the norm --------------------------------------------------------------------------------------------------------


def test_a_gradient_is_finite_where_its_norm_in_float32_is() -> None:
    """float64 sums hold what float32, in which the optimizer takes them, does not."""
    updates = Updates(answers={"native": HUGE, "float32": -HUGE, "math": 3.0})
    assert updates.update() == 3.0
    assert updates.tried == ["native", "float32", "math"]


# ---- statistics ------------------------------------------------------------------------------------------------------


def test_rows_that_are_not_finite_give_way_to_those_of_the_kernel_that_is_taken() -> None:
    """By hand: losses 2, 6 and 1. Those of updates before stay, so do finite ones: their kernel drew the rollout."""
    run = one_process()
    run.total = run.gather = lambda mine: mine
    updates = Updates(answers={"native": 2.0, "float32": 6.0}, run=run)
    updates.update()
    updates.answers["native"] = NAN
    updates.update()
    updates.losses["native"] = 1.0
    updates.update()
    assert updates.stats.rows(run) == 3
    assert updates.stats.row(run) == {"loss": 3.0, "kl": 1.0}


# ---- float16 ---------------------------------------------------------------------------------------------------------


def below(limit: int) -> Callable[[int], float]:
    """A gradient that overflows where the loss scale is larger than a power of two."""
    return lambda power: 1.0 if power <= limit else float("inf")


def in_float16(**answers: Answer) -> Updates:
    return Updates(answers={"float32": NAN, **answers}, dtype="float16")


def test_a_kernel_that_fails_in_float16_is_left_after_two_updates_and_the_scale_comes_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    updates = in_float16(native=NAN, math=below(14))
    assert [updates.update() for _ in range(2)] == [None, None]
    assert updates.counters["loss_scale_log2"] == 12
    assert updates.update() == 1.0
    assert updates.tried == ["native", "float32", "math"]
    assert updates.counters["loss_scale_log2"] == 14
    assert (
        "under math it is, so this update takes that one. The loss scale is 2^14 as before" in capsys.readouterr().err
    )
    assert updates.update() == 1.0  # a kernel that has failed is doubted at once
    assert updates.counters["loss_scale_log2"] == 14
    updates.answers["native"] = 1.0
    assert updates.update() == 1.0
    updates.answers["native"] = NAN
    assert updates.update() is None  # and not any more, once it has not
    assert updates.tried == ["native"]


def test_an_overflow_by_the_scale_asks_no_other_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    updates, tried = in_float16(native=below(12), math=1.0), list[str]()
    for wanted in (None, None, 1.0, 1.0):
        assert updates.update() == wanted
        tried += updates.tried
    assert tried == ["native"] * 4
    assert updates.counters["loss_scale_log2"] == 12
    assert capsys.readouterr().err == ""


def test_a_scale_that_is_too_large_for_all_falls_as_ever() -> None:
    updates, norms, asked = in_float16(native=below(9), math=below(9)), list[float | None](), list[int]()
    while not norms or norms[-1] is None:
        norms.append(updates.update())
        asked += [len(norms)] if len(updates.tried) > 1 else []
    assert (norms, asked) == ([None] * 5 + [1.0], [3])
    assert updates.counters["loss_scale_log2"] == 9


def test_a_kernel_that_fails_under_a_scale_that_is_too_large_is_found_too() -> None:
    updates = in_float16(native=NAN, math=below(12))
    assert [updates.update() for _ in range(6)] == [None] * 5 + [1.0]
    assert updates.counters["loss_scale_log2"] == 11


def test_what_cannot_be_computed_twice_asks_no_kernel() -> None:
    updates = in_float16(native=NAN)
    assert [updates.update(again=False) for _ in range(14)] == [None] * 14
    with pytest.raises(NotFinite, match="the gradient is not finite, so no step"):
        updates.update(again=False)
    assert updates.tried == ["native"]


# ---- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [{"shard": 2}, {"context": 2}], ids=str)
def test_where_processes_compute_together_torchs_own_choice_alone_is_tried(split: dict[str, int]) -> None:
    updates = Updates(answers={"math": NAN, "native": 1.0}, attention="math", parallel=ParallelConfig(**split))
    assert updates.update() == 1.0
    assert updates.tried == ["math", "native"]
    own = Updates(answers={"native": NAN}, parallel=updates.parallel)
    ((key, number),) = split.items()
    with pytest.raises(NotFinite, match=f"attention=native; only native is tried with .*parallel.{key}={number}"):
        own.update()
    assert own.tried == ["native"]


def test_a_process_that_fails_alone_within_ends_at_once() -> None:
    """The others wait within for its part of the weights, and not for its answer."""
    run, asked = one_process(), list[Any]()

    def of_all(mine: Any) -> list[Any]:
        asked.append(mine)
        return [mine]

    run.of_all = of_all
    parallel = ParallelConfig(shard=2)
    updates = Updates(answers={"math": NAN, "native": ERRORS[0]}, attention="math", parallel=parallel, run=run)
    with pytest.raises(NotFinite, match=r"attention=math; native could not run \(OutOfMemoryError: CUDA"):
        updates.update()
    assert len(asked) == 2  # the list, and whether the kernel was given
    updates.answers["native"] = RuntimeError("Connection closed by peer [127.0.0.1]:46")  # what the others get then
    with pytest.raises(RuntimeError, match="closed by peer"):
        updates.update()


def test_it_ends_in_float16_too() -> None:
    answers: dict[str, Answer] = {"math": NAN, "native": ERRORS[0]}
    updates = Updates(answers=answers, dtype="float16", attention="math", parallel=ParallelConfig(context=2))
    assert [updates.update() for _ in range(2)] == [None, None]
    with pytest.raises(NotFinite, match="native could not run"):
        updates.update()


def _two(rank: int) -> None:
    """On each of two processes: another list, an error on one, a refusal on one, another kernel of its own."""
    run = Run.__new__(Run)
    run.accelerator, run.layout = accelerator_of("cpu"), Layout(replicate=2)
    run.device, run.main, run.processes, run.first = run.accelerator.device, rank == 0, 2, True
    check = attention.check_backward

    def refusing(word: str, **settings: Any) -> None:
        if word == "float32":
            raise ValueError("refused here")
        check(word, **settings)

    def tell(case: str, answers: dict[str, Answer], own: str = "native") -> None:
        updates = Updates(answers=answers, run=run, attention=own)
        norm = updates.update()
        print(f"{case} {rank}: {norm} {' '.join(updates.tried)}", flush=True)

    if rank == 1:
        vars(second_kernel)["usable"] = lambda *given: [word for word in usable(*given) if word != "float32"][::-1]
    tell("list", {"native": NAN, "float32": 1.0, "math": 1.0})
    vars(second_kernel)["usable"] = usable
    tell("error", {"native": NAN, "float32": ERRORS[0] if rank == 1 else 1.0, "math": 1.0})
    if rank == 1:
        vars(attention)["check_backward"] = refusing
    tell("refusal", {"native": NAN, "float32": 1.0, "math": 1.0})
    vars(attention)["check_backward"] = check
    own = ("native", "float32")[rank]
    tell("own", {"native": NAN if rank == 0 else 1.0, "float32": 1.0, "math": 1.0}, own)


def test_two_processes_try_the_same_kernels(tmp_path: Path) -> None:
    def work() -> None:
        _two(int(os.environ["RANK"]))
        raise SystemExit(0)

    started = start_forks([], [tmp_path, tmp_path], tmp_path / "log", work)
    assert started.wait(60, grace=1) == (0, 0), started.said()
    lines = [line for line in started.said().splitlines() if ": 2.0 " in line]
    wanted = {"list": "math", "error": "float32 math", "refusal": "math", "own": "native float32"}
    own = {"own 1": "float32"}
    places = [f"{case} {rank}" for rank in (0, 1) for case in wanted]
    both = [f"{place}: 2.0 {own.get(place, 'native')} {wanted[place.split()[0]]}" for place in places]
    assert sorted(lines) == sorted(both)
    said = " ".join(started.said().split())
    assert "float32 could not run (process 1: OutOfMemoryError: CUDA out of memory." in said
    assert "float32 could not run (process 1: ValueError: refused here), and under math" in said
    assert "pipeline.attention=native and float32, native, and under float32 it is" in said
