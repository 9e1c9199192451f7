"""Rules of benchmarks and rewards of other repositories beside ours, on scenes, answers and texts drawn at random."""

from __future__ import annotations

import ast
import json
import random
import re
from contextlib import redirect_stdout
from io import BytesIO, StringIO
from types import SimpleNamespace as Space
from typing import Any

import numpy as np
import torch
from PIL import Image
from published_credit import Lists
from published_cutting import Comparison, Cut
from published_steps import DDPO, FLOW_GRPO, Pairs

from flowrl.benchmarks.dpg_bench import Question, item_score
from flowrl.benchmarks.geneval.metadata import COLORS, RELATIONS
from flowrl.benchmarks.geneval.rules import Detection, relations, verdict
from flowrl.benchmarks.unigenbench.point_scores import aggregate
from flowrl.benchmarks.unigenbench.replies import read_reply
from flowrl.benchmarks.vbench import DIMENSIONS
from flowrl.benchmarks.vbench import aggregate as vbench_sums
from flowrl.rewards.base import RewardInputs
from flowrl.rewards.jpeg import JpegCompressibility, JpegIncompressibility
from flowrl.rewards.ocr import normalise_text, text_reward

GENEVAL = ("djghosh13/geneval", "af4902f24d3ca90ebbb446dd9891a59e0f82725f")
ELLA = ("TencentQQGYLab/ELLA", "3c228f1dc6c4d3cad0a47493816151a419f14db3")
UNIGENBENCH = ("CodeGoat24/UniGenBench", "49d0bcebb0b9418d975d3957c2fee10f34811d14")
VBENCH = ("Vchitect/VBench", "45e79ec14e69a2187202c675d2dbce1a71843d53")
CLASSES = ("dog", "cup", "kite")


def dice(draw: torch.Generator) -> random.Random:
    """Random numbers of Python's own kind."""
    return random.Random(int(torch.randint(0, 2**31, (), generator=draw)))


def box(drawn: random.Random) -> list[float]:
    """Corners of an object, some of them on a coarse grid so that edges coincide."""
    x, y, w, h = (drawn.choice((drawn.uniform(0, 500), float(drawn.randrange(0, 500, 50)))) for _ in range(4))
    return [x, y, x + w + 1, y + h + 1]


def positions(cut: Cut, draw: torch.Generator) -> Pairs:
    """Where one object is, seen from another."""
    drawn, relative = dice(draw), cut.function("relative_position", POSITION_THRESHOLD=0.1)
    pairs = [(box(drawn), box(drawn)) for _ in range(400)]
    theirs = [relative((np.array([*a, 1.0]), None), (np.array([*b, 1.0]), None)) for a, b in pairs]
    yield "relations", [set(relations(tuple(a), tuple(b))) for a, b in pairs], theirs  # type: ignore[arg-type]


def scene(drawn: random.Random) -> tuple[list[Detection], dict[str, Any]]:
    """Objects of a detector, and a record that asks for some."""
    found = [Detection(drawn.choice(CLASSES), tuple(box(drawn)), drawn.random()) for _ in range(drawn.randrange(9))]  # type: ignore[arg-type]
    include: list[dict[str, Any]] = []
    for at, name in enumerate(drawn.sample(CLASSES, drawn.randrange(1, 4))):
        clause: dict[str, Any] = {"class": name, "count": drawn.randrange(1, 4)}
        if drawn.random() < 0.4:
            clause["color"] = drawn.choice(COLORS)
        if at and drawn.random() < 0.6:
            clause["position"] = [drawn.choice(RELATIONS), drawn.randrange(at)]
        include.append(clause)
    record = {"tag": drawn.choice(("counting", "position", "color_attr")), "prompt": "a photo", "include": include}
    if drawn.random() < 0.4:
        record["exclude"] = [{"class": drawn.choice(CLASSES), "count": drawn.randrange(1, 5)}]
    return found, record


def verdicts(cut: Cut, draw: torch.Generator) -> Pairs:
    """Whole verdicts from detections on, with the words of what failed; colours are drawn for each object."""
    drawn, ours, theirs = dice(draw), [], []
    for _ in range(300):
        found, record = scene(drawn)
        color = {one.box: drawn.choice(COLORS[:3]) for one in found}
        own = verdict(found, record, lambda one: color[one.box])  # noqa: B023, it is called here and now
        ours.append([own.correct, own.reason])
        bbox = [
            np.array([[*one.box, one.score] for one in found if one.label == name]).reshape(-1, 5) for name in CLASSES
        ]

        def colors(image: Any, objects: Any, name: str, color: dict[Any, str] = color) -> list[str]:
            return [color[tuple(float(side) for side in one[0][:4])] for one in objects]

        judge = cut.function(
            "compute_iou",
            "relative_position",
            "evaluate",
            "evaluate_image",
            POSITION_THRESHOLD=0.1,
            COLORS=COLORS,
            THRESHOLD=0.3,
            COUNTING_THRESHOLD=0.9,
            MAX_OBJECTS=16,
            NMS_THRESHOLD=1.0,
            classnames=CLASSES,
            json=json,
            inference_detector=lambda *given, bbox=bbox: bbox,
            object_detector=None,
            color_classification=colors,
            Image=Space(open=lambda path: None),
            ImageOps=Space(exif_transpose=lambda image: image),
        )
        result = judge("image", record)
        theirs.append([result["correct"], result["reason"]])
    both = [(sorted_words(a), sorted_words(b)) for a, b in zip(ours, theirs, strict=True)]
    yield "verdicts and their reasons", [a for a, _ in both], [b for _, b in both]


