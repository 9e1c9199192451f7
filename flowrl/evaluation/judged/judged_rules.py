"""Benchmarks in which a judge reads each image: draw (with source images), ask, read, sum up.

Without a judge, it draws images and stores them under the published names. Rules are data in `PROTOCOLS`. In the
subject's folder: images and result files under the published names, and the journal of all replies.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flowrl.benchmarks.judged.cases import Ask, Case, CaseFile, Judgement, Protocol
from flowrl.benchmarks.judged.protocols import PROTOCOLS
from flowrl.config.train import resolve_path
from flowrl.evaluation.judged.judged_result import CaseVerdicts, judged_result
from flowrl.evaluation.kept_answers import Asking, ask_kept
from flowrl.evaluation.named_judges import load_judge, read_judge, weights_of
from flowrl.evaluation.runner import Rules
from flowrl.evaluation.summing import options_of
from flowrl.generation.folders import ImageFile, is_folder_of_images, read_folder
from flowrl.generation.generate import some
from flowrl.generation.layouts import put
from flowrl.generation.subject import Settings, Subject
from flowrl.media.reading import read_image
from flowrl.prompts.datasets import is_dataset
from flowrl.prompts.loading import Prompt
from flowrl.rendering.markup import plural
from flowrl.rewards.judges.answers import answer_mass
from flowrl.rewards.judges.asking import UNPARSED
from flowrl.rewards.judges.chat import TOP_LOGPROBS, Answer, Chat, Pixels, Question, identity_of
from flowrl.rewards.judges.templates import BLANK, Template, digest_of, load_template
from flowrl.runtime.digests import content_digest
from flowrl.runtime.files import replacing, write_atomically
from flowrl.runtime.journal import Journal, Row
from flowrl.runtime.randomness import counter_seed

VALUES = "values"
"""Key, in a row of the journal, of the numbers read from a reply."""
_MASS = "mass"


@dataclass(frozen=True, kw_only=True, slots=True)
class WordsOf:
    """The words of all questions by name, and their source."""

    templates: Mapping[str, Template]
    origin: str

    @property
    def digest(self) -> str:
        """A short hash of all words."""
        return digest_of(self.templates)


def find_words(protocol: Protocol, asks: Iterable[Ask], given: Path | None, beside: Sequence[Path]) -> WordsOf:
    """Finds the words of questions.

    Args:
        given: the folder of the option template_dir; its NAME.txt replaces the published file.
        beside: where published files may lie if it was not given.

    Raises ValueError: words are missing, lack a field, or mark places for another number of images.
    """
    published = protocol.words([given] if given is not None else beside)
    templates, own = {}, []
    for ask in asks:
        file = given / f"{ask.words}.txt" if given is not None else None
        if file is not None and file.is_file():
            templates[ask.words] = load_template(ask.words, str(file))
            own.append(ask.words)
        elif ask.words in published:
            words = published[ask.words]
            templates[ask.words] = Template(user=words.user, system=words.system)
        else:
            raise ValueError(
                f"{protocol.title}: the judge is asked in published words, which are not shipped. Give `options` "
                f"template_dir=FOLDER, your copy of the repository that the prompts are from, or a folder with "
                f"{ask.words}.txt, a template with {', '.join(f'{{{name}}}' for name in ask.fields) or 'no field'}."
            )
        if lacking := [name for name in ask.fields if f"{{{name}}}" not in templates[ask.words].user]:
            raise ValueError(f"the words {ask.words} must hold {{{lacking[0]}}}, so that the judge is told.")
        templates[ask.words].parts([BLANK] * (2 if ask.source else 1), {})
    return WordsOf(templates=templates, origin=f"own words: {', '.join(own)}" if own else "published words")


def ask_cases(
    chat: Chat, protocol: Protocol, cases: Sequence[Case], images: Sequence[ImageFile], words: WordsOf, asking: Asking,
    journal: Journal, *, label: str,
) -> tuple[list[Judgement], list[Row]]:  # fmt: skip
    """Asks what the journal does not answer yet; returns verdicts on each case, and the rows of all questions."""
    work = [(case, image, ask) for case, image in zip(cases, images, strict=True) for ask in case.asks]

    def build(place: int, attempt: int, temperature: float) -> Question:
        case, image, ask = work[place]
        source = _source_of(case)
        shown = [_source(*source)] if ask.source and source is not None else []
        shown.append(_result(image.path, image.stamp, source if protocol.resize else None))
        if ask.forms:
            return words.templates[ask.words].question(shown, ask.fields, top_logprobs=TOP_LOGPROBS)
        seed = counter_seed("judged", asking.seed, case.key, ask.name, attempt) % 2**31
        return words.templates[ask.words].question(
            shown, ask.fields, max_tokens=asking.max_tokens, temperature=temperature, seed=seed
        )

    def read(place: int, answer: Answer) -> tuple[str | None, Row]:
        case, _, ask = work[place]
        found = read_answer(protocol, case, ask, answer)
        if found is not None:
            return None, {VALUES: found}
        return (UNPARSED if ask.forms else answer.error or UNPARSED), {}

    def key_of(case: Case, image: ImageFile, ask: Ask) -> str:
        source = _source_of(case)
        asked = [words.templates[ask.words].digest, ask.name, dict(ask.fields), list(ask.forms), source and source[1]]
        return image.key_with(json.dumps(asked))

    keys = list(starmap(key_of, work))
    # A question whose first token is read comes out the same at every try.
    once = all(ask.forms for _, _, ask in work)
    rows = ask_kept(chat, keys, build, read, journal, replace(asking, attempts=1) if once else asking, label=label)
    listed = iter(rows)
    return [_judgement(case, [next(listed) for _ in case.asks]) for case in cases], rows


def _source_of(case: Case) -> tuple[Path, str] | None:
    """The image that an edit starts from, with a digest of its content."""
    return None if case.source is None else (case.source, content_digest(case.source))


def read_answer(protocol: Protocol, case: Case, ask: Ask, answer: Answer) -> Mapping[str, float] | None:
    """Reads the numbers in a judge's answer; None if it cannot be read, or does not fit the case."""
    if ask.forms:
        return {_MASS: answer_mass(answer.logprobs[0], ask.forms)} if answer.logprobs else None
    found = protocol.read_reply(ask.name, answer.text)
    if found is not None and protocol.fits is not None and not protocol.fits(case, {ask.name: found}):
        return None
    return found


