"""T2I-CompBench: images under the names that its scripts read, the non-spatial score, and what the scripts found.

    flowrl eval MODEL --benchmark t2i_compbench --prompts T2I-CompBench/examples/dataset --samples 10
    ... run the repository's own scripts on OUT/model/t2i_compbench/<category> ...
    the same command once more: reads their vqa_result.json and sums up

--prompts is a folder with `<category>_val.txt` files, or one of them. Six of the eight categories need detectors,
question or depth models of the benchmark's own and are scored by its scripts; `non_spatial` is the cosine of CLIP
ViT-B/32 (option `clip_model`), which is scored here. The overall is given where all eight are known.

In the subject's folder: `t2i_compbench/<category>/samples/<prompt>_<number>.png`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrl.benchmarks.panels import distinct
from flowrl.benchmarks.t2i_compbench import (
    CATEGORIES,
    IMAGES_PER_PROMPT,
    file_name,
    overall,
    read_results,
    results_text,
)
from flowrl.config.train import resolve_path
from flowrl.evaluation.benchmark import NO_TRAINING, Result
from flowrl.evaluation.runner_parts import Line, claim_of, metrics_of, options_of, score_table
from flowrl.generation.folders import ImageFile
from flowrl.generation.generate import images_of, some
from flowrl.generation.layouts import put
from flowrl.generation.scorers import answers_of, load_scorers, score_images, scorer_specs, values_of
from flowrl.generation.subject import Settings, Subject
from flowrl.prompts.loading import Prompt, read_prompts
from flowrl.rendering.markup import number, plural
from flowrl.runtime.files import write_atomically
from flowrl.statistics.bootstrap import Interval
from flowrl.statistics.means import VERDICTS, Ends, ends_of, mean_interval

FOLDER = "t2i_compbench"
NOTE = "Means over images; the overall is the mean of all eight. Intervals speak of"
FILES = {
    "color": "color_val.txt", "shape": "shape_val.txt", "texture": "texture_val.txt", "2d_spatial": "spatial_val.txt",
    "3d_spatial": "3d_spatial_val.txt", "numeracy": "numeracy_val.txt", "non_spatial": "non_spatial_val.txt",
    "complex": "complex_val.txt",
}  # fmt: skip
RESULTS = {
    "color": "annotation_blip", "shape": "annotation_blip", "texture": "annotation_blip",
    "2d_spatial": "annotation_obj_detection_2d", "3d_spatial": "annotation_obj_detection_3d",
    "numeracy": "annotation_num", "non_spatial": "annotation_clip", "complex": "annotation_3_in_1",
}  # fmt: skip
"""Folder, at any depth below a category's, in which the repository's script for it writes vqa_result.json."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What `--option` sets."""

    clip_model: str = "openai/clip-vit-base-patch32"
    """CLIP model of `non_spatial`."""


def check(settings: Settings) -> None:
    """Refuses what can be known to be wrong before weights load."""
    if settings.judge is not None or settings.subject.images is not None:
        raise ValueError(
            "t2i_compbench draws images for the benchmark's own scripts, so --judge and --images have no place: run "
            "the scripts on the folders that it writes, then this command once more."
        )
    for prompts in read_categories(settings).values():
        for place, prompt in enumerate(prompts):
            file_name(prompt, place)
    _specs(settings)


def run(settings: Settings) -> Result:
    """Draws, puts images under their names, scores what can be scored here, and reads what the scripts found."""
    categories = read_categories(settings)
    subjects = settings.subjects
    placed = [_placed(settings, subject, categories) for subject in subjects]
    if "non_spatial" in categories:
        (spec,) = _specs(settings)
        ((name, reward),) = load_scorers([spec], settings.device).items()
        for subject, of_subject in zip(subjects, placed, strict=True):
            images = of_subject["non_spatial"]
            with answers_of(FOLDER, name, reward, spec, subject.folder) as journal:
                rows = score_images(name, reward, images, journal, batch_size=settings.batch_size, label="scoring")
            scores = {place: float(value) for place, value in enumerate(values_of(rows)) if value == value}
            target = subject.folder / FOLDER / "non_spatial" / RESULTS["non_spatial"]
            target.mkdir(parents=True, exist_ok=True)
            write_atomically(target / "vqa_result.json", results_text(scores))
    scores_of = [_scores(subject.folder, of_subject) for subject, of_subject in zip(subjects, placed, strict=True)]
    return _result(settings, subjects, placed, scores_of)


def read_categories(settings: Settings) -> dict[str, list[str]]:
    """Prompts by category.

    Raises:
        ValueError: no --prompts, or none of the known files there.
    """
    if settings.prompts is None:
        raise ValueError(
            "t2i_compbench needs --prompts: the folder examples/dataset of the repository Karine-Huang/T2I-CompBench, "
            f"or one of its files ({', '.join(FILES.values())})."
        )
    place = resolve_path(settings.prompts)
    files = {name: place / file for name, file in FILES.items()} if place.is_dir() else {
        name: place for name, file in FILES.items() if file == place.name
    }  # fmt: skip
    found = {name: distinct([_plain(p.text) for p in read_prompts(file)]) for name, file in files.items()
             if file.is_file()}  # fmt: skip
    if not found:
        raise ValueError(f"{place} is, or holds, none of {', '.join(FILES.values())}: the names say the category.")
    return {name: some(listed, settings.num_prompts) for name, listed in found.items()}


