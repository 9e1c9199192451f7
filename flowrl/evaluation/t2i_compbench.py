"""T2I-CompBench: images under the names that its scripts read, the non-spatial score, and the scripts' results.

Draw the images, run the repository's own scripts on OUT/model/t2i_compbench/<category>, then call this again: it reads
and sums up their vqa_result.json. Prompts are a folder with `<category>_val.txt` files, or one of them. Six of the
eight categories need detectors, question or depth models of the benchmark's own and are scored by its scripts;
`non_spatial` is the cosine of CLIP ViT-B/32 (option `clip_model`), which is scored here. The overall needs all eight.

In the subject's folder: `t2i_compbench/<category>/samples/<prompt>_<number>.png`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.benchmarks import t2i_compbench
from flowrl.benchmarks.panels import distinct
from flowrl.config.strict_yaml import read_mapping
from flowrl.config.train import resolve_path
from flowrl.evaluation.benchmark import NO_TRAINING, Result, SideResult, result_of
from flowrl.evaluation.panel import Scorers
from flowrl.evaluation.runner import Rules, SubjectVerdicts
from flowrl.evaluation.summing import claim_of, lines_of, options_of, score_table
from flowrl.generation.folders import ImageFile
from flowrl.generation.generate import some
from flowrl.generation.layouts import put
from flowrl.generation.scorers import answers_of, load_scorers, score_images, scorer_specs, values_of
from flowrl.generation.subject import Settings, Subject
from flowrl.prompts.loading import Prompt, read_prompts
from flowrl.rendering.markup import number, plural
from flowrl.runtime.files import write_atomically
from flowrl.statistics.bootstrap import Interval
from flowrl.statistics.means import VERDICTS, Range, ends_of, mean_interval

FOLDER = "t2i_compbench"
NOTE = "Means over images; the overall is the mean of all eight. Intervals cover"
_CATEGORIES = read_mapping(Path(__file__).with_suffix(".yaml"))
FILES, RESULTS = ({name: row[key] for name, row in _CATEGORIES.items()} for key in ("prompts", "results"))
"""For each category, its file of prompts and its folder of results."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SceneOptions:
    """The benchmark's `options`."""

    clip_model: str = "openai/clip-vit-base-patch32"
    """CLIP model of `non_spatial`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScenePlan:
    """Prompts by category, and the scorer of `non_spatial`."""

    categories: Mapping[str, Sequence[str]]
    spec: Mapping[str, Any]

    @property
    def prompts(self) -> list[str]:
        """Each prompt once; categories share some."""
        return distinct([prompt for listed in self.categories.values() for prompt in listed])


Scores = Mapping[str, Mapping[int, float]]
"""Scores by category and number of the image in it."""


def plan_of(settings: Settings) -> ScenePlan:
    """Reads prompts and options."""
    if settings.judge is not None or settings.subject.images is not None:
        raise ValueError(
            "t2i_compbench draws images for the benchmark's own scripts, so `judge` and `images` have no place: run "
            "the scripts on the folders that it writes, then call once more."
        )
    categories = read_categories(settings)
    for prompts in categories.values():
        for place, prompt in enumerate(prompts):
            t2i_compbench.file_name(prompt, place)
    (spec,) = scorer_specs("clip_score", {"model": options_of(settings, SceneOptions).clip_model})
    return ScenePlan(categories=categories, spec=spec)


def read_categories(settings: Settings) -> dict[str, list[str]]:
    """Prompts by category."""
    if settings.prompts is None:
        raise ValueError(
            "t2i_compbench needs `prompts`: the folder examples/dataset of the repository Karine-Huang/T2I-CompBench, "
            f"or one of its files ({', '.join(FILES.values())})."
        )
    place = resolve_path(settings.prompts)
    files = (
        {name: place / file for name, file in FILES.items()}
        if place.is_dir()
        else {name: place for name, file in FILES.items() if file == place.name}
    )
    found = {
        name: distinct([p.text.strip().rstrip(".") for p in read_prompts(file)])
        for name, file in files.items()
        if file.is_file()
    }
    if not found:
        raise ValueError(f"{place} is, or holds, none of {', '.join(FILES.values())}: the names say the category.")
    return {name: some(listed, settings.num_prompts) for name, listed in found.items()}


def images_by_category(plan: ScenePlan, images: Sequence[ImageFile]) -> dict[str, list[ImageFile]]:
    """Images by category, numbered within it."""
    drawn: dict[str, list[ImageFile]] = {}
    for image in images:
        drawn.setdefault(image.prompt, []).append(image)
    return {name: [image for prompt in listed for image in drawn[prompt]] for name, listed in plan.categories.items()}


def place(subject: Subject, plan: ScenePlan, images: list[ImageFile]) -> list[ImageFile]:
    """Puts images under the names of the benchmark."""
    for category, listed in images_by_category(plan, images).items():
        names = [t2i_compbench.file_name(image.prompt, number) for number, image in enumerate(listed)]
        put(listed, subject.folder / FOLDER / category / "samples", names)
    return images


def ask(settings: Settings, plan: ScenePlan, scorers: Scorers, subject: Subject, images: Sequence[ImageFile]) -> Scores:
    """Scores what it can here, and reads the scripts' results."""
    placed = images_by_category(plan, images)
    for name, reward in scorers.items():
        listed = placed["non_spatial"]
        with answers_of(FOLDER, name, reward, plan.spec, subject.folder) as journal:
            rows = score_images(name, reward, listed, journal, batch_size=settings.batch_size, label="scoring")
        scores = {place: float(value) for place, value in enumerate(values_of(rows)) if value == value}
        target = subject.folder / FOLDER / "non_spatial" / RESULTS["non_spatial"]
        target.mkdir(parents=True, exist_ok=True)
        write_atomically(target / "vqa_result.json", t2i_compbench.results_text(scores))
    found = {}
    for category, listed in placed.items():
        files = sorted((subject.folder / FOLDER / category).rglob(f"{RESULTS[category]}/vqa_result.json"))
        if not files:
            continue
        scores = t2i_compbench.read_results(files[0])
        strange = [place for place in scores if not 0 <= place < len(listed)]
        if strange or (len(scores) < len(listed) and category != "non_spatial"):
            raise ValueError(
                f"{files[0]} has {len(scores)} scores for {len(listed)} images: it belongs to another set of "
                f"images; delete it and run the script again."
            )
        found[category] = scores
    return found


