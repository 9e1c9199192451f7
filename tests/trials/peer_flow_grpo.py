"""flowrl against flow_grpo's published functions: seconds of an iteration on the embedded model, and equal gradients.

    python tests/trials/peer_flow_grpo.py --checkout DIR --out docs/research/trials/peer_flow_grpo.json

flowrl's own recipe and an epoch of flow_grpo's training run in turns in one process, on one thread, from the same LoRA
(its B perturbed), with the same prompts, reward, steps, sigmas and sizes. Each case is a process of its own. Before the
first update both are given the same states, and their gradients are compared. CPU seconds are the process's; wall clock
means something on an idle machine only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

sys.path += [str(Path(__file__).resolve().parents[1] / place) for place in ("trials/peer", "helpers")]

import torch
from accelerate import Accelerator
from origin import origin
from peer_checkout import COMMIT, Published, load_checkout
from peer_epoch import PRECISIONS, Epochs, Samples, Spent, timed
from torch import Tensor
from train_command import train

from flowrl.config.train import resolve_path
from flowrl.pipelines.arithmetic.wide_products import has_products
from flowrl.recipes import grpo
from flowrl.rewards import RewardInputs
from flowrl.runtime.progress import progress
from flowrl.runtime.randomness import counter_normal
from flowrl.training.draws import Batch
from flowrl.training.loop import Loop
from flowrl.training.parts import Ready
from flowrl.training.record import Recording
from flowrl.training.run import Run
from flowrl.trajectory import Rows

BASE = "tiny_grpo_geneval"
SETTINGS = (
    "sampler.kernel=flow_sde", "sampler.noise_level=0.7", "sampler.sde_window_range=null", "sampler.grid=diffusers",
    "eval_every=0", "checkpoint_every=1000000", "threads=1", "progress=false", "logging.tensorboard=false",
)  # fmt: skip
"""What makes the embedded configuration the checkout's algorithm: all steps but the last by its SDE, at its sigmas."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One comparison.

    Attributes:
        dtype: of the networks; flow_grpo's side turns to bfloat16 by autocast, as accelerate does it.
        settings: further ones of flowrl.
        detached: whether flow_grpo's function is the released one, whose gradient flows through the prompt's branch
            alone; otherwise its `detach` is taken out.
    """

    dtype: Literal["float32", "bfloat16"]
    settings: tuple[str, ...] = ()
    detached: bool = False


_PROMPT_ALONE, _KEPT = "sampler.train_negative=false", "keep_graphs=true"
_KL = ("kl_coef=0.04", "kl_type=no_dt")
_DTYPES: tuple[Literal["float32"], Literal["bfloat16"]] = ("float32", "bfloat16")
CASES: dict[str, Case] = {
    **{dtype: Case(dtype=dtype) for dtype in _DTYPES},
    **{f"{dtype}, graphs kept": Case(dtype=dtype, settings=(_KEPT,)) for dtype in _DTYPES},
    **{f"{dtype}, kl 0.04": Case(dtype=dtype, settings=_KL) for dtype in _DTYPES},
    **{
        f"{dtype}, prompt's branch": Case(dtype=dtype, settings=(_PROMPT_ALONE,), detached=True) for dtype in _DTYPES
    },
    **{
        f"{dtype}, prompt's branch, graphs kept": Case(dtype=dtype, settings=(_PROMPT_ALONE, _KEPT), detached=True)
        for dtype in _DTYPES
    },
}  # fmt: skip


class Comparison:
    """What a case measures while flowrl's run goes on: its iterations, flow_grpo's epochs between them, gradients."""

    def __init__(self, published: Published, case: Case) -> None:
        self.published, self.case = published, case
        self.epochs: Epochs | None = None
        self.turns: list[dict[str, Any]] = []
        self.gradients: dict[str, float] = {}
        self.own = Spent()
        self.table: tuple[Recording, Rows] | None = None  # of the first update, until it has been compared

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, runs of the recipe are measured."""

        def update(record: Recording, rows: Rows, *args: Any, **kwargs: Any) -> None:
            if not self.gradients:
                self.table = record, rows
            plain(record, rows, *args, **kwargs)

        def loop(ready: Ready, run: Run) -> MeasuredLoop:
            return MeasuredLoop(self, ready, run)

        plain = grpo.update
        with patch.object(grpo, "Loop", loop), patch.object(grpo, "update", update):
            yield

    def begin(self, loop: Loop) -> None:
        """Perturbs the LoRA's B, and gives flow_grpo's side the same weights."""
        for name, parameter in loop.policy.parameters.items():
            if "lora_B" in name:
                parameter.data.copy_(0.02 * counter_normal(parameter.shape, loop.config.seed, "peer", name))

        def rewards(images: Tensor, prompts: Sequence[str]) -> Tensor:
            known = {prompt.text: prompt.metadata for prompt in loop.prompts.train}
            inputs = RewardInputs(
                prompts=list(prompts), images=images, metadata=[known[text] for text in prompts],
                group_ids=torch.arange(len(images)) // loop.config.group_size, sample_ids=torch.arange(len(images)),
            )  # fmt: skip
            return loop.scorer.reward(inputs).values

        model = str(resolve_path(loop.config.pipeline.model))
        self.epochs = Epochs(self.published, loop.config, model, rewards, detached=self.case.detached)
        self.epochs.load(loop.policy.tensors())
        loop.optimizer.register_step_pre_hook(lambda *_: self._compare(loop))
        self._start()

    def _start(self) -> None:
        self.own = Spent()
        self._begun = time.process_time(), time.perf_counter()

    def _compare(self, loop: Loop) -> None:
        """Compares the gradients that flowrl is about to use with flow_grpo's at the same states."""
        if self.table is None or self.epochs is None:
            return
        (record, rows), self.table = self.table, None
        samples = samples_of(self.epochs, record, rows)
        own = torch.cat([p.grad.flatten().double() for p in loop.policy.parameters.values() if p.grad is not None])
        for name, detached in (("of both branches", False), ("of the prompt's branch", True)):
            theirs, info = self.epochs.gradient(samples, detached=detached)
            self.gradients |= {
                f"cosine, {name}": float(own @ theirs / (own.norm() * theirs.norm())),
                f"relative difference, {name}": float((own - theirs).norm() / theirs.norm()),
                f"its largest deviation of a ratio from 1, {name}": info["deviation"],
            }
        taught = record.schedule.sigma - self.epochs.pipe.scheduler.sigmas
        self.gradients["largest difference of sigmas"] = float(taught.abs().max())

    def turn(self, batch: Batch, loop: Loop, row: Mapping[str, Any]) -> None:
        """Range an iteration of flowrl, and lets flow_grpo's side take its turn with the same prompts."""
        assert self.epochs is not None
        self.own.cpu, self.own.wall = (
            now - begun for now, begun in zip((time.process_time(), time.perf_counter()), self._begun, strict=True)
        )
        counts = loop.network.counts
        self.own.graph = counts.get("backward", 0) - sum(turn["flowrl"]["graph"] for turn in self.turns)
        forward = sum(counts.get(kind, 0) for kind in ("rollout", "update", "reference"))
        self.own.forward = forward - sum(turn["flowrl"]["forward"] for turn in self.turns)
        theirs, info = self.epochs.epoch([prompt.text for prompt in batch.asked.prompts_of(batch.group)])
        self.turns.append({
            "flowrl": asdict(self.own), "flow_grpo": asdict(theirs),
            "ratio_first_deviation": row.get("ratio_first_deviation"), "flow_grpo_deviation": info.get("deviation"),
        })  # fmt: skip
        self._start()

    def result(self) -> dict[str, Any]:
        """Medians and spread of all turns but the first, which is a warm-up, and those where a side left rows out."""
        turns = self.turns[1:]
        most = {side: max(turn[side]["forward"] for turn in turns) for side in _SIDES}
        whole = [turn for turn in turns if all(turn[side]["forward"] == most[side] for side in _SIDES)]
        return {
            "rounds": len(whole), "rounds with fewer rows": len(turns) - len(whole),
            "rows": {side: {kind: whole[0][side][kind] for kind in ("forward", "graph")} for side in _SIDES},
            "largest first deviation of flowrl's ratio": max(turn["ratio_first_deviation"] for turn in whole),
            "seconds": {
                side: {phase: spread([part(turn[side]) for turn in whole]) for phase, part in _PHASES.items()}
                for side in _SIDES
            },
            "times faster": {
                phase: spread([part(turn["flow_grpo"]) / part(turn["flowrl"]) for turn in whole])
                for phase, part in _PHASES.items()
            },
            "gradients": self.gradients, "turns": self.turns,
        }  # fmt: skip