def sorted_words(judged: list[Any]) -> list[Any]:
    """The reasons' words in order: relations that were found are a set there."""
    return [judged[0], [sorted(line.split()) for line in judged[1].split("\n")]]


def dpg(cut: Cut, draw: torch.Generator) -> Pairs:
    """An item's score on four samples, with questions that depend on each other."""
    drawn = dice(draw)
    for _ in range(20):
        count = drawn.randrange(2, 9)
        parents = {q: tuple(drawn.sample(range(1, q), drawn.randrange(min(q, 3)))) for q in range(1, count + 1)}
        answers = [{q: drawn.choice(("yes", "no", "Yes")) for q in parents} for _ in range(4)]
        asked = iter([answer[q] for answer in answers for q in parents])
        item = {
            "qid2tuple": dict.fromkeys(parents, "entity - whole (x)"),
            "qid2dependency": {q: list(p) or [0] for q, p in parents.items()},
            "qid2question": {q: str(q) for q in parents},
        }
        judge = cut.function(
            "crop_image",
            "compute_dpg_one_sample",
            osp=Space(basename=lambda path: path),
            open=Nowhere,
            Image=Space(open=lambda path: Image.new("RGB", (8, 8))),
        )
        args = Space(pic_num=4, res_path="out.txt")
        theirs, *_ = judge(args, {"item": item}, "item", Space(vqa=lambda *given, asked=asked: next(asked)), 4)
        questions = [Question(id=q, text=str(q), parents=p, category="entity - whole") for q, p in parents.items()]
        crops = [{q: float(answer[q] == "yes") for q in parents} for answer in answers]
        yield "score of an item", item_score(crops, questions), theirs


class Nowhere:
    """A file that forgets."""

    def __init__(self, *given: Any) -> None:
        pass

    def __enter__(self) -> Nowhere:
        return self

    def __exit__(self, *given: Any) -> None:
        pass

    def write(self, text: str) -> None:
        """Forgets it."""


POINTS = ("Attribute - Color", "Attribute - Size", "Style", "Grammar - Negation", "Logical Reasoning")


def replies(cut: Cut, draw: torch.Generator) -> Pairs:
    """Replies of a judge, whole and broken."""
    drawn, read = dice(draw), cut.function("parse_evaluation_response", re=re, ast=ast, print=lambda *given: None)
    texts: list[str | None] = [None]
    for _ in range(60):
        scores = [drawn.choice((0, 1, "1", 1.0)) for _ in range(drawn.choice((2, 3, 3, 3)))]
        text = f"so <analysis>{['a'] * 3}</analysis>\n<score> {scores} </score>"
        texts.append(drawn.choice((text, text, text, text.replace("</score>", ""), text.replace("[", "(", 1), "no")))
    theirs = [read(text, ["p"] * 3) for text in texts]
    yield (
        "scores",
        [None if (one := read_reply(text, 3)) is None else one.score for text in texts],
        [None if found is None else found[1] for found in theirs],
    )


def points(cut: Cut, draw: torch.Generator) -> Pairs:
    """Test points that are met, by dimension."""
    drawn = dice(draw)
    rows: list[Any] = []
    for _ in range(200):
        labels = drawn.sample(POINTS, drawn.randrange(1, 5))
        rows.append((labels, [drawn.choice((0, 1)) for _ in labels]))
    listed: list[Any] = [
        ({}, {"testpoint": str(labels), "result_json": str({"score": scores})}) for labels, scores in rows
    ]
    add = cut.function("calculate_scores", ast=ast, defaultdict=Counts)
    with redirect_stdout(StringIO()):
        theirs = add(Space(iterrows=lambda: iter([(k, row) for k, (_, row) in enumerate(listed)])))
    ours = aggregate(rows)
    for name, sums in (("primary_dimensions", ours.primary), ("sub_dimensions", ours.sub)):
        other = {label.strip(): [one["correct"], one["total"]] for label, one in theirs[name].items()}
        yield name, {label: [one.correct, one.total] for label, one in sums.items()}, other


class Counts(Lists):
    """`defaultdict(lambda: [0, 0])`."""

    def __missing__(self, key: Any) -> list[Any]:
        return self.setdefault(key, [0, 0])


