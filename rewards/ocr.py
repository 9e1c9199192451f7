"""Text reading: does the image show the words that its prompt asks for? (Flow-GRPO, arXiv 2505.05470, section 5.1.)

A sign that says "Hello World" is read by RapidOCR (PP-OCR models, Apache-2.0, part of the package) on the processor,
and what was read is compared with the target by edit distance. Install with `pip install -e '.[ocr]'`. PaddleOCR, the
published reader, and a vision-language model may read instead:

    {name: ocr, options: {reader: paddle, min_confidence: 0}}                            as Flow-GRPO
    {name: ocr, options: {reader: vlm, judge: {server: URL, model: Qwen3-VL-8B}}}        as verl-omni, UniRL
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.resources
import importlib.util
import math
import queue
import re
import unicodedata
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from flowrl.config.rewards import Frames
from flowrl.config.sections import at_least, share
from flowrl.prompts.loading import Prompt
from flowrl.rewards.base import FunctionReward, Model, Reward, RewardInputs, RewardOutput, output_of, to_uint8
from flowrl.rewards.base.frames import framewise
from flowrl.rewards.base.prompt_needs import no_fields
from flowrl.rewards.judges.chat import build_chat, check_chat, is_server, judge_models
from flowrl.rewards.judges.templates import Template, load_template
from flowrl.runtime.shapes import UInt8

Normalise = Literal["nospace_lower", "nfkc", "none"]
Reader = Callable[[UInt8[np.ndarray, " h w 3"]], str | None]

ReadAll = Callable[[UInt8[np.ndarray, " b h w 3"]], list[str | None]]

_PACKAGES = {
    "rapidocr": ("rapidocr", "onnxruntime", "rapidfuzz"),
    "paddle": ("paddleocr", "paddle", "rapidfuzz"),
    "vlm": ("rapidfuzz",),
}
NO_TEXT = "(no text)"
"""The answer of a vision-language model for an image without text."""
VLM_TOKENS = 512
FIRST_QUOTED = r'"([^"]*)"'
"""The text between the first pair of straight double quotes."""
_OPEN, _CLOSE = r"\u201c\u201e\u00ab\u2018\u201a\u2039\u300c\u300e", r"\u201d\u201c\u00bb\u2019\u203a\u300d\u300f"
_OTHER_QUOTES = re.compile(rf"[{_OPEN}][^{_OPEN}{_CLOSE}]+[{_CLOSE}]|(?<!\w)'[^']+'(?!\w)|``[^`']+''")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ocr:
    """How much of the asked text an OCR model reads in the image, in [0, 1]; see `text_reward`.

    All pieces of text found, in the reader's order (from the top down), are joined without a separator. Parts: `found`,
    whether the target occurs in them, and `extra`, how many characters they have beyond the target's.

    For videos, every 4th frame is read, and the value is the mean over frames above 0, as in Adv-GRPO, which counts no
    substring (`substring_ok: false`); an entry's `frames:` replaces that rule.
    """

    target_regex: str = FIRST_QUOTED
    """Finds the target in a prompt: the first match's first group that took part, or all of it without groups."""
    target_field: str | None = None
    """Take the target from this field of the prompt's metadata instead; an item without it is invalid."""
    normalise: Normalise = "nospace_lower"
    """How both texts are normalised; see `normalised`."""
    substring_ok: bool = True
    """A target that occurs within other text counts as read."""
    extra_text_penalty: float = 0.0
    """Cost of a surplus character around a target that occurs; see `text_reward`."""
    on_empty_target: Literal["skip", "blank", "prompt"] = "skip"
    """`skip` makes an item without a target invalid; `blank` gives 1 if no text was found and 0 if some was; `prompt`
    takes the whole prompt as the target."""
    min_confidence: float = 0.5
    """Text that the reader is less sure of is left out. Flow-GRPO keeps all: 0."""
    angle_classifier: bool = False
    """Also read text that is upside down; Flow-GRPO does not."""
    workers: int = 1
    """Images read at the same time, on one processor core each."""
    reader: Literal["rapidocr", "paddle", "vlm"] = "rapidocr"
    """The reader: `rapidocr`, PP-OCR on onnxruntime; `paddle`, PaddleOCR 2 with its English models, from your own
    installation, with red as the first channel, as in Flow-GRPO; `vlm`, the model that `judge` names."""
    judge: Mapping[str, Any] | None = None
    """Which model reads, for `vlm`; see `flowrl.rewards.judges.chat`."""
    template: str | None = None
    """The question for `vlm`: a text file instead of ours."""

    def __post_init__(self) -> None:
        if (self.reader == "vlm") != (self.judge is not None):
            raise ValueError(
                f"reader vlm goes with judge, which names the model, got reader: {self.reader}, judge: {self.judge}."
            )
        if self.judge is not None:
            check_chat(self.judge)
            self.words()
            if self.angle_classifier or self.workers != 1 or self.min_confidence != 0.5:
                raise ValueError("angle_classifier, workers and min_confidence are not for reader vlm: leave them out.")
        elif self.template is not None:
            raise ValueError("template is what a vision-language model is asked: leave it out, or set reader: vlm.")
        try:
            re.compile(self.target_regex)
        except re.error as error:
            raise ValueError(f"target_regex {self.target_regex!r} is not a regular expression: {error}.") from error
        at_least(0, self, "extra_text_penalty")
        share("min_confidence", self.min_confidence, open_end=True)
        at_least(1, self, "workers")
        if missing := [name for name in _PACKAGES[self.reader] if importlib.util.find_spec(name) is None]:
            own = self.reader == "paddle"
            give = "pip install 'paddleocr<3' paddlepaddle" if own else "in flowrl's folder, pip install -e '.[ocr]'"
            raise ValueError(f"{' and '.join(missing)} must be installed: {give}.")

    @property
    def models(self) -> tuple[Model, ...]:
        return () if self.judge is None else judge_models(self.judge)

    def lacks(self, prompt: Prompt) -> str | None:
        """A target: what `target_regex` finds, or the field."""
        if self._target(prompt.text, prompt.metadata)[1] is None:
            return None
        if self.target_field is not None:
            return no_fields(prompt, self.target_field) or f"needs a text in the field {self.target_field!r}"
        if self.target_regex != FIRST_QUOTED:
            return f"needs a text that {self.target_regex!r} finds, and has none: change it, or the option target_regex"
        other = _OTHER_QUOTES.search(prompt.text)
        found = f"has {other[0]} in quotes of another kind" if other else "has none"
        return (
            f'needs the words to draw between straight double quotes, and {found}: write "HELLO", set target_regex or '
            "target_field, or on_empty_target: prompt"
        )

    def words(self) -> Template:
        """The question for a vision-language model."""
        return load_template("ocr_read", self.template, images=1)

    def build(self, device: torch.device) -> Reward:
        """Loads a reader, which runs on the host, or the judge."""
        read, version, remote = self._reading(device)

        def score(inputs: RewardInputs) -> RewardOutput:
            pairs = zip(inputs.prompts, inputs.metadata, strict=True)
            wanted = [self._target(prompt, metadata) for prompt, metadata in pairs]
            errors = [error for _, error in wanted]
            values = [math.nan] * len(inputs)
            parts = {"found": [math.nan] * len(inputs), "extra": [math.nan] * len(inputs)}
            places = [i for i, error in enumerate(errors) if error is None]
            for i, text in zip(places, read(to_uint8(inputs.images)[places]), strict=True):
                if text is None:
                    errors[i] = "reader_error"
                    continue
                seen, wish = normalise_text(text, self.normalise), wanted[i][0]
                parts["extra"][i] = max(0, len(seen) - len(wish))
                if wish:
                    parts["found"][i] = float(wish in seen)
                    values[i] = text_reward(
                        seen, wish, substring_ok=self.substring_ok, extra_text_penalty=self.extra_text_penalty
                    )
                else:
                    values[i] = float(not seen)
            return output_of(values, inputs, parts, errors)

        images = FunctionReward(
            name="ocr",
            score=score,
            needs=frozenset({"images", "prompts", "metadata"}),
            version=f"ocr:{self.target_field or self.target_regex}:{self.normalise}:substring-{self.substring_ok}:"
            f"extra-{self.extra_text_penalty:g}:empty-{self.on_empty_target}:{version}",
            kind="remote" if remote else "pointwise",
            waits=remote,
        )
        videos = framewise(images, Frames(policy="every", count=4, reducer="positive_mean"))
        return replace(images, score=lambda inputs: (images if inputs.videos is None else videos)(inputs))

    def _target(self, prompt: str, metadata: dict[str, Any]) -> tuple[str, str | None]:
        """An item's normalised target, and why the item has failed, if it has."""
        if self.target_field is not None:
            text = metadata.get(self.target_field)
            if not isinstance(text, str):
                return "", "missing_field"
        else:
            match = re.search(self.target_regex, prompt)
            groups = match.groups() if match else ()
            text = (next((g for g in groups if g is not None), "") if groups else match[0]) if match else ""
        target = normalise_text(text, self.normalise)
        if not target and self.on_empty_target == "prompt":
            target = normalise_text(prompt, self.normalise)
        return target, None if target or self.on_empty_target == "blank" else "empty_target"

    def _reading(self, device: torch.device) -> tuple[ReadAll, str, bool]:
        """The reader of images, its name in the version, and whether it waits for another program."""
        if self.judge is not None:
            chat, words = build_chat(self.judge, device=device), self.words()

            def ask_all(images: UInt8[np.ndarray, " b h w 3"]) -> list[str | None]:
                """The text that a vision-language model reads in each image; None if it gave no answer."""
                answers = chat.ask([words.question([image], {}, max_tokens=VLM_TOKENS) for image in images])
                said = [None if answer.error else answer.text.strip() for answer in answers]
                return ["" if text and text.rstrip(".").lower() == NO_TEXT else text for text in said]

            return ask_all, f"vlm:{words.digest}:{chat.version}", is_server(self.judge)
        sure = f"confidence-{self.min_confidence:g}:angle-{self.angle_classifier}"
        readers: queue.SimpleQueue[Reader] = queue.SimpleQueue()
        if self.reader == "paddle":
            readers.put(self._paddle())
            paddle = importlib.import_module("paddle").__version__  # there are several packages of that module
            packages = f"paddleocr-{importlib.metadata.version('paddleocr')}:paddle-{paddle}"
        else:
            readers.put(self._rapidocr())
            files = (importlib.resources.files("rapidocr") / "models").iterdir()  # their versions are in their names
            models = sorted(file.name.removesuffix(".onnx") for file in files if file.name.endswith(".onnx"))
            packages = f"rapidocr-{importlib.metadata.version('rapidocr')}:{'+'.join(models)}"
            packages += f":onnxruntime-{importlib.metadata.version('onnxruntime')}"

        def read_all(images: UInt8[np.ndarray, " b h w 3"]) -> list[str | None]:
            """The text in each image. A reader keeps state while it reads, so each thread borrows its own."""

            def read(image: UInt8[np.ndarray, " h w 3"]) -> str | None:
                try:
                    reader = readers.get_nowait()
                except queue.Empty:
                    reader = self._paddle() if self.reader == "paddle" else self._rapidocr()
                try:
                    return reader(image)
                finally:
                    readers.put(reader)

            if self.workers == 1 or len(images) < 2:
                return [read(image) for image in images]
            with ThreadPoolExecutor(self.workers) as pool:
                return list(pool.map(read, images))

        return read_all, f"{sure}:{packages}", False

    def _rapidocr(self) -> Reader:
        """One reader on one core; it gives None if the network failed on an image."""
        from rapidocr import RapidOCR
        from rapidocr.inference_engine.onnxruntime.main import ONNXRuntimeError

        engine = RapidOCR(
            params={
                "EngineConfig.onnxruntime.intra_op_num_threads": 1,
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
                "Global.log_level": "error",  # it warns of every image without text
                "Global.text_score": self.min_confidence,
                "Global.use_cls": self.angle_classifier,
            }
        )

        def read(image: UInt8[np.ndarray, " h w 3"]) -> str | None:
            try:
                result: Any = engine(np.ascontiguousarray(image[:, :, ::-1]))  # blue first, as OpenCV has it
            except ONNXRuntimeError:
                return None
            # A result of another type, without texts, says that boxes were found and nothing in them could be read.
            return "".join(vars(result).get("txts") or ())

        return read

    def _paddle(self) -> Reader:
        """PaddleOCR 2 on the host, on one core; None if it failed on an image."""
        engine = importlib.import_module("paddleocr").PaddleOCR(
            use_angle_cls=self.angle_classifier, lang="en", use_gpu=False, show_log=False, cpu_threads=1
        )

        def read(image: UInt8[np.ndarray, " h w 3"]) -> str | None:
            try:
                found = engine.ocr(np.ascontiguousarray(image), cls=self.angle_classifier)
            except (RuntimeError, ValueError, IndexError):
                return None
            # A list of lines for each image, None without text; a line is its corners, then its text and confidence.
            lines = (line[1] for line in (found[0] or ())) if found else ()
            return "".join(text for text, sure in lines if sure > self.min_confidence)

        return read


def normalise_text(text: str, normalise: Normalise) -> str:
    """`nospace_lower`: lower case without white space; `nfkc`: case-folded after NFKC, so full-width and
    composed forms agree, likewise; `none`: as it is.
    """
    if normalise == "none":
        return text
    text = unicodedata.normalize("NFKC", text).casefold() if normalise == "nfkc" else text.lower()
    return "".join(text.split())


def text_reward(read: str, target: str, *, substring_ok: bool = True, extra_text_penalty: float = 0.0) -> float:
    """`1 - min(d, n) / n` for a target of n characters, both texts normalised; d is the Levenshtein distance. With
    `substring_ok`, for a target that occurs in what was read, d is `extra_text_penalty` per surplus character: 0 makes
    text around it free, 1 is the distance again."""
    from rapidfuzz.distance import Levenshtein

    if not target:
        raise ValueError("the target is empty, so no share of it can be read: score such items otherwise.")
    if substring_ok and target in read:
        distance = extra_text_penalty * (len(read) - len(target))
    else:
        distance = Levenshtein.distance(read, target)
    return 1.0 - min(distance, len(target)) / len(target)