def result(settings: Settings, plan: ScenePlan, scorers: Scorers, parts: Sequence[SubjectVerdicts[Scores]]) -> Result:
    """Means of the categories that have scores, and the overall if all have."""
    sides, placed = [_side(plan, part) for part in parts], images_by_category(plan, parts[0].images)
    found, changes = sides[0].intervals, _changes(placed, [part.found for part in parts])
    total = sides[0].metrics.get("overall")
    told = f"overall {number(total, 2)} (x 100)" if total is not None else f"{len(found)} of 8 categories scored"
    waiting = [name for name in placed if name not in found]
    notes = [f"Waiting for the benchmark's own scripts: {', '.join(waiting)}."] if waiting else []
    if settings.samples != t2i_compbench.IMAGES_PER_PROMPT:
        notes.append(
            f"{settings.samples} images of each prompt, the published number is {t2i_compbench.IMAGES_PER_PROMPT}."
        )
    spoken, lines = claim_of(placed), lines_of([side.intervals for side in sides], changes)
    count = len({row["file"] for row in sides[0].rows})
    return result_of(
        settings.benchmark,
        f"T2I-CompBench: {told} for {parts[0].label}, {plural(count, 'image')}.",
        sides if changes else sides[:1],
        changes=changes,
        claim=spoken + NO_TRAINING,
        notes=notes,
        tables=(score_table([part.label for part in parts], lines, note=f"{NOTE} {spoken}."),),
        facts={"folder": str(parts[0].subject.folder / FOLDER), "clip_model": plan.spec["options"]["model"]},
    )


def _side(plan: ScenePlan, part: SubjectVerdicts[Scores]) -> SideResult:
    scores, placed = part.found, images_by_category(plan, part.images)
    found = {name: _interval(scores[name], placed[name]) for name in t2i_compbench.CATEGORIES if name in scores}
    means = {name: interval.mean for name, interval in found.items()}
    rows = [
        {"file": image.file, "index": image.index, "sample": image.sample, "prompt": image.prompt, "task": category,
         "number": place, "score": scores.get(category, {}).get(place)}
        for category, images in placed.items() for place, image in enumerate(images)
    ]  # fmt: skip
    whole = {"overall": t2i_compbench.overall(means)} if set(means) == set(t2i_compbench.CATEGORIES) else {}
    return SideResult(rows=rows, metrics=means | whole, intervals=found)


def _changes(placed: Mapping[str, Sequence[ImageFile]], scores: Sequence[Scores]) -> dict[str, Interval]:
    """Subject minus base for every category that both have."""
    changes = {}
    for name in t2i_compbench.CATEGORIES if len(scores) > 1 else ():
        if all(name in of for of in scores):
            both = [place for place in scores[0][name] if place in scores[1][name]]
            subject, base = ([of[name][place] for place in both] for of in scores)
            pairs = {place: after - before for place, after, before in zip(both, subject, base, strict=True)}
            changes[name] = _interval(pairs, placed[name], ends_of(subject, base, changes=True))
    return changes


def _interval(scores: Mapping[int, float], images: Sequence[ImageFile], ends: Range | None = VERDICTS) -> Interval:
    """An interval over prompts; over images if a category has a single prompt."""
    prompts = [image.prompt for image in images]
    units = [prompts[place] for place in scores] if len(set(prompts)) > 1 else None
    return mean_interval(list(scores.values()), units, ends=ends)


RULES: Rules[ScenePlan, Scorers, Scores] = Rules(
    plan=plan_of,
    prompts=lambda settings, subject, plan: [Prompt(text=prompt, metadata={}) for prompt in plan.prompts],
    place=place,
    judge=lambda settings, plan: load_scorers([plan.spec], settings.device) if "non_spatial" in plan.categories else {},
    ask=ask,
    result=result,
)