class MeasuredLoop(Loop):
    """A loop whose iterations are measured."""

    def __init__(self, comparison: Comparison, ready: Ready, run: Run) -> None:
        super().__init__(ready, run)
        self.comparison = comparison
        self._batch: Batch | None = None
        comparison.begin(self)

    def batch(self, *args: Any, **kwargs: Any) -> Batch:
        self._batch = super().batch(*args, **kwargs)
        return self._batch

    def clock(self, stage: str) -> AbstractContextManager[None]:
        inner = super().clock(stage)
        if stage != "update":
            return inner

        @contextmanager
        def both() -> Iterator[None]:
            with inner, timed(self.comparison.own, "update_cpu", "update_wall"):
                yield

        return both()

    def log(self, iteration: int, row: dict[str, Any]) -> None:
        super().log(iteration, row)
        assert self._batch is not None
        self.comparison.turn(self._batch, self, row)


_LIBRARIES = ("diffusers", "peft", "accelerate")
_SIDES = ("flowrl", "flow_grpo")
_PHASES: dict[str, Callable[[Mapping[str, float]], float]] = {
    "iteration, CPU": lambda spent: spent["cpu"],
    "rollout, decoding and reward, CPU": lambda spent: spent["cpu"] - spent["update_cpu"],
    "update, CPU": lambda spent: spent["update_cpu"],
    "iteration, wall": lambda spent: spent["wall"],
}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and largest."""
    found = {"median": statistics.median(values), "least": min(values), "largest": max(values)}
    return {name: round(value, 4) for name, value in found.items()}


def samples_of(epochs: Epochs, record: Recording, rows: Rows) -> Samples:
    """flowrl's transitions as flow_grpo's update takes them: `[B, T, ...]`, images in their order."""
    steps = rows.step.unique(sorted=True).tolist()
    by_step = [torch.nonzero(rows.step == step).flatten() for step in steps]
    by_step = [index[rows.sample[index].argsort()] for index in by_step]
    states = record.sampled.states
    prompts = record.asked.prompts_of(rows.group[by_step[0]])
    embeds, pooled = epochs.encoded([prompt.text for prompt in prompts])
    timestep = torch.stack([record.schedule.timestep[step] for step in steps])
    epochs.pipe.scheduler.set_timesteps(record.schedule.num_steps)
    return {
        "embeds": embeds, "pooled": pooled, "timesteps": timestep.repeat(len(prompts), 1),
        "latents": torch.stack([states[rows.source[index]] for index in by_step], 1),
        "next_latents": torch.stack([states[rows.produced[index]] for index in by_step], 1),
        "log_probs": torch.stack([rows.old_log_prob[index] for index in by_step], 1) / record.dims,
        "advantages": torch.stack([rows.advantage[index] for index in by_step], 1),
    }  # fmt: skip


def measure(published: Published, case: Case, settings: Sequence[str]) -> dict[str, Any]:
    """Runs a case in this process."""
    comparison = Comparison(published, case)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # All of a process's accelerators are one, and the first one says at which precision.
    Accelerator(cpu=True, mixed_precision=PRECISIONS[case.dtype])
    with tempfile.TemporaryDirectory() as folder, comparison.watching():
        code = train(BASE, [*SETTINGS, f"pipeline.dtype={case.dtype}", *case.settings, *settings, f"out={folder}/run"])
    if code:
        raise KeyboardInterrupt
    return comparison.result()


def main() -> None:
    """Runs the cases that were asked for and writes what they found."""
    parser = argparse.ArgumentParser(description="flowrl against flow_grpo's published functions.")
    parser.add_argument("--checkout", type=Path, required=True, metavar="DIR", help=f"of flow_grpo at commit {COMMIT}")
    parser.add_argument("--out", type=Path, default=Path("peer_flow_grpo.json"), metavar="PATH", help="file to write")
    parser.add_argument("--case", action="append", choices=[*CASES], help="one case; may be repeated (all)")
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="turns of each side after the warm-up (8)")
    parser.add_argument("--prompts", type=int, default=1, metavar="N", help="of an iteration, 12 images each (1)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="further settings of flowrl")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    published, names = load_checkout(asked.checkout), asked.case or [*CASES]
    settings = [f"num_iterations={asked.rounds + 1}", f"prompts_per_step={asked.prompts}", *asked.set]
    if asked.inside:
        asked.out.write_text(json.dumps(measure(published, CASES[names[0]], settings)))
        return
    command = origin()
    command["command"] = command["command"].replace(str(asked.checkout), "DIR").replace(str(asked.out), asked.out.name)
    command |= {
        "flow_grpo": COMMIT, "libraries": ", ".join(f"{name} {version(name)}" for name in _LIBRARIES),
        "instructions": torch.backends.cpu.get_cpu_capability()
        + (", of bfloat16 too" if has_products(torch.bfloat16) else ", none of bfloat16"),
    }  # fmt: skip
    found: dict[str, Any] = {"origin": command, "settings": [*SETTINGS, *settings], "cases": {}}
    with progress("cases", len(names)) as advance, tempfile.TemporaryDirectory() as folder:
        for name in names:
            part = Path(folder) / "case.json"
            words = ["--inside", f"--checkout={asked.checkout}", f"--case={name}", f"--out={part}"]
            words += [
                f"--rounds={asked.rounds}",
                f"--prompts={asked.prompts}",
                *(f"--set={text}" for text in asked.set),
            ]
            subprocess.run([sys.executable, __file__, *words], check=True, stdout=subprocess.DEVNULL)
            found["cases"][name] = json.loads(part.read_text())
            advance(name)
            asked.out.parent.mkdir(parents=True, exist_ok=True)
            asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(table(found["cases"]))


def table(cases: Mapping[str, Any]) -> str:
    """Rows of Markdown: how many times faster flowrl is, medians with the least and largest round."""
    lines = [
        "| case | rounds | rows forward + graph | iteration | rollout, decoding, reward | update | iteration, wall |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for name, case in cases.items():
        rows = " / ".join(f"{case['rows'][side]['forward']} + {case['rows'][side]['graph']}" for side in _SIDES)
        cells = [
            "{median:.2f} ({least:.2f} to {largest:.2f})".format(**case["times faster"][phase])
            for phase in (*[p for p in _PHASES if p.endswith("CPU")], "iteration, wall")
        ]
        lines.append(f"| {name} | {case['rounds']} | {rows} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
