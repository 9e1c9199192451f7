"""Measures a tuned model at many guidance scales, and searches of equal cost; writes `sweep.json` and the page.

settings/<setting>/journal-<hash>.jsonl   one line per prompt; the hash is of all conditions, so that nothing mixes
settings/<setting>/images-<hash>/         the first image of the prompts that the page shows
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flowrl.comparing.sweep.sweep_draw import Judges, TunedModels, draw_prompts, drift, load_features
from flowrl.comparing.sweep.sweep_result import Sweep, as_json, columns_of, results_of
from flowrl.comparing.sweep.sweep_settings import (
    Setting,
    StripRows,
    SweepPlan,
    ask,
    check_cache,
    check_other,
    config_of,
    spread_prompts,
    trained_on,
    tuned_source,
)
from flowrl.config.bounds import IMAGES, check_counts
from flowrl.generation.drawing import find_device
from flowrl.generation.models import (
    WORLD_MODELS,
    Model,
    Words,
    fingerprint,
    label_of,
    load_source,
    place_of,
    schedule_of,
)
from flowrl.generation.rlg import Numbers, add_experts
from flowrl.generation.sampling_options import SamplingOptions, check_guidance
from flowrl.generation.scorers import load_rewards, said_by
from flowrl.media.images import save_png
from flowrl.pipelines import stock_of
from flowrl.prompts.identity import contents
from flowrl.prompts.loading import Prompt, spread
from flowrl.rewards import Reward
from flowrl.runtime.call import call_words
from flowrl.runtime.digests import text_digest
from flowrl.runtime.files import locked, refuse_foreign, write_atomically
from flowrl.runtime.journal import Journal
from flowrl.runtime.progress import Advance, progress
from flowrl.runtime.public import public

STRIP = 6  # prompts whose images the page shows
Journals = Mapping[Setting, Journal]
Page = Callable[..., object]


@public
def sweep(
    model: Model,
    *,
    base: str | None = None,
    rlg: Numbers = "0,0.5,1,1.5,2,3",
    best_of: Numbers | None = None,
    prune: str | Sequence[str] = (),
    keep: float = 0.5,
    select: str | None = None,
    search_rlg: Numbers = "1",
    also: Words = (),
    prompts: str | Path | None = None,
    num_prompts: int = 64,
    samples: int = 4,
    rewards: str | None = None,
    options: Mapping[str, object] | Sequence[str] = (),
    features: str | None = None,
    out: str | Path | None = None,
    steps: int | None = None,
    guidance: float | None = None,
    base_guidance: float | None = None,
    height: int | None = None,
    width: int | None = None,
    dtype: str | None = None,
    max_sequence_length: int | None = None,
    first_block_cache: float | None = None,
    seed: int = 0,
    batch_size: int = 24,
    device: str | None = None,
    show: bool = True,
    page: Page | None = None,
) -> Sweep:
    """Measures a tuned model at several guidance scales. Call this again to continue where it stopped.

    Args:
        model: run folder or what `train` returned, or a LoRA folder.
        base: base model: a folder, hub id or `asset:NAME`; None is the run's.
        rlg: scales: 0 is the base, 1 the tuned model, beyond 1 further, below 0 away.
        best_of: numbers of images to choose from, such as "2,4,8".
        prune: searches that prune N images after some steps, such as "8@3,6".
        keep: the share of images that each pruning keeps.
        select: the reward by which a search chooses, NAME[:PART]; None is the first target.
        search_rlg: scales at which a search draws.
        also: other tuned models of the same base, drawn at scale 1.
        prompts: file of prompts, or `asset:NAME`; None takes the run's held-out prompts.
        num_prompts: how many prompts to take, spread evenly over the file.
        samples: images per prompt.
        rewards: rewards by role, "target=NAME[:PART],heldout=NAME[:PART]"; None takes those of the embedded models.
        options: options of rewards, as {"NAME.KEY": value} or "NAME.KEY=VALUE" texts.
        features: what diversity compares besides pixels: "attributes", "clip", "dinov2" or "none".
        out: folder to write; None is `RUN/sweep` or `sweep-LORA`.
        steps, guidance, height, width, dtype, max_sequence_length, first_block_cache: how to sample the model
            (`SamplingOptions`); the cache takes scales 0 and 1, and no `prune`.
        base_guidance: guidance scale of the base model; None is that of the tuned model.
        seed: the seed of the start noise.
        batch_size: images drawn at once.
        device: "cpu", "cuda" or "cuda:N".
        show: show progress.
        page: writes `sweep.html`; see `flowrl.pages.sweep_page.write_page`.

    Raises:
        ValueError: an argument is wrong; nothing was overwritten.
    """
    sampling = SamplingOptions(
        steps=steps, guidance=guidance, height=height, width=width, dtype=dtype,
        max_sequence_length=max_sequence_length, first_block_cache=first_block_cache,
    )  # fmt: skip
    check_counts(IMAGES, batch_size=batch_size)
    check_guidance(base_guidance=base_guidance)
    where, folder = find_device(device), Path(place_of(model))
    config = config_of(folder)
    source = tuned_source(folder, base, sampling, config)
    embedded = source.model in WORLD_MODELS
    question = ask(
        rlg=rlg, best_of=best_of, prune=prune, keep=keep, select=select, search_rlg=search_rlg, also=also,
        rewards=rewards, options=options, samples=samples, num_prompts=num_prompts, embedded=embedded,
        num_steps=source.num_steps,
    )  # fmt: skip
    check_cache(question.settings, source.first_block_cache)
    for name, other in question.others:
        check_other(name, other, source)
    name = label_of(str(folder.resolve()))
    asked = SweepPlan(
        question=question, source=source, config=config, name=name, seed=seed, samples=samples,
        prompts=spread_prompts(prompts, num_prompts, config, negative=source.negative, embedded=embedded),
        batch_size=batch_size, base_guidance=source.guidance_scale if base_guidance is None else base_guidance,
        features=features or ("attributes" if embedded else "clip"), device=where,
        folder=Path(out or (folder / "sweep" if (folder / "config.yaml").is_file() else f"sweep-{name}")),
    )  # fmt: skip
    return carry_out(asked, page)


def carry_out(asked: SweepPlan, page: Page | None) -> Sweep:
    """Draws missing images, and writes the numbers and the page.

    Raises:
        ValueError: the folder has a file that no sweep wrote, or a reward cannot judge these images.
        KeyboardInterrupt: you stopped it; the drawn images are kept.
    """
    for name in ("sweep.json", "sweep.html"):
        refuse_foreign(asked.folder / name, own=(asked.folder / "settings").is_dir(), flag="`out`")
    judges, versions = load_judges(asked)
    with locked(asked.folder, "another sweep"), ExitStack() as stack:
        if fingerprint(base := replace(asked.source, lora=None)) is None:
            load_source(base, device="cpu")  # of a hub, whose commit is known once it was fetched
        shared = conditions(asked, versions)
        journals = {}
        for one in asked.question.settings:
            identity = {"setting": one.key, "lora": lora_hash(asked.loras[one.run]), **shared}
            if one.kind in ("best_of", "prune") and (select := asked.question.select) is not None:
                identity |= {"select": select.name, "select_version": versions[select.reward]}
            journals[one] = stack.enter_context(Journal(asked.folder / "settings" / one.key, identity))
        distances = stack.enter_context(Journal(asked.folder / "settings" / "drift", shared))
        try:
            draw_missing(asked, judges, journals, distances)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("Stopped. The same command resumes from here.") from None
        rows = {one: [journals[one].rows[key] for key in asked.rows] for one in asked.question.settings}
        results = results_of(
            {one: columns_of(rows[one], asked.question.measures) for one in rows},
            asked.question.measures,
            evaluations={one: asked.evaluations(one) for one in rows},
            notes=notes_of(asked),
            drifts={name: distances.rows[lora_hash(lora)]["distance"] for name, lora in asked.loras.items()},
            folder=asked.folder,
        )
        write_atomically(asked.folder / "sweep.json", json.dumps(as_json(results), indent=1) + "\n")
        if page is not None:
            rows_shown: StripRows = [
                (prompt.text, [(setting, image_path(journal, place)) for setting, journal in journals.items()])
                for place, prompt in strip_prompts(asked)
            ]
            page(results, rows=rows_shown, facts=facts_of(asked, versions), command=call_words())
    return results


# ---- conditions ------------------------------------------------------------------------------------------------------


def load_judges(asked: SweepPlan) -> tuple[Judges, dict[str, str]]:
    """Loads rewards and features, and the version of every reward. Raises ValueError: a reward needs what the prompts
    lack, or its mean says nothing about a model."""
    question = asked.question
    loaded = load_rewards(question.specs, asked.device)
    measured = {measure.reward: loaded[measure.reward] for measure in question.measures}
    for name, reward in loaded.items():
        _check_reward(name, reward, asked.prompts, measured=name in measured)
    select = question.select
    judges = Judges(
        rewards=measured,
        features=load_features(asked.features, asked.device),
        select=None if select is None else loaded[select.reward],
        part=None if select is None else select.part,
    )
    return judges, {name: reward.version for name, reward in loaded.items()}


def _check_reward(name: str, reward: Reward, prompts: Sequence[Prompt], *, measured: bool) -> None:
    there = {
        "videos": False,
        "source_images": all(prompt.sources for prompt in prompts),
        "reference_images": all(prompt.references for prompt in prompts),
    }
    lacking = sorted(need for need in reward.needs if not there.get(need, True))
    if lacking:
        raise ValueError(
            f"reward {name!r} needs {', '.join(lacking)}: a sweep draws images, and sources and references come from "
            f"the prompts, all of which must name them. Take another reward, or other `prompts`."
        )
    if reward.kind == "adversarial" or (measured and reward.kind in ("groupwise", "pairwise")):
        raise ValueError(
            f"reward {name!r} is {reward.kind}: its values compare images with each other, or it learns in a run, so "
            f"that a mean of it says nothing of a model. Take one that judges an image by itself."
        )


def conditions(asked: SweepPlan, versions: Mapping[str, str]) -> dict[str, Any]:
    """All conditions that affect the values of every setting."""
    source = asked.source
    texts = json.dumps([[row.noise_name, row.negative, row.metadata] for row in asked.prompts], sort_keys=True)
    images = [contents((*prompt.sources, *prompt.references)) for prompt in asked.prompts]
    options = [said_by(spec) for spec in asked.question.specs]
    # Each is left out where it says what is usual: sweeps of earlier versions, which had none of them, then go on.
    more = {
        "images": images if any(images) else None,
        "variant": source.variant,
        "quantize": None if source.quantize == "none" else source.quantize,
        "first_block_cache": source.first_block_cache,
        "reward_options": options if any(options) else None,
    }
    return {
        "model": source.model, "weights": fingerprint(replace(source, lora=None)),
        "family": source.family, "options": source.options, "steps": source.num_steps, "grid": source.grid,
        "shift": source.shift, "training_size": source.training_size, "guidance": source.guidance_scale,
        "base_guidance": asked.base_guidance, "dtype": source.dtype,
        "max_sequence_length": source.max_sequence_length, "seed": asked.seed, "samples": asked.samples,
        "prompts": text_digest(texts), "features": asked.features,
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


# ---- drawing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepJob:
    """Settings that are drawn together, keys of missing prompts, and the cost of a prompt relative to a plain one."""

    settings: tuple[Setting, ...]
    missing: tuple[str, ...]
    cost: int


def jobs_of(asked: SweepPlan, journals: Journals) -> list[SweepJob]:
    """Jobs for all settings. Best of N for several N at one scale is one job over the candidates of the largest N."""
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
        jobs.append(SweepJob(settings=chosen, missing=missing, cost=cost))
    return jobs


def draw_missing(asked: SweepPlan, judges: Judges, journals: Journals, distances: Journal) -> None:
    """Draws all images that no journal has, and measures the distances of tuned models from the base."""
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


def load_model(asked: SweepPlan) -> TunedModels:
    """Loads the base with all LoRAs side by side."""
    source = asked.source
    pipeline = load_source(replace(source, lora=None), device=str(asked.device))
    names = add_experts(pipeline, list(asked.loras.values()), stock_of(source.family, source.model))
    return TunedModels(
        pipeline=pipeline,
        adapters=dict(zip(asked.loras, names, strict=True)),
        guidance=source.guidance_scale,
        schedule=schedule_of(source, pipeline),
        base_guidance=asked.base_guidance,
        batch_size=asked.batch_size,
        cache=source.first_block_cache,
    )


def _draw(
    asked: SweepPlan, model: TunedModels, judges: Judges, job: SweepJob, journals: Journals, advance: Advance
) -> None:
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


def strip_prompts(asked: SweepPlan) -> list[tuple[int, Prompt]]:
    """Prompts whose images are kept, spread evenly over all, with their positions."""
    return [(place, asked.prompts[place]) for place in spread(len(asked.prompts), STRIP)]


def image_path(journal: Journal, place: int) -> Path:
    """File of a prompt's first image."""
    return journal.path.with_name(journal.path.stem.replace("journal", "images")) / f"{place:04d}.png"


