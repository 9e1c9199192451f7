"""Methods of 2026 on the embedded model, three trainings a side, at equal network evaluations.

    python tests/trials/claims/methods_2026.py runs/methods_2026 --out docs/research/methods/methods_2026.json
    python tests/trials/claims/methods_2026.py runs/votes --out docs/research/methods/methods_2026.json --parts votes

The second command trains some parts alone, and adds their figures to a file that has the others. With `--seeds` it
trains some seeds alone, beside those that the file has.

The plan, committed before the first of these trainings:

- Seeds 1, 2 and 3 for every side, paired, and none is left out. Trainings are short, for an hour of one busy core:
  6,000 network evaluations (10,000 in `routes`, 12,000 with teachers), 48 images an iteration. Evaluation samples as
  the model does by default. `routes` was trained first; the others had a third more to spend until its seconds were
  known, and nothing but the seconds had been read.
- Rates are those of the configurations. One training of `nft_12` at seed 90 screens the common rate 1e-3: if it gains
  less than 0.03 in held-out GenEval, every training marked `rated` below takes 2e-3, whichever the method.
- Each pair of `OUTCOMES` has one number, its first side less its second, and above 0 is the way of the claim. It is the
  held-out GenEval score of 240 images at the end, but for two: `routes` has the sum of the sizes of both halves' JPEG,
  120 images; `draw_*` has the standard deviation over iterations of the logarithm of the gradient's norm, less where
  all images of a prompt share their step, so its sides stand the other way round (its 24 images judge nothing).
- The interval is over seeds and prompts, p is Student's over seeds, and Holm corrects over all pairs that were
  measured. The page of claims corrects over all its rows besides.
- Order: routes, matching, draw, art, cold, teachers, votes. What does not fit the hour is not measured.

What is trained: `routes`, both halves of an image, one reward each, or their sum. `matching`, four losses with one
gradient on the policy itself. `draw`, Flash-GRPO's stochastic step, drawn for each iteration, prompt or image; the last
is a control that no configuration offers. `art`, DiffusionART, DiffusionNFT and Flow-GRPO-Fast, 48 images as groups of
2 or 12. `cold`, 1,500 evaluations of fine-tuning on 200 drawn scenes, then 4,500 of Flow-GRPO-Fast, against its 6,000.
`teachers`, two specialists of 4,000 evaluations each on one half of the prompts, then 4,000 of distilling both into one
LoRA, against 12,000 on all prompts. `votes`, twelve iterations of 16 votes, a tenth of them wrong or none.

The first hour ended before `votes`. What was added to the plan for it, when the other pairs were known and none of
its trainings had begun: which votes are wrong depends on the seed; evaluations of the first seed after every fourth
iteration tell, beside the pair, how many votes each side needs until its score has risen by 0.02; and `votes_2` has
the same number of votes in pairs of images, in place of groups of four. Pairs are corrected again, over all that are
measured by then. The other seeds were to have these evaluations too, until the machine turned out to be shared: that
was cut when the first seed was done.

Two of the three seeds of `votes` were trained in that time. How the rest is run, fixed before it began: the third seed,
then `votes_2`. The trainings of the first two seeds are gone, and their figures stay as they were recorded. A pair with
a seed that has figures and no images has its interval over seeds alone. The two seeds are then trained once more: if
every score is the recorded one, their images complete the planned interval; if not, nothing of them counts. What became
of it: `votes` with seed 1 had the recorded score at all four evaluations, and the others were stopped, since other work
had nearly all of the machine. So nothing of them counts.

What became of it: `by_image` turned out to be another control than was meant. Advantages are taken among the images of
a prompt that share a step, so that a draw for each image leaves groups of one or two; its pair is not judged.

A finished training is taken as it is, so that the command goes on where it was stopped. It trains in its own process,
one training at a time.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from PIL import Image
from recipe_search import origin
from vote_flips import train as train_by_votes

import flowrl
from flowrl.comparing.question import NO_LIMIT
from flowrl.config.overrides import typed_settings
from flowrl.config.train import resolve_path
from flowrl.prompts.loading import read_prompts, spread
from flowrl.runs.evaluation_rows import REWARD, SCORE, score_rows
from flowrl.runs.run_data import RunData, read_run
from flowrl.runtime.files import write_atomically
from flowrl.runtime.randomness import counter_integers
from flowrl.statistics.crossed import (
    Estimate,
    cost_to_reach,
    crossed_difference,
    crossed_estimate,
    estimate_of,
    holm,
)
from flowrl.statistics.means import ScoreRow
from flowrl.training import paths
from flowrl.world.scenes import draw_scene, random_scene

SEEDS, SCREEN_SEED = (1, 2, 3), 90
NEEDED_GAIN, RATE = 0.03, "optim.lr=2e-3"
HALVES = {
    "counts": ("single_object", "two_object", "counting"),
    "colours": ("colors", "position", "color_attr"),
}
COMMON = [
    "threads=1",
    "logging.tensorboard=false",
    "checkpoint_every=100000",
    "eval.initial=false",
    "eval.num_prompts=240",
    "eval.num_images=0",
    "eval.batch_size=48",
]
FORWARD = ["prompts_per_step=4", "times.count=2", "objective.options.guidance_scale=1"]
PAIRS = ["prompts_per_step=24", "group_size=2"]
STEPS = ["tiny_flash_grpo", "prompts_per_step=12", "group_size=4", "eval.num_prompts=24"]
SPECIALIST = ["tiny_recommended", "prompts_per_step=8", "group_size=6"]
STUDENT = ["tiny_opd", "num_iterations=10", "eval_every=10", "sampler.guidance_scale=3", "sampler.num_steps=6"]
VOTED, RISE = ["tiny_votes", "num_iterations=12", "eval_every=12"], 0.02
WATCHED = ["eval_every=4", "eval.initial=true"]  # of the first seed
GRADIENT, BOTH = "gradient", "both halves"


def budget(nfe: int) -> list[str]:
    """Settings of a training that ends after so many network evaluations, with an evaluation."""
    return [f"budget.nfe={nfe}", "budget.evals=1", f"num_iterations={NO_LIMIT}"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """What is trained with each seed: a configuration and settings, `rated` where the screen decides on its rate."""

    words: Sequence[str]
    rated: bool = False
    flips: float | None = None  # share of wrong votes


SIDES = {
    "summed": Side(words=["tiny_summed", *FORWARD, *budget(10_000), "eval.num_prompts=120"]),
    "routes": Side(words=["tiny_routes", *FORWARD, *budget(10_000), "eval.num_prompts=120"]),
    "nft_12": Side(words=["tiny_nft", *FORWARD, *budget(6_000)], rated=True),
    "awm": Side(words=["tiny_awm", *FORWARD, *budget(6_000)], rated=True),
    "rvm": Side(words=["tiny_rvm", *FORWARD, *budget(6_000)], rated=True),
    "ram": Side(words=["tiny_ram", *FORWARD, *budget(6_000)], rated=True),
    "by_iteration": Side(words=[*STEPS, "sampler.sde_window_by=iteration", *budget(6_000)], rated=True),
    "by_prompt": Side(words=[*STEPS, *budget(6_000)], rated=True),
    "by_image": Side(words=[*STEPS, *budget(6_000)], rated=True),
    "art_12": Side(words=["tiny_art", "prompts_per_step=4", *budget(6_000)], rated=True),
    "fast_12": Side(words=["tiny_flow_grpo_fast", "prompts_per_step=4", *budget(6_000)], rated=True),
    "art_2": Side(words=["tiny_art", *PAIRS, *budget(6_000)], rated=True),
    "nft_2": Side(words=["tiny_nft", *FORWARD, *PAIRS, *budget(6_000)], rated=True),
    "fast_2": Side(words=["tiny_flow_grpo_fast", *PAIRS, *budget(6_000)], rated=True),
    "sft": Side(words=["tiny_sft", "objective.options.images={runs}/scenes", *budget(1_500)]),
    "cold": Side(
        words=[
            "tiny_flow_grpo_fast", "prompts_per_step=4", "policy.init_lora={runs}/sft-s{seed}", *budget(4_500),
        ],
        rated=True,
    ),
    **{
        name: Side(words=[*SPECIALIST, "num_iterations=4", "eval_every=4", f"prompts.train={{runs}}/{name}.jsonl"])
        for name in HALVES
    },
    "student": Side(words=[*STUDENT, "policy.teacher_key=tag", "policy.teachers={teachers}"]),
    "joint": Side(words=[*SPECIALIST, "num_iterations=12", "eval_every=12"]),
    "votes": Side(words=VOTED, flips=0.0),
    "votes_flipped": Side(words=VOTED, flips=0.1),
    "votes_2": Side(words=[*VOTED, "prompts_per_step=8", "group_size=2"], flips=0.0),
}  # fmt: skip
OUTCOMES = {
    "routes": ("routes", "summed", BOTH),
    "rvm_over_nft": ("rvm", "nft_12", SCORE),
    "ram_over_nft": ("ram", "nft_12", SCORE),
    "awm_over_nft": ("awm", "nft_12", SCORE),
    "draw_prompt_over_iteration": ("by_iteration", "by_prompt", GRADIENT),
    "draw_prompt_over_image": ("by_image", "by_prompt", GRADIENT),
    "ram_over_fast": ("ram", "fast_12", SCORE),
    "art_over_nft_12": ("art_12", "nft_12", SCORE),
    "art_over_fast_12": ("art_12", "fast_12", SCORE),
    "art_over_nft_2": ("art_2", "nft_2", SCORE),
    "art_over_fast_2": ("art_2", "fast_2", SCORE),
    "cold_start": ("cold", "fast_12", SCORE),
    "student_over_joint": ("student", "joint", SCORE),
    "votes_over_flipped": ("votes", "votes_flipped", SCORE),
    "votes_four_over_two": ("votes", "votes_2", SCORE),
}
PARTS = {
    "routes": ("summed", "routes"),
    "matching": ("nft_12", "awm", "rvm", "ram"),
    "draw": ("by_iteration", "by_prompt", "by_image"),
    "art": ("art_12", "fast_12"),
    "art_2": ("art_2", "fast_2", "nft_2"),
    "cold": ("sft", "cold"),
    "teachers": (*HALVES, "student", "joint"),
    "votes": ("votes", "votes_flipped"),
    "votes_2": ("votes_2",),
}
"""What is trained together, in order."""


# ---- trainings -------------------------------------------------------------------------------------------------------


def train(folder: Path, name: str, seed: int, *, rate: Sequence[str] = (), more: Sequence[str] = ()) -> RunData:
    """Trains one side with one seed unless it is there."""
    side, run = SIDES[name], folder / f"{name if seed in SEEDS else 'screen'}-s{seed}"
    if not (run / "summary.json").exists():
        begun = time.monotonic()
        places = {"{runs}": str(folder), "{seed}": str(seed), "{teachers}": teachers(folder, seed)}
        config, *words = (filled(word, places) for word in side.words)
        words = [*COMMON, *words, *(rate if side.rated else ()), *more, f"seed={seed}"]
        if side.flips is not None:
            train_by_votes(run, side.flips, typed_settings(words))
        else:
            with one_step_an_image() if name == "by_image" else nullcontext():
                trained = flowrl.train(config, out=str(run), show=False, **typed_settings(words))
            if not trained.finished:
                raise SystemExit(f"{run} was stopped: remove it")
        print(f"{time.strftime('%H:%M:%S')} {run.name} {time.monotonic() - begun:.0f} s", flush=True)
    return read_run(run)


def finished(folder: Path, name: str) -> dict[int, RunData]:
    """The finished trainings of a side, by seed."""
    places = ((seed, folder / f"{name}-s{seed}") for seed in SEEDS)
    return {seed: read_run(place) for seed, place in places if (place / "summary.json").exists()}


def filled(word: str, places: Mapping[str, str]) -> str:
    """A setting with what depends on the folder and the seed."""
    for place, text in places.items():
        word = word.replace(place, text)
    return word


def teachers(folder: Path, seed: int) -> str:
    """Both specialists of a seed as `policy.teachers`, each with the prompts that it was trained on."""
    entries = ", ".join(
        f"{{lora: {folder}/{name}-s{seed}, prompts: [{', '.join(tasks)}]}}" for name, tasks in HALVES.items()
    )
    return f"[{entries}]"


@contextmanager
def one_step_an_image() -> Iterator[None]:
    """Draws the window of `sampler.sde_window_by: prompt` for every image by itself, which no setting does."""
    told, pieces, asked = paths.stochastic_steps, paths._drawn_at_once, dict[int, int]()

    def of_image(settings: Any, seed: int, iteration: int, image: int) -> tuple[int, ...]:
        low, high = settings.stochastic_range
        return (counter_integers(low, high, seed, "window of an image", iteration, image),)

    def drawn(config: Any, batch: Any, steps: tuple[int, ...], size: int) -> Iterator[tuple[range, tuple[int, ...]]]:
        for image in batch.own:
            yield range(image, image + 1), of_image(config.sampler, config.seed, batch.iteration, image)

    def in_turn(settings: Any, seed: int, iteration: int, *group: int) -> tuple[int, ...]:
        if not group:
            return told(settings, seed, iteration)
        asked[iteration] = asked.get(iteration, -1) + 1  # the images of an iteration, each asked for once, in order
        return of_image(settings, seed, iteration, asked[iteration])

    paths._drawn_at_once, paths.stochastic_steps = drawn, in_turn  # type: ignore[assignment]
    try:
        yield
    finally:
        paths._drawn_at_once, paths.stochastic_steps = pieces, told


def prepare(folder: Path) -> None:
    """The scenes to fine-tune on, and each half of the training prompts."""
    place, (scenes, lines) = resolve_path("asset:prompts/world_train.jsonl"), (folder / "scenes", list[str]())
    prompts, rng = read_prompts(place), np.random.default_rng(0)
    scenes.mkdir(parents=True, exist_ok=True)
    for i in spread(len(prompts), 200):
        Image.fromarray(draw_scene(random_scene(prompts[i].metadata, rng))).save(scenes / f"{i}.png")
        lines.append(json.dumps({"prompt": prompts[i].text, "image": f"{i}.png"}) + "\n")
    write_atomically(scenes / "images.jsonl", "".join(lines))
    rows = Path(place).read_text(encoding="utf-8").splitlines(keepends=True)
    for name, tasks in HALVES.items():
        write_atomically(folder / f"{name}.jsonl", "".join(row for row in rows if json.loads(row)["tag"] in tasks))


# ---- figures ---------------------------------------------------------------------------------------------------------


def images(run: RunData, metric: str, at: int | None = None) -> list[ScoreRow]:
    """The images of an evaluation, the last or that of iteration `at`, with their values."""
    rows = run.image_rows[max(run.image_rows) if at is None else at]
    if metric != BOTH:
        return score_rows(rows, metric)
    left, right = (score_rows(rows, f"{REWARD}{half}") for half in ("left", "right"))
    return [replace(one, value=one.value + other.value) for one, other in zip(left, right, strict=True)]


def wobble(run: RunData) -> float:
    """Standard deviation over iterations of the logarithm of the gradient's norm; NaN for fewer than two."""
    norms = [math.log(row["grad_norm"]) for row in run.train if row.get("grad_norm")]
    return stdev(norms) if len(norms) > 1 else math.nan


