"""`flowrl sweep`: draws what is missing, then writes `sweep.json` and `sweep.html` and says what came out.

settings/<setting>/journal-<hash>.jsonl   one line per prompt; the hash is of all conditions, so that nothing mixes
settings/<setting>/images-<hash>/         the first image of the prompts that the page shows
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flowrl.comparing.sweep.sweep_draw import Judges, Model, draw_prompts, drift, load_features
from flowrl.comparing.sweep.sweep_prepare import Sweep, prepare
from flowrl.comparing.sweep.sweep_result import Results, as_json, columns_of, results_of, sentence
from flowrl.comparing.sweep.sweep_settings import Setting, trained_on
from flowrl.generation.journal import Journal
from flowrl.generation.models import fingerprint, load_source, schedule_of
from flowrl.generation.rlg import add_experts
from flowrl.generation.scorers import load_rewards, said_by
from flowrl.media.images import save_png
from flowrl.pages.sweep_figures import StripRows
from flowrl.pages.sweep_page import render
from flowrl.pipelines import stock_of
from flowrl.prompts.identity import contents
from flowrl.prompts.loading import Prompt, spread
from flowrl.rendering.terminal_text import COLUMNS, aligned, cut
from flowrl.rewards import Reward
from flowrl.runtime.files import locked, refuse_foreign, write_atomically
from flowrl.runtime.progress import Advance, progress
from flowrl.runtime.scrubbing import say as print

STRIP = 6  # prompts whose images the page shows
Journals = Mapping[Setting, Journal]


def run(parsed: argparse.Namespace) -> int:
    """Runs a sweep, or continues one.

    Returns:
        0, or 130 where it was stopped; the same command then resumes.

    Raises:
        ValueError: says what was given, what is allowed and what to change; nothing was overwritten.
    """
    asked = prepare(parsed)
    for name in ("sweep.json", "sweep.html"):
        refuse_foreign(asked.folder / name, own=(asked.folder / "settings").is_dir())
    judges, versions = load_judges(asked)
    with locked(asked.folder, "another sweep"), ExitStack() as stack:
        if fingerprint(base := replace(asked.source, lora=None)) is None:
            load_source(base, device="cpu")  # of a hub, whose commit is known once it was fetched
        shared = conditions(asked, versions)
        journals = {one: stack.enter_context(_journal(asked, one, shared, versions)) for one in asked.question.settings}
        distances = stack.enter_context(Journal(asked.folder / "settings" / "drift", shared))
        try:
            draw_missing(asked, judges, journals, distances)
        except KeyboardInterrupt:
            print("\nStopped. The same command resumes from here.", file=sys.stderr)
            return 130
        rows = {one: [journals[one].rows[key] for key in asked.rows] for one in asked.question.settings}
        results = results_of(
            {one: columns_of(rows[one], asked.question.measures) for one in rows}, asked.question.measures,
            evaluations={one: asked.evaluations(one) for one in rows}, notes=notes_of(asked),
            drifts={name: distances.rows[lora_hash(lora)]["distance"] for name, lora in asked.loras.items()},
        )  # fmt: skip
        command = shlex.join(["flowrl", *sys.argv[1:]]) if sys.argv[1:2] == ["sweep"] else ""
        page = render(results, rows=strip_of(asked, journals), facts=facts_of(asked, versions), command=command)
        write_atomically(asked.folder / "sweep.json", json.dumps(as_json(results), indent=1) + "\n")
        write_atomically(asked.folder / "sweep.html", page)
    print(summary(results))
    print(f"\nPage      {asked.folder / 'sweep.html'}\nNumbers   {asked.folder / 'sweep.json'}")
    return 0


# ---- conditions ------------------------------------------------------------------------------------------------------


def load_judges(asked: Sweep) -> tuple[Judges, dict[str, str]]:
    """Rewards and features, and the version of every reward.

    Raises:
        ValueError: a reward that needs what the prompts have not, or whose mean says nothing of a model.
    """
    question = asked.question
    loaded = load_rewards(question.specs, asked.device)
    measured = {measure.reward: loaded[measure.reward] for measure in question.measures}
    for name, reward in loaded.items():
        _check_reward(name, reward, asked.prompts, measured=name in measured)
    select = question.select
    judges = Judges(
        rewards=measured, features=load_features(asked.features, asked.device),
        select=None if select is None else loaded[select.reward], part=None if select is None else select.part,
    )  # fmt: skip
    return judges, {name: reward.version for name, reward in loaded.items()}


def _check_reward(name: str, reward: Reward, prompts: Sequence[Prompt], *, measured: bool) -> None:
    there = {
        "videos": False, "source_images": all(prompt.sources for prompt in prompts),
        "reference_images": all(prompt.references for prompt in prompts),
    }  # fmt: skip
    lacking = sorted(need for need in reward.needs if not there.get(need, True))
    if lacking:
        raise ValueError(
            f"reward {name!r} needs {', '.join(lacking)}: a sweep draws images, and sources and references come from "
            f"the prompts, all of which must name them. Take another reward, or other --prompts."
        )
    if reward.kind == "adversarial" or (measured and reward.kind in ("groupwise", "pairwise")):
        raise ValueError(
            f"reward {name!r} is {reward.kind}: its values compare images with each other, or it learns in a run, so "
            f"that a mean of it says nothing of a model. Take one that judges an image by itself."
        )


def conditions(asked: Sweep, versions: Mapping[str, str]) -> dict[str, Any]:
    """All that the values of every setting depend on."""
    source = asked.source
    texts = json.dumps([[row.noise_name, row.negative, row.metadata] for row in asked.prompts], sort_keys=True)
    images = [contents((*prompt.sources, *prompt.references)) for prompt in asked.prompts]
    options = [said_by(spec) for spec in asked.question.specs]
    # Each is left out where it says what is usual: sweeps of earlier versions, which had none of them, then go on.
    more = {
        "images": images if any(images) else None, "variant": source.variant,
        "quantize": None if source.quantize == "none" else source.quantize,
        "reward_options": options if any(options) else None,
    }  # fmt: skip
    return {
        "model": source.model, "weights": fingerprint(replace(source, lora=None)),
        "family": source.family, "options": source.options, "steps": source.num_steps, "grid": source.grid,
        "shift": source.shift, "training_size": source.training_size, "guidance": source.guidance_scale,
        "base_guidance": asked.base_guidance, "dtype": source.dtype,
        "max_sequence_length": source.max_sequence_length, "seed": asked.seed, "samples": asked.samples,
        "prompts": hashlib.sha256(texts.encode()).hexdigest()[:16], "features": asked.features,
        "rewards": {measure.reward: versions[measure.reward] for measure in asked.question.measures},
        **{part: value for part, value in more.items() if value},
    }  # fmt: skip


def lora_hash(lora: Path) -> str:
    """A short hash of a LoRA's weights and settings."""
    digest = hashlib.sha256()
    for path in sorted(lora.iterdir()):
        if path.suffix in (".safetensors", ".json"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _journal(asked: Sweep, setting: Setting, shared: Mapping[str, Any], versions: Mapping[str, str]) -> Journal:
    identity: dict[str, Any] = {"setting": setting.key, "lora": lora_hash(asked.loras[setting.run]), **shared}
    select = asked.question.select
    if setting.kind in ("best_of", "prune") and select is not None:
        identity |= {"select": select.name, "select_version": versions[select.reward]}
    return Journal(asked.folder / "settings" / setting.key, identity)


# ---- drawing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Settings that are drawn together, keys of the prompts they lack, and the cost of a prompt in that of a plain
    one."""

    settings: tuple[Setting, ...]
    missing: tuple[str, ...]
    cost: int


def jobs_of(asked: Sweep, journals: Journals) -> list[Job]:
    """All settings; best of N for several N at one scale takes one pass, over the candidates of the largest."""
    groups: dict[Any, list[Setting]] = {}
    for setting in asked.question.settings:
        groups.setdefault(("best_of", setting.scale) if setting.kind == "best_of" else setting, []).append(setting)
    plain = asked.evaluations(Setting(kind="rlg", scale=1.0))
    jobs, keys = [], tuple(asked.rows)
    for settings in groups.values():
        lacking = [one for one in settings if any(key not in journals[one].rows for key in keys)]
        chosen = tuple(lacking or settings)
        missing = tuple(key for key in keys if any(key not in journals[one].rows for one in chosen))
        cost = max(1, round(max(asked.evaluations(one) for one in chosen) / plain))
        jobs.append(Job(settings=chosen, missing=missing, cost=cost))
    return jobs


def draw_missing(asked: Sweep, judges: Judges, journals: Journals, distances: Journal) -> None:
    """Draws what no journal has, and measures the distances of tuned models from the base."""
    jobs = jobs_of(asked, journals)
    hashes = {name: lora_hash(lora) for name, lora in asked.loras.items()}
    unknown = [name for name, key in hashes.items() if key not in distances.rows]
    if not unknown and not any(job.missing for job in jobs):
        return
    total = sum(job.cost * len(asked.prompts) for job in jobs)
    done = total - sum(job.cost * len(job.missing) for job in jobs)
    model = load_model(asked)
    for name in unknown:
        distances.add(hashes[name], {"distance": drift(model, asked.prompts, asked.seed, name)})
    with progress("sweeping", total, done) as advance:
        for job in jobs:
            _draw(asked, model, judges, job, journals, advance)


def load_model(asked: Sweep) -> Model:
    """The base with all LoRAs beside each other."""
    source = asked.source
    pipeline = load_source(replace(source, lora=None), device=str(asked.device))
    names = add_experts(pipeline, list(asked.loras.values()), stock_of(source.family, source.model))
    return Model(
        pipeline=pipeline, adapters=dict(zip(asked.loras, names, strict=True)), guidance=source.guidance_scale,
        schedule=schedule_of(source, pipeline), base_guidance=asked.base_guidance,
        batch_size=asked.batch_size,
    )  # fmt: skip


def _draw(asked: Sweep, model: Model, judges: Judges, job: Job, journals: Journals, advance: Advance) -> None:
    prompts, keys = asked.rows, list(asked.rows)
    shown = {keys[place]: place for place, _ in strip_prompts(asked)}
    count = asked.samples * max(setting.plan.num_candidates for setting in job.settings)
    size = max(1, asked.batch_size // count)
    for start in range(0, len(job.missing), size):
        part = job.missing[start : start + size]
        listed = [prompts[key] for key in part]
        drawn = draw_prompts(model, judges, job.settings, listed, samples=asked.samples, seed=asked.seed)
        for setting, (images, rows) in drawn.items():
            journal = journals[setting]
            for key, row, image in zip(part, rows, images[:, 0], strict=True):
                if key in shown:
                    save_png(image, image_path(journal, shown[key]))
                if key not in journal.rows:
                    journal.add(key, row)
        for _ in range(job.cost * len(part)):
            advance(job.settings[-1].label)


# ---- what is shown ---------------------------------------------------------------------------------------------------


def strip_prompts(asked: Sweep) -> list[tuple[int, Prompt]]:
    """Prompts whose images are kept, evenly from all, with their places."""
    return [(place, asked.prompts[place]) for place in spread(len(asked.prompts), STRIP)]


def image_path(journal: Journal, place: int) -> Path:
    """File of a prompt's first image."""
    return journal.path.with_name(journal.path.stem.replace("journal", "images")) / f"{place:04d}.png"


def strip_of(asked: Sweep, journals: Journals) -> StripRows:
    """Images of the page: one row per prompt, one column per setting."""
    return [
        (prompt.text, [(setting, image_path(journal, place)) for setting, journal in journals.items()])
        for place, prompt in strip_prompts(asked)
    ]


def notes_of(asked: Sweep) -> list[str]:
    """What a reader of the scores should know."""
    notes = []
    rewards = [asdict(entry) for entry in asked.config.rewards] if asked.config is not None else []
    for measure in asked.question.measures:
        if measure.role == "heldout" and trained_on(rewards, measure):
            notes.append(f"{measure.name} is given as held out, but this run was trained on it.")
    scales = [setting.scale for setting in asked.question.settings if setting.kind == "rlg"]
    for scale, name in ((1.0, "the tuned model"), (0.0, "the base model")):
        if scale not in scales:
            notes.append(f"Scale {scale:g} was not drawn, so there are no differences to {name}.")
    return notes


def facts_of(asked: Sweep, versions: Mapping[str, str]) -> dict[str, str]:
    """How it was measured."""
    source = asked.source
    guidance = f"{source.guidance_scale:g}"
    if asked.base_guidance != source.guidance_scale:
        guidance += f", of the base model {asked.base_guidance:g}"
    facts = {
        "name": asked.name, "tuned model": str(source.lora), "base model": source.model,
        "images": f"{len(asked.prompts)} prompts, {asked.samples} images each, start noise of seed {asked.seed}",
        "sampling": f"{source.num_steps} deterministic steps, classifier-free guidance {guidance}, {source.dtype}",
        "features": asked.features,
    }  # fmt: skip
    facts |= {f"other run {name}": str(folder) for name, folder in asked.question.others}
    if asked.question.select is not None:
        facts["search goes by"] = asked.question.select.name
    return facts | {f"reward {name}": version for name, version in versions.items()}


def summary(results: Results) -> str:
    """The sentence, and one line per setting; 80 columns."""
    names = [results.target.name, *([results.judge.name] if results.held_out else []), results.diversity]
    rows = []
    for one in results.settings:
        means = [f"{one.means[name].mean:.{results.digits(name)}f}" for name in names]
        rows.append([one.setting.label, str(one.evaluations), *means])
    heads = [cut(name, 16) for name in names]
    return f"{textwrap.fill(sentence(results), COLUMNS)}\n\n{aligned(['setting', 'evaluations', *heads], rows)}"