def notes_of(asked: SweepPlan) -> list[str]:
    """Notes that you need to read the scores."""
    notes = []
    rewards = [asdict(entry) for entry in asked.config.rewards] if asked.config is not None else []
    for measure in asked.question.measures:
        if measure.role == "heldout" and trained_on(rewards, measure):
            notes.append(f"{measure.name} is given as held out, but this run was trained on it.")
    scales = [setting.scale for setting in asked.question.settings if setting.kind == "rlg"]
    for scale, name in ((1.0, "the tuned model"), (0.0, "the base model")):
        if scale not in scales:
            notes.append(f"Scale {scale:g} was not drawn, so there are no differences to {name}.")
    if cache := asked.source.first_block_cache:
        notes.append(f"Drawn with First-Block Cache {cache:g}, which leaves blocks out; an evaluation counts whole.")
    return notes


def facts_of(asked: SweepPlan, versions: Mapping[str, str]) -> dict[str, str]:
    """Facts about how the sweep was measured."""
    source = asked.source
    guidance = f"{source.guidance_scale:g}"
    if asked.base_guidance != source.guidance_scale:
        guidance += f", of the base model {asked.base_guidance:g}"
    facts = {
        "name": asked.name,
        "tuned model": str(source.lora),
        "base model": source.model,
        "images": f"{len(asked.prompts)} prompts, {asked.samples} images each, start noise of seed {asked.seed}",
        "sampling": f"{source.num_steps} deterministic steps, classifier-free guidance {guidance}, {source.dtype}",
        "features": asked.features,
    }
    facts |= {f"other run {name}": str(folder) for name, folder in asked.question.others}
    if asked.question.select is not None:
        facts["search goes by"] = asked.question.select.name
    return facts | {f"reward {name}": version for name, version in versions.items()}