def numbers(found: Estimate) -> dict[str, Any]:
    """An estimate in JSON: interval over seeds and prompts, or seeds where there are no prompts, p over seeds, both
    uncorrected."""
    interval = found.interval if found.interval.known else found.seeds
    kept = (found.mean, interval.low, interval.high, found.p, found.detectable)
    return dict(zip(("mean", "low", "high", "p", "detectable"), kept, strict=True))


def over_seeds(values: Sequence[float]) -> Estimate:
    """The mean of one number a seed, with Student's interval over seeds."""
    column = np.array(values, dtype=np.float64)[:, None]
    return estimate_of({"": (column, np.zeros(1, dtype=np.int64))}, None, by_task=True)


def pair_of(first: Mapping[int, RunData], second: Mapping[int, RunData], metric: str) -> tuple[list[float], Estimate]:
    """The first side less the second: of each seed, and over seeds and prompts."""
    if metric == GRADIENT:
        seeds = [wobble(first[seed]) - wobble(second[seed]) for seed in first]
        return seeds, over_seeds(seeds)
    one, other = ({seed: images(side[seed], metric) for seed in first} for side in (first, second))
    by_task = metric == SCORE
    seeds = [crossed_difference({0: other[seed]}, {0: one[seed]}, by_task=by_task).mean for seed in first]
    return seeds, crossed_difference(other, one, by_task=by_task)