def _judgement(case: Case, rows: Sequence[Row]) -> Judgement:
    whole = all(row["error"] is None for row in rows)
    return Judgement(
        case=case,
        replies={ask.name: row["output"] for ask, row in zip(case.asks, rows, strict=True)},
        values={ask.name: row[VALUES] for ask, row in zip(case.asks, rows, strict=True)} if whole else None,
    )


@lru_cache(maxsize=8)  # the questions about one image stand together
def _source(path: Path, content: str) -> Pixels:
    return read_image(path)


@lru_cache(maxsize=64)
def _result(path: Path, stamp: str, source: tuple[Path, str] | None) -> Pixels:
    """The image, resized to its source's size if that is given, with Pillow's default."""
    pixels = ImageFile(file=stamp, path=path, prompt="", index=0).pixels()
    if source is None:
        return pixels
    height, width = _source(*source).shape[:2]
    if pixels.shape[:2] == (height, width):
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((width, height)))


SOURCES = "sources"
"""Subfolder for source images from a dataset."""
_VERSION = 1  # of questions and rows in the journal


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeOptions:
    """The benchmarks' `options`."""

    template_dir: str | None = None
    """Folder with the judge's words: your copy of the benchmark's repository, or NAME.txt for some of them."""
    images_dir: str | None = None
    """Folder of source images, for benchmarks that keep them apart from the list of edits."""
    attempts: int = 3
    """Tries per question whose answer cannot be read."""
    max_tokens: int | None = None
    """Length of a reply; None takes the benchmark's."""
    temperature: float = 0.0
    """Temperature of the first try; 0 is greedy."""

    def __post_init__(self) -> None:
        self.asking(seed=0, max_tokens=1)

    def asking(self, *, seed: int, max_tokens: int) -> Asking:
        """Settings for asking, with the benchmark's length of replies if you set none."""
        tokens = max_tokens if self.max_tokens is None else self.max_tokens
        return Asking(attempts=self.attempts, max_tokens=tokens, temperature=self.temperature, seed=seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedPlan:
    """All that is known before a model or judge loads; `judge` is None if none is asked."""

    protocol: Protocol
    file: CaseFile
    cases: tuple[Case, ...]
    judge: dict[str, Any] | None
    words: WordsOf
    asking: Asking

    def identity(self, version: str) -> dict[str, Any]:
        """All that an answer depends on besides image and question. A judge in this process adds version and weights,
        because a folder may later hold other weights."""
        assert self.judge is not None
        return {
            "benchmark": self.protocol.title,
            "version": _VERSION,
            "judge": identity_of(self.judge),
            **asdict(self.asking),
            **weights_of(self.judge, version),
        }


def plan_of(settings: Settings) -> JudgedPlan:
    """Reads cases, judge, words and options."""
    options, protocol = options_of(settings, JudgeOptions), PROTOCOLS[settings.benchmark]
    if settings.prompts is None:
        raise ValueError(f"{settings.benchmark} needs `prompts`: {protocol.where}; its data are not shipped.")
    if settings.samples != 1:
        raise ValueError(f"{settings.benchmark} judges 1 image of each prompt, got `samples` {settings.samples}.")
    if options.images_dir is not None and not protocol.images_dir:
        raise ValueError(f"`options` images_dir: {settings.benchmark} has no source images apart from its prompts.")
    given = settings.prompts if is_dataset(settings.prompts) else str(resolve_path(settings.prompts))
    file = protocol.read(given, _folder("images_dir", options.images_dir))
    judge = None if settings.judge is None else read_judge(settings.judge, {}, owner=settings.benchmark)
    beside: list[Path] = (
        [] if is_dataset(given) else [*([Path(given)] if Path(given).is_dir() else []), *Path(given).parents[:2]]
    )
    cases = tuple(some(file.cases, settings.num_prompts))
    names = {} if judge is None else {ask.words: ask for case in cases for ask in case.asks}
    words = find_words(protocol, names.values(), _folder("template_dir", options.template_dir), beside)
    asking = options.asking(seed=settings.seed, max_tokens=protocol.max_tokens)
    return JudgedPlan(protocol=protocol, file=file, cases=cases, judge=judge, words=words, asking=asking)


def _folder(name: str, given: str | None) -> Path | None:
    if given is None:
        return None
    path = Path(given).expanduser()
    if not path.is_dir():
        raise ValueError(f"`options` {name}: there is no folder {path}.")
    return path


def existing(settings: Settings, plan: JudgedPlan, folder: Path) -> list[ImageFile]:
    """Images of cases in an existing folder, under the published names or in this command's layout."""
    names = [plan.protocol.image_name(case) for case in plan.cases]
    by_key: dict[str, ImageFile] = {}
    if is_folder_of_images(folder):
        by_key = {str(image.record.get("key", image.prompt)): image for image in reversed(read_folder(folder))}
    found, missing = [], []
    for index, (case, name) in enumerate(zip(plan.cases, names, strict=True)):
        image = by_key.get(case.key)
        if image is not None:
            found.append(replace(image, index=index, prompt=case.prompt, sample=0))
        elif (folder / name).is_file():
            found.append(ImageFile(file=name, path=folder / name, prompt=case.prompt, index=index))
        else:
            missing.append(name)
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} of {len(names)} images ({', '.join(missing[:3])}): draw them all first, or "
            f"lower `num_prompts`; nothing was judged."
        )
    return found