def _plain(prompt: str) -> str:
    return prompt.strip().rstrip(".")


def _specs(settings: Settings) -> list[dict[str, object]]:
    return scorer_specs("clip_score", {"model": options_of(settings, Options).clip_model})


def _placed(
    settings: Settings, subject: Subject, categories: Mapping[str, Sequence[str]]
) -> dict[str, list[ImageFile]]:
    """Images by category under the names of the benchmark, numbered over the category."""
    prompts = distinct([prompt for listed in categories.values() for prompt in listed])
    drawn: dict[str, list[ImageFile]] = {}
    for image in images_of(settings, subject, [Prompt(text=prompt, metadata={}) for prompt in prompts]):
        drawn.setdefault(image.prompt, []).append(image)
    placed = {}
    for category, listed in categories.items():
        images = [image for prompt in listed for image in drawn[prompt]]
        names = [file_name(image.prompt, place) for place, image in enumerate(images)]
        put(images, subject.folder / FOLDER / category / "samples", names)
        placed[category] = images
    return placed


def _scores(folder: Path, placed: Mapping[str, Sequence[ImageFile]]) -> dict[str, dict[int, float]]:
    """Scores by category and number, of the categories that have a result file."""
    found = {}
    for category, images in placed.items():
        files = sorted((folder / FOLDER / category).rglob(f"{RESULTS[category]}/vqa_result.json"))
        if not files:
            continue
        scores = read_results(files[0])
        strange = [place for place in scores if not 0 <= place < len(images)]
        if strange or (len(scores) < len(images) and category != "non_spatial"):
            raise ValueError(
                f"{files[0]} has {len(scores)} scores for {len(images)} images: it belongs to another set of "
                f"images; delete it and run the script again."
            )
        found[category] = scores
    return found


def _result(
    settings: Settings, subjects: Sequence[Subject], placed: Sequence[Mapping[str, Sequence[ImageFile]]],
    scores: Sequence[Mapping[str, Mapping[int, float]]],
) -> Result:  # fmt: skip
    found = [
        {name: _interval(of[name], images[name]) for name in CATEGORIES if name in of}
        for of, images in zip(scores, placed, strict=True)
    ]
    metrics = [_metrics(part) for part in found]
    change = {}
    if len(found) > 1:
        for name in (name for name in found[0] if name in found[1]):
            both = [place for place in scores[0][name] if place in scores[1][name]]
            pairs = {place: scores[0][name][place] - scores[1][name][place] for place in both}
            sides = ([of[name][place] for place in both] for of in scores)
            change[name] = _interval(pairs, placed[0][name], ends_of(*sides, changes=True))
    waiting = [name for name in placed[0] if name not in found[0]]
    total = metrics[0].get("eval/t2i_compbench/overall")
    count = len({image.file for images in placed[0].values() for image in images})
    told = f"overall {number(total, 2)} (x 100)" if total is not None else f"{len(found[0])} of 8 categories scored"
    notes = [f"Waiting for the benchmark's own scripts: {', '.join(waiting)}."] if waiting else []
    if settings.samples != IMAGES_PER_PROMPT:
        notes.append(f"{settings.samples} images of each prompt, the published number is {IMAGES_PER_PROMPT}.")
    spoken = claim_of(placed[0])
    return Result(
        headline=f"T2I-CompBench: {told} for {subjects[0].label}, {plural(count, 'image')}.",
        rows=tuple(_rows(placed[0], scores[0])), base_rows=tuple(_rows(placed[1], scores[1])) if change else (),
        metrics=metrics[0], base_metrics=metrics[1] if change else {}, intervals=found[0],
        base_intervals=found[1] if change else {}, differences=change, claim=spoken + NO_TRAINING,
        tables=(score_table([subject.label for subject in subjects], _lines(found, change), note=f"{NOTE} {spoken}."),),
        notes=tuple(notes),
        facts={"folder": str(subjects[0].folder / FOLDER),
               "clip_model": options_of(settings, Options).clip_model},
    )  # fmt: skip


def _interval(scores: Mapping[int, float], images: Sequence[ImageFile], ends: Ends | None = VERDICTS) -> Interval:
    """Over prompts; of a category of a single prompt over its images."""
    prompts = [image.prompt for image in images]
    units = [prompts[place] for place in scores] if len(set(prompts)) > 1 else None
    return mean_interval(list(scores.values()), units, ends=ends)


def _metrics(found: Mapping[str, Interval]) -> dict[str, float]:
    means = {name: interval.mean for name, interval in found.items()}
    return metrics_of("t2i_compbench", means | ({"overall": overall(means)} if set(found) == set(CATEGORIES) else {}))


def _lines(found: Sequence[Mapping[str, Interval]], change: Mapping[str, Interval]) -> list[Line]:
    """Scores that all subjects have, by name."""
    names = [name for name in found[0] if all(name in part for part in found)]
    return [(name, [part[name] for part in found], change.get(name)) for name in names]


def _rows(
    placed: Mapping[str, Sequence[ImageFile]], scores: Mapping[str, Mapping[int, float]]
) -> list[dict[str, object]]:
    return [
        {"file": image.file, "index": image.index, "sample": image.sample, "prompt": image.prompt,
         "task": category, "number": place, "score": scores.get(category, {}).get(place)}
        for category, images in placed.items() for place, image in enumerate(images)
    ]  # fmt: skip