def recorded_pair(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[list[float], Estimate]:
    """The first side less the second, by the scores that their sides have of the same seeds."""
    one, other = (dict(zip(side["seeds"], side[SCORE]["each_seed"], strict=True)) for side in (first, second))
    seeds = [one[seed] - other[seed] for seed in one if seed in other]
    return seeds, over_seeds(seeds)


def side_of(by_seed: Mapping[int, RunData], metrics: Sequence[str], before: RunData | None) -> dict[str, Any]:
    """A side's own figures: what it spent, each seed's scores, and gains over the model `before` training."""
    runs = list(by_seed.values())
    last = [run.train[-1] for run in runs]
    found: dict[str, Any] = {
        "seeds": list(by_seed),
        "nfe": fmean(row["nfe/total"] for row in last),
        "commits": sorted({str(run.manifest.get("git_commit")) for run in runs}),
        "iterations": fmean(run.done for run in runs),
        "seconds": fmean(row["seconds/total"] for row in last),
        "wobble": [wobble(run) for run in runs],
        "drift": [run.evaluations[-1].get("eval/kl") for run in runs],
        "dead_groups": [fmean(row.get("zero_std_ratio", 0.0) for row in run.train) for run in runs],
    }
    if before is None and 0 in runs[0].image_rows:
        before = runs[0]
        found["curve"] = [[row["iteration"], row[SCORE]] for row in before.evaluations]
    for metric in metrics:
        by_task = metric == SCORE
        found[metric] = {"each_seed": [crossed_estimate([images(run, metric)], by_task=by_task).mean for run in runs]}
        if before is not None:
            sides = (
                dict.fromkeys(by_seed, images(before, metric, 0)),
                {seed: images(run, metric) for seed, run in by_seed.items()},
            )
            found[metric]["gain"] = numbers(crossed_difference(*sides, by_task=by_task))
    return found


def kept(folder: Path, before: RunData) -> dict[str, list[dict[str, float]]]:
    """Gains on each half's own tasks, seed by seed: of its specialist, the student and the joint training."""

    def of(run: RunData, tasks: Sequence[str], at: int | None = None) -> float:
        return fmean(fmean(row.value for row in images(run, SCORE, at) if row.task == task) for task in tasks)

    return {
        name: [
            {
                side: of(read_run(folder / f"{side}-s{seed}"), tasks) - of(before, tasks, 0)
                for side in (name, "student", "joint")
            }
            for seed in SEEDS
        ]
        for name, tasks in HALVES.items()
    }


def votes(folder: Path, name: str, seeds: Sequence[int], curve: Sequence[Sequence[float]] | None) -> dict[str, Any]:
    """The votes of a side's trainings, how many were wrong, and, if the first seed was watched, how many its score took
    to rise by `RISE`; null where it never did."""
    counted = [json.loads((folder / f"{name}-s{seed}.votes.json").read_text(encoding="utf-8")) for seed in seeds]
    if curve is None:
        return {"votes": counted}
    at, score = zip(*curve, strict=True)
    needed = cost_to_reach([16 * iteration for iteration in at], score, score[0] + RISE)
    return {"votes": counted, "votes_to_rise": needed if math.isfinite(needed) else None}


def beside(recorded: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """A side's recorded figures with those of the seeds that are on the disk."""
    old_seeds = recorded.get("seeds", SEEDS[: len(recorded[SCORE]["each_seed"])])
    old = {seed: (recorded, i) for i, seed in enumerate(old_seeds)}
    new = {seed: (found, i) for i, seed in enumerate(found["seeds"])}
    places = dict(sorted((old | new).items()))
    scores = {seed: side[SCORE]["each_seed"][i] for seed, (side, i) in places.items()}
    for seed in old:
        if not math.isclose(scores[seed], recorded[SCORE]["each_seed"][old[seed][1]]):
            raise SystemExit(f"seed {seed} has another score than was recorded: take its training off the disk")
    joined = {**recorded, **found, "seeds": list(places), "commits": sorted({*recorded["commits"], *found["commits"]})}
    for key in ("nfe", "iterations", "seconds"):
        joined[key] = fmean(side[key] for side, _ in places.values())
    for key in ("wobble", "drift", "dead_groups", "votes"):
        joined[key] = [side[key][i] for side, i in places.values()]
    if len(new) < len(places):
        start = joined["curve"][0][1]
        gained = over_seeds([score - start for score in scores.values()])
        joined[SCORE] = {"each_seed": list(scores.values()), "gain": numbers(gained)}
    return joined


def report(
    folder: Path, facts: dict[str, Any], out: Path, *, added: Sequence[str] = (), seeds: Sequence[int] = SEEDS
) -> None:
    """Writes the figures of what is finished; if parts are `added`, beside the pairs and the seeds of `out`."""
    done = {name: runs for name in SIDES if (runs := finished(folder, name))}
    screen, half = (
        read_run(place) if (place := folder / name).exists() else None
        for name in (f"screen-s{SCREEN_SEED}", f"summed-s{SEEDS[0]}")
    )
    earlier = json.loads(out.read_text(encoding="utf-8")) if added else dict[str, Any]()
    sides, pairs, effects = (dict(earlier.get(key, {})) for key in ("sides", "pairs", "effects"))
    for name, runs in done.items():
        halves, steps = name in PARTS["routes"], name.startswith("by_")  # these have images of their own
        voted = SIDES[name].flips is not None
        metrics = [BOTH, f"{REWARD}left", f"{REWARD}right"] if halves else [SCORE]
        side: dict[str, Any] = {"settings": " ".join(SIDES[name].words), "rated": SIDES[name].rated}
        side |= side_of(runs, metrics, half if halves else None if steps or voted else screen)
        if voted:
            side |= votes(folder, name, list(runs), side.get("curve"))
        sides[name] = beside(sides[name], side) if name in sides else side
    for name, (first, second, metric) in OUTCOMES.items():
        if done.keys() & {first, second} and sides.keys() >= {first, second}:
            one, other = done.get(first, {}), done.get(second, {})
            on_disk = one.keys() == other.keys() == {*sides[first]["seeds"], *sides[second]["seeds"]}
            each, found = pair_of(one, other, metric) if on_disk else recorded_pair(sides[first], sides[second])
            pairs[name] = {"sides": [first, second], "metric": metric, **numbers(found), "each_seed": each}
            effects[name] = {"per_seed": each}
    corrected = holm({name: pair["p"] for name, pair in pairs.items()})
    entry = {"parts": list(added), "seeds": list(seeds), **origin()}
    made = {"added": [*earlier.get("added", ()), entry]} if added else origin()
    written = (
        earlier
        | made
        | facts
        | {
            "seeds": earlier.get("seeds", list(seeds)),
            "common": " ".join(COMMON),
            "sides": sides,
            "pairs": {name: pair | {"holm": corrected[name]} for name, pair in pairs.items()},
            "effects": effects,
        }
    )
    if screen is not None and {"student", "joint", *HALVES} <= done.keys():
        written["kept"] = kept(folder, screen)
    write_atomically(out, json.dumps(written, indent=1) + "\n")


def screened(folder: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """Trains the two halves and the screen, and says what the screen found."""
    for seed in seeds:
        for name in PARTS["routes"]:
            first = seed == SEEDS[0] and name == "summed"
            train(folder, name, seed, more=["eval.initial=true"] if first else ())
    screen = train(folder, "nft_12", SCREEN_SEED, more=["eval.initial=true"])
    gained = screen.evaluations[-1][SCORE] - screen.evaluations[0][SCORE]
    rate = [RATE] if gained < NEEDED_GAIN else []
    return {"screen": {"seed": SCREEN_SEED, "gain": gained, "rate": rate or "as configured"}}


def main() -> None:
    """Trains what is not there, side by side and seed by seed, and writes the figures after each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--report-only", action="store_true", help="write the figures of what is finished, train nothing"
    )
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), help="train these alone, and add them to --out")
    parser.add_argument("--seeds", type=int, nargs="+", choices=SEEDS, default=SEEDS, help="train these alone")
    given = parser.parse_args()
    folder = given.runs.resolve()
    prepare(folder)
    facts = {} if given.parts else screened(folder, given.seeds)
    screen = facts["screen"] if facts else json.loads(given.out.read_text(encoding="utf-8"))["screen"]
    rate = screen["rate"] if isinstance(screen["rate"], list) else []
    for part in given.parts or [name for name in PARTS if name != "routes"]:
        for seed in () if given.report_only else given.seeds:
            for name in PARTS[part]:
                watched = SIDES[name].flips is not None and seed == SEEDS[0]
                train(folder, name, seed, rate=rate, more=WATCHED if watched else ())
        if not given.parts:
            report(folder, facts, given.out)
    if given.parts:
        report(folder, facts, given.out, added=given.parts, seeds=given.seeds)


if __name__ == "__main__":
    main()