def prompts_of(settings: Settings, subject: Subject, plan: JudgedPlan) -> list[Prompt]:
    """The prompt of each case, with its source image if it edits one."""
    found = []
    for case in plan.cases:
        sources = () if case.source is None else (case.source,)
        found.append(
            Prompt(
                text=case.prompt,
                metadata={"key": case.key, "task": case.task},
                sources=tuple(map(str, sources)),
                source_names=tuple(source.name for source in sources),
            )
        )
    return found


def place(subject: Subject, plan: JudgedPlan, images: list[ImageFile]) -> list[ImageFile]:
    """Puts drawn images, and the sources of edits, under the published names."""
    if subject.images is None:
        protocol, folder = plan.protocol, subject.folder / plan.protocol.folder
        put(images, folder, [protocol.image_name(case) for case in plan.cases])
        for case in plan.cases if protocol.source_name is not None else ():
            assert case.source is not None
            assert protocol.source_name is not None
            _copy(case.source, folder / protocol.source_name(case))
    return images


def with_sources(cases: Sequence[Case], folder: Path) -> tuple[Case, ...]:
    """Copies the cases' source images to a permanent folder."""
    kept = []
    for case in cases:
        assert case.source is not None
        path = (folder / f"{case.key}{case.source.suffix}").resolve()
        _copy(case.source, path)
        kept.append(replace(case, source=path))
    return tuple(kept)


def _copy(source: Path, path: Path) -> None:
    """Writes a copy of this content; replaces one that was cut short or holds other data."""
    if path.suffix == source.suffix:
        content = source.read_bytes()
    else:
        stream = io.BytesIO()
        pixels = ImageFile(file=source.name, path=source, prompt="", index=0).pixels()
        Image.fromarray(pixels).save(stream, format="PNG")
        content = stream.getvalue()
    if not path.is_file() or path.read_bytes() != content:
        with replacing(path) as file:
            file.write(content)


def ask(
    settings: Settings, plan: JudgedPlan, chat: Chat, subject: Subject, images: Sequence[ImageFile]
) -> CaseVerdicts:
    """Asks about every image, and writes result files in the published formats."""
    with Journal(subject.folder, plan.identity(chat.version)) as journal:
        judgements, rows = ask_cases(
            chat, plan.protocol, plan.cases, images, plan.words, plan.asking, journal, label=subject.label
        )
    for name, text in plan.protocol.files(judgements, subject.folder.name).items():
        path = subject.folder / plan.protocol.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    return CaseVerdicts(judgements=judgements, answers=rows)


def prepare(settings: Settings, plan: JudgedPlan) -> JudgedPlan:
    """Puts the plan's source images into permanent files."""
    if not plan.file.keep_sources:
        return plan
    return replace(plan, cases=with_sources(plan.cases, settings.out / SOURCES))


RULES: Rules[JudgedPlan, Any, CaseVerdicts] = Rules(
    plan=plan_of,
    prompts=prompts_of,
    existing=existing,
    place=place,
    prepare=prepare,
    judge=load_judge,
    ask=ask,
    result=judged_result,
    unjudged=lambda plan: (f"{plan.protocol.title}: {plural(len(plan.cases), 'image')}", plan.protocol.folder),
)