def vbench(cut: Cut, draw: torch.Generator) -> Pairs:
    """Quality, semantic and total score of dimensions at random, by the published constants."""
    scores = {name: float(torch.rand((), generator=draw)) for name in DIMENSIONS}
    given = {name.replace("_", " "): value for name, value in scores.items()}
    names = {
        name: cut.also[0].function(name)
        for name in (
            "TASK_INFO",
            "NORMALIZE_DIC",
            "DIM_WEIGHT",
            "QUALITY_LIST",
            "SEMANTIC_LIST",
            "QUALITY_WEIGHT",
            "SEMANTIC_WEIGHT",
        )
    }
    normal_of, *sums = (
        cut.function(name, **names)
        for name in ("get_nomalized_score", "get_quality_score", "get_semantic_score", "get_final_score")
    )
    normalised = normal_of(given)
    quality, semantic = sums[0](normalised), sums[1](normalised)
    theirs = {"quality": quality, "semantic": semantic, "total": sums[2](quality, semantic)}
    for name, value in vbench_sums(scores).items():
        yield name, value, theirs[name]


def ocr(cut: Cut, draw: torch.Generator) -> Pairs:
    """What is read, beside what was to be written."""
    from rapidfuzz.distance import Levenshtein

    drawn, letters = dice(draw), "ab C"
    targets = ["".join(drawn.choice(letters) for _ in range(drawn.randrange(1, 9))).strip() or "a" for _ in range(60)]
    seen = [drawn.choice((t, t.upper() + " b", "".join(drawn.choice(letters) for _ in range(9)), "")) for t in targets]
    reads = iter(seen)
    reader = Space(ocr=lambda image, cls: [[[None, (text, 0.9)]] if (text := next(reads)) else None])
    theirs = cut.function("OcrScorer.__call__", Image=Image, distance=Levenshtein.distance)(
        Space(ocr=reader), [np.zeros((2, 2, 3))] * 60, [f'a sign "{target}"' for target in targets]
    )
    ours = [
        text_reward(*(normalise_text(t, "nospace_lower") for t in pair)) for pair in zip(seen, targets, strict=True)
    ]
    yield "rewards", torch.tensor(ours), torch.tensor(theirs)


def jpeg(scale: str) -> Any:
    """Sizes of files, on smooth images and noise."""

    def compare(cut: Cut, draw: torch.Generator) -> Pairs:
        images = torch.rand(4, 3, 32, 32, generator=draw) ** torch.arange(1, 5).reshape(4, 1, 1, 1)
        theirs = cut.function("jpeg_incompressibility", "jpeg_compressibility", Image=Image, io=Space(BytesIO=BytesIO))
        values, _ = theirs()(images, None, None)
        inputs = RewardInputs(
            images=images, prompts=["x"] * 4, metadata=[{}] * 4, group_ids=torch.arange(4), sample_ids=torch.arange(4)
        )
        small = JpegCompressibility(scale=scale).build(torch.device("cpu"))(inputs)  # type: ignore[arg-type]
        yield "compressibility", torch.as_tensor(small.values), values
        values, _ = cut.function("jpeg_incompressibility", Image=Image, io=Space(BytesIO=BytesIO))()(images, None, None)
        large = JpegIncompressibility().build(torch.device("cpu"))(inputs)
        yield "incompressibility", torch.as_tensor(large.values), values

    return compare


def _rule(
    method: str, source: tuple[str, str], file: str, function: str, ours: str, compare: Any, **more: Any
) -> Comparison:
    return Comparison(method, *source, file, function, ours, compare, **more)


RULES = (
    _rule(
        "GenEval: relations",
        GENEVAL,
        "evaluation/evaluate_images.py",
        "relative_position",
        "benchmarks.geneval.rules.relations",
        positions,
    ),
    _rule(
        "GenEval: verdicts",
        GENEVAL,
        "evaluation/evaluate_images.py",
        "evaluate_image",
        "benchmarks.geneval.rules.verdict",
        verdicts,
    ),
    _rule(
        "DPG-Bench: an item",
        ELLA,
        "dpg_bench/compute_dpg_bench.py",
        "compute_dpg_one_sample",
        "benchmarks.dpg_bench.item_score",
        dpg,
    ),
    _rule(
        "UniGenBench: replies",
        UNIGENBENCH,
        "eval/src/eval_common.py",
        "parse_evaluation_response",
        "benchmarks.unigenbench.replies.read_reply",
        replies,
    ),
    _rule(
        "UniGenBench: sums",
        UNIGENBENCH,
        "eval/src/eval_common.py",
        "calculate_scores",
        "benchmarks.unigenbench.point_scores.aggregate",
        points,
    ),
    _rule(
        "VBench: sums",
        VBENCH,
        "scripts/cal_final_score.py",
        "get_final_score",
        "benchmarks.vbench.aggregate",
        vbench,
        also=("scripts/constant.py",),
    ),
    _rule("text reward", FLOW_GRPO, "flow_grpo/ocr.py", "OcrScorer.__call__", "rewards.ocr.text_reward", ocr),
    _rule(
        "JPEG rewards",
        FLOW_GRPO,
        "flow_grpo/rewards.py",
        "jpeg_compressibility",
        "rewards.jpeg.JpegCompressibility",
        jpeg("flow_grpo"),
    ),
    _rule(
        "JPEG rewards",
        DDPO,
        "ddpo_pytorch/rewards.py",
        "jpeg_compressibility",
        "rewards.jpeg.JpegCompressibility",
        jpeg("ddpo"),
    ),
)
