"""The benchmark UniGenBench: 600 prompts, four images each, and a judge that scores each test point of each image.

Existing images are named {index}_{sample}.png, or lie in GenEval's layout with these prompts.

The prompt files are not shipped, see `flowrl.benchmarks.unigenbench.items`. Judges by name are in `JUDGES`, others
are given as a mapping. Judges are asked in the published words. **Numbers of another judge than Gemini-2.5-Pro, or in
other words, are not leaderboard numbers**; see `flowrl.evaluation.unigenbench.unigenbench` and docs/unigenbench.md.

In the subject's folder: `<track>/{index}_{sample}.png`, the journal of all replies, and `results/<label>_<track>.csv`
and `.json` in the published format.

A dry run estimates calls, tokens and time before it draws or asks anything.

It takes means of this judge's answers in the journal, or else rough constants, and says so.

One question per image. Its words come from a template with the fields {prompt}, {testpoints} (a Python list),
{definitions} and {descriptions} (a line "test point: text" for each); `<image>` marks the place of the image. Without
the mark the image comes first, or last if the judge is a hosted Gemini, as in the published code.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from flowrl.benchmarks.unigenbench.items import MEANINGS, EnVariant, Item, Language, PromptFile, read_prompt_file
from flowrl.benchmarks.unigenbench.point_scores import aggregate
from flowrl.benchmarks.unigenbench.replies import Judged, read_reply, results_text, score_rows, summary_text
from flowrl.config.strict_yaml import read_mapping
from flowrl.config.train import resolve_path
from flowrl.evaluation.benchmark import Result
from flowrl.evaluation.kept_answers import Asking, ask_kept
from flowrl.evaluation.named_judges import load_judge, read_judge, weights_of
from flowrl.evaluation.runner import Rules
from flowrl.evaluation.summing import options_of
from flowrl.evaluation.unigenbench.points_result import Judging, points_result
from flowrl.generation.folders import ImageFile, is_folder_of_images, read_folder
from flowrl.generation.generate import some
from flowrl.generation.layouts import numbered_name, put, read_numbered
from flowrl.generation.subject import Settings, Subject
from flowrl.media.reading import image_size
from flowrl.prompts.loading import Prompt
from flowrl.rendering.markup import duration, plural
from flowrl.rendering.terminal_text import Table
from flowrl.rewards.judges.asking import UNPARSED
from flowrl.rewards.judges.chat import Answer, Chat, Question, array_schema, identity_of, object_schema
from flowrl.rewards.judges.templates import IMAGE, OWN, Template, load_template, published_file
from flowrl.runtime.files import read_json, write_atomically
from flowrl.runtime.journal import Journal, Row
from flowrl.runtime.randomness import counter_seed

SOURCE = "unigenbench"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wording:
    """The words to a judge besides the item."""

    template: Template
    meanings: Mapping[str, str]
    own: bool
    """Whether any of it differs from the published wording."""

    @property
    def digest(self) -> str:
        """A short hash of all words."""
        listed = json.dumps([self.template.digest, dict(self.meanings)], sort_keys=True)
        return hashlib.sha256(listed.encode()).hexdigest()[:8]

    def question(self, item: Item, image: Any, **sampling: Any) -> Question:
        """The question about one image of an item; `sampling` gives tokens, temperature and seed of the answer."""
        described = zip(item.points, item.descriptions, strict=True)
        fields = {
            "prompt": item.prompt,
            "testpoints": str(list(item.points)),
            "definitions": "\n".join(f"{point}: {self.meanings[point]}" for point in item.points),
            "descriptions": "\n".join(f"{point}: {text}" for point, text in described),
        }
        asked = self.template.question([image], fields, **sampling)
        lists = {
            "analysis": array_schema({"type": "string"}, len(item.points)),
            "score": array_schema({"type": "integer", "enum": [0, 1]}, len(item.points)),
        }
        return replace(asked, schema=object_schema(lists))


def read_wording(
    language: Language, template: str | None, definitions: str | None, *, image_last: bool = False
) -> Wording:
    """Reads the published words, this package's (`own`), or those of your files.

    Args:
        template: a text file with the four fields, `own`, or None for the published one.
        definitions: a JSON file `{test point: what it means}` with all 27 of the language, `own`, or None likewise.
        image_last: whether the image follows the text if the template does not mark its place.

    Raises ValueError: a file, a field or a test point is missing.
    """
    try:
        words = load_template(f"unigenbench_{language}", template, source=SOURCE, images=1)
    except ValueError as error:
        raise ValueError(f"`options` template={template}: {error}") from error
    if image_last and IMAGE not in words.user:
        words = replace(words, user=words.user + IMAGE)
    meanings: Mapping[str, str] = MEANINGS[language]
    if definitions != OWN:
        file = published_file(SOURCE, f"definitions_{language}.json") if definitions is None else Path(definitions)
        try:
            found = read_json(file.expanduser())
        except ValueError as error:
            raise ValueError(f"`options` definitions: {error}") from error
        if not all(isinstance(text, str) for text in found.values()):
            raise ValueError(f"`options` definitions={file}: must be an object {{test point: what it means}}.")
        known = {label.strip(): text for label, text in found.items()}
        if missing := [label for label in meanings if label not in known]:
            raise ValueError(f"`options` definitions={file}: lacks {len(missing)} test points, such as {missing[0]!r}.")
        meanings = {label: known[label] for label in meanings}
    return Wording(template=words, meanings=meanings, own=template is not None or definitions is not None)


JUDGES: dict[str, dict[str, Any]] = read_mapping(Path(__file__).with_name("judges.yaml"))

_VERSION = 1  # of questions and rows in the journal


@dataclass(frozen=True, kw_only=True, slots=True)
class PointOptions:
    """The benchmark's `options`."""

    en_variant: EnVariant = "head"
    """Version of the English file; see `flowrl.benchmarks.unigenbench.items`."""
    template: str | None = None
    """Text file with the question instead of the published one, or `own`."""
    definitions: str | None = None
    """JSON file {test point: what it means} instead of the published ones, or `own`."""
    attempts: int = 11
    """Tries per image whose answer cannot be read."""
    max_tokens: int = 4096
    """Length of an answer."""
    temperature: float = 0.0
    """Temperature of the first try; 0 is greedy."""
    dry_run: bool = False
    """Estimate calls, tokens and time; draw and ask nothing."""

    def __post_init__(self) -> None:
        self.asking(0)

    def asking(self, seed: int) -> Asking:
        """Settings for asking."""
        return Asking(attempts=self.attempts, max_tokens=self.max_tokens, temperature=self.temperature, seed=seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class PointPlan:
    """All that is known before a model or judge loads."""

    file: PromptFile
    items: tuple[Item, ...]
    judge: dict[str, Any]
    wording: Wording
    asking: Asking
    dry_run: bool

    @property
    def texts(self) -> dict[int, str]:
        """Prompts by the index of their item."""
        return {item.index: item.prompt for item in self.items}

    @property
    def identity(self) -> dict[str, Any]:
        """All that an answer depends on besides the image and the item."""
        return {
            "benchmark": "unigenbench",
            "version": _VERSION,
            "judge": identity_of(self.judge),
            "wording": self.wording.digest,
            **asdict(self.asking),
        }


def plan_of(settings: Settings) -> PointPlan:
    """Reads prompt file, judge, template and options."""
    options = options_of(settings, PointOptions)
    if settings.prompts is None:
        raise ValueError(
            "unigenbench needs `prompts` FILE.csv: take data/test_prompts_en.csv (or _en_long, _zh, _zh_long) from "
            "the repository CodeGoat24/UniGenBench; the files are not shipped."
        )
    file = read_prompt_file(resolve_path(settings.prompts), en_variant=options.en_variant)
    judge = read_judge(settings.judge, JUDGES, owner="unigenbench")
    # As the published code asks: Gemini is shown the text first, judges behind vLLM the image.
    image_last = str(judge["model"]).startswith("gemini")
    return PointPlan(
        file=file,
        items=tuple(some(file.items, settings.num_prompts)),
        judge=judge,
        wording=read_wording(file.language, options.template, options.definitions, image_last=image_last),
        asking=options.asking(settings.seed),
        dry_run=options.dry_run,
    )


def existing(settings: Settings, plan: PointPlan, folder: Path) -> list[ImageFile]:
    """Images of items in an existing folder, named {index}_{sample}.png or in GenEval's layout."""
    samples = settings.samples
    if not is_folder_of_images(folder):
        return read_numbered(folder, plan.texts, samples)
    by_text: dict[str, list[ImageFile]] = {}
    for image in read_folder(folder):
        by_text.setdefault(image.prompt, []).append(image)
    found = []
    for item in plan.items:
        images = by_text.get(item.prompt, [])[:samples]
        if len(images) < samples:
            raise ValueError(
                f"{folder} has {len(images)} images of prompt {item.index} ({item.prompt[:60]!r}), {samples} are "
                f"needed: draw them all first, or lower `samples` or `num_prompts`; nothing was judged."
            )
        found += [replace(image, index=item.index, sample=sample) for sample, image in enumerate(images)]
    return found


def place(subject: Subject, plan: PointPlan, images: list[ImageFile]) -> list[ImageFile]:
    """Puts drawn images under the published names."""
    if subject.images is not None:
        return images
    samples = len(images) // len(plan.items)
    folder = subject.folder / plan.file.track
    put(images, folder, (numbered_name(item.index, sample) for item in plan.items for sample in range(samples)))
    return read_numbered(folder, plan.texts, samples)


def ask(settings: Settings, plan: PointPlan, chat: Chat, subject: Subject, images: Sequence[ImageFile]) -> Judging:
    """Asks about every image (`flowrl.evaluation.kept_answers`) and writes the result files in the published format."""
    by_index = {item.index: item for item in plan.items}
    work = [(image, by_index[image.index]) for image in images]
    asking = plan.asking

    def build(place: int, attempt: int, temperature: float) -> Question:
        image, item = work[place]
        seed = counter_seed("unigenbench", asking.seed, image.index, image.sample, attempt) % 2**31
        return plan.wording.question(
            item, image.pixels(), max_tokens=asking.max_tokens, temperature=temperature, seed=seed
        )

    def read(place: int, answer: Answer) -> tuple[str | None, Row]:
        if read_reply(answer.text, len(work[place][1].points)) is not None:
            return None, {}  # cut off after its end, or not at all
        return answer.error or UNPARSED, {}

    keys = [image.key_with(json.dumps([item.prompt, item.points, item.descriptions])) for image, item in work]
    with Journal(subject.folder, plan.identity | weights_of(plan.judge, chat.version)) as journal:
        answers = ask_kept(chat, keys, build, read, journal, asking, label=subject.label)
    rows = [
        Judged(
            index=item.index,
            prompt=item.prompt,
            points=item.points,
            output=row["output"],
            image=str(image.path),
            reply=read_reply(row["output"], len(item.points)) if row["error"] is None else None,
        )
        for (image, item), row in zip(work, answers, strict=True)
    ]
    folder = subject.folder / "results"
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{subject.label}_{plan.file.track}".replace("/", "-")
    write_atomically(folder / f"{name}.csv", results_text(rows))
    write_atomically(folder / f"{name}.json", summary_text(aggregate(score_rows(rows))))
    return Judging(rows=tuple(rows), answers=tuple(answers))


RULES: Rules[PointPlan, Chat, Judging] = Rules(
    plan=plan_of,
    prompts=lambda settings, subject, plan: [
        Prompt(text=item.prompt, metadata={"index": item.index}) for item in plan.items
    ],
    existing=existing,
    place=place,
    estimate=lambda settings, plan: estimate_of(settings, plan) if plan.dry_run else None,
    judge=load_judge,
    ask=ask,
    result=points_result,
)


PIXELS_PER_TOKEN = 28 * 28  # of the vision towers of Qwen2.5-VL; others are near
SIDE = 1024  # of an image whose size is not known
ANSWER_BASE, ANSWER_PER_POINT = 60, 45  # tokens besides the repeated text
SECONDS = 10.0  # of one answer, where none was measured
CONCURRENCY = 64  # requests at a time where the judge does not say, as in `flowrl.rewards.judges.server_chat`


def estimate_of(settings: Settings, plan: Any) -> Result:
    """The estimate as a result without scores."""
    subjects, items = settings.subjects, plan.items
    answered = [_answered(subject.folder, plan.identity) for subject in subjects]
    rows = [row for part in answered for row in part]
    calls = sum(max(len(items) * settings.samples - len(part), 0) for part in answered)
    pixels = _pixels(settings)
    at_once = int(plan.judge.get("concurrency", CONCURRENCY)) if "server" in plan.judge else 1
    measured = [row["tokens"] for row in rows if row["tokens"]]
    blank, guessed = np.zeros((1, 1, 3), dtype=np.uint8), []  # tokens of each question and its answer
    for item in items:
        question = plan.wording.question(item, blank, max_tokens=1, temperature=0.0, seed=0)
        asked = sum(_text_tokens(part) for part in (question.system, *question.parts) if isinstance(part, str))
        repeated = _text_tokens(item.prompt) + _text_tokens(str(list(item.points)))
        answer = ANSWER_BASE + repeated + ANSWER_PER_POINT * len(item.points)
        guessed.append(asked + pixels / PIXELS_PER_TOKEN + min(answer, plan.asking.max_tokens))
    tokens = fmean(measured or guessed)
    seconds = calls * fmean(row["seconds"] for row in rows) if rows else SECONDS * math.ceil(calls / at_once)
    how = (
        f"measured on {plural(len(rows), 'answer')} in the journal"
        if rows
        else f"guessed: {SECONDS:g} s per answer, as many at a time as the judge takes, images of "
        f"{pixels / 1e6:.2g} million pixels at {PIXELS_PER_TOKEN} per token, {ANSWER_PER_POINT} tokens per test point"
    )
    total = calls * tokens
    table = Table(
        title="Estimate",
        head=("", "number"),
        rows=(
            ("prompts", str(len(items))),
            ("images", str(len(items) * settings.samples * len(subjects))),
            ("test points", str(sum(len(item.points) for item in items) * settings.samples * len(subjects))),
            ("calls to come", str(calls)),
            ("tokens, thousands", f"{total / 1000:.0f}"),
            ("time of the judge", duration(seconds)),
        ),
        note=f"Tokens and seconds of a call are {how}. Repeated tries and the drawing of images are not counted.",
    )
    return Result(
        headline=f"A dry run: {plural(calls, 'call')} to {plan.judge['model']}, about {total / 1e6:.2g} million tokens "
        f"and {duration(seconds)}. Nothing was drawn or asked.",
        rows=(),
        metrics={f"eval/{settings.benchmark}/calls": float(calls)},
        tables=(table,),
        notes=(*plan.file.repairs, *plan.file.differences),
        facts={"calls": calls, "tokens_per_call": round(tokens, 1), "seconds": round(seconds, 3)},
    )


def _text_tokens(text: str) -> float:
    """A guess of a text's tokens: a quarter of its Latin characters, and two thirds of the others."""
    latin = sum(character.isascii() for character in text)
    return latin / 4 + (len(text) - latin) * 2 / 3


def _answered(folder: Path, identity: Mapping[str, Any]) -> list[Row]:
    """Rows of an existing journal; a dry run starts none."""
    for path in sorted(folder.glob("journal-*.jsonl")):
        with path.open(encoding="utf-8") as file:
            head = file.readline()
        if head.endswith("\n") and json.loads(head) == {"identity": json.loads(json.dumps(dict(identity)))}:
            with Journal(folder, identity) as journal:
                return list(journal.rows.values())
    return []


def _pixels(settings: Settings) -> float:
    """Pixels of an image, if its size is known."""
    images, source = settings.subject.images, settings.subject.source
    first = None if images is None else next(iter(sorted(images.rglob("*.png"))), None)
    if first is not None:
        return float(math.prod(image_size(first)))
    height, width = (source.options.get(side) if source is not None else None for side in ("height", "width"))
    return float(height * width) if height and width else float(SIDE * SIDE)
