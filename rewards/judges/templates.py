"""The texts that judges are asked with: files of words with `{fields}`, shipped with the package or given by the user.

A checkpoint that was trained as a judge gives its published scores only with its published template, because other
words change the score. The texts in `templates/` are our own; copy a checkpoint's template from its repository into a
file and name it by the reward's option `template`.

A template is plain UTF-8 text.

- `{prompt}` and the other fields of the question are filled in; braces around anything else stay as they are, so JSON
  needs no escaping.
- `<image>` marks where an image stands. Without any mark all images come first, in the order of the question.
- A line `=== user ===` ends the system turn. Without it there is none.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from flowrl.rewards.judges.chat import Pixels, Question

IMAGE = "<image>"
USER = "=== user ==="

BLANK: Pixels = np.zeros((1, 1, 3), dtype=np.uint8)
"""Stands for an image where it is checked whether a template has a place for each."""

_NEEDED: dict[str, tuple[str, ...]] = {
    "": ("aesthetic", "anomaly", "consistency", "edit_quality", "yes_no"),
    "criterion": ("consistency_edit",),
    "prompt": (
        "dimensions", "edit_following", "edit_instruction", "edit_score_plain", "final_score", "pairwise",
        "pairwise_edit", "pairwise_video", "principle_list", "rational", "rational_edit", "rubric_propose",
    ),
    "prompt principle": ("principle_reasoned", "principle_yes_no"),
    "prompt requirement": ("edit_score",),
    "prompt testpoints definitions descriptions": ("unigenbench_en", "unigenbench_zh"),
    "question": ("one_word",),
    "rule": ("rubric_rule",),
}  # fmt: skip
FIELDS = {name: frozenset(fields.split()) for fields, names in _NEEDED.items() for name in names}
"""Shipped templates, and the fields that each must hold, as must one that replaces it; other fields it may hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """A user turn with fields to fill in, and the system turn before it."""

    user: str
    system: str | None = None

    @property
    def digest(self) -> str:
        """A short hash of the words, for a reward's version."""
        return hashlib.sha256(f"{self.system}\0{self.user}".encode()).hexdigest()[:8]

    def question(
        self,
        images: Sequence[Pixels],
        fields: Mapping[str, str],
        *,
        max_tokens: int = 1,
        temperature: float = 0.0,
        top_logprobs: int = 0,
        seed: int | None = None,
    ) -> Question:
        """What a judge is asked about some images; for the settings see `Question`."""
        return Question(
            parts=self.parts(images, fields), system=None if self.system is None else fill(self.system, fields),
            max_tokens=max_tokens, temperature=temperature, top_logprobs=top_logprobs, seed=seed,
        )  # fmt: skip

    def parts(self, images: Sequence[Pixels], fields: Mapping[str, str]) -> tuple[str | Pixels, ...]:
        """The user turn: texts and images in the order in which they are read.

        Raises:
            ValueError: if the template marks places for another number of images.
        """
        pieces = self.user.split(IMAGE)
        texts = [fill(piece, fields) for piece in pieces]  # filled after splitting: a prompt may say <image>
        if len(pieces) == 1:
            return (*images, texts[0])
        if len(pieces) - 1 != len(images):
            raise ValueError(
                f"the template marks {len(pieces) - 1} places with {IMAGE}, and the question has {len(images)} "
                f"images: mark as many places, or none to have all images first."
            )
        mixed: list[str | Pixels] = [texts[0]]
        for image, text in zip(images, texts[1:], strict=True):
            mixed += [image, text]
        return tuple(part for part in mixed if not isinstance(part, str) or part.strip())


def fill(text: str, fields: Mapping[str, str]) -> str:
    """A text with `{name}` replaced for every name among the fields; other braces stay as they are."""
    # One pass: what is filled in is never searched again, so a prompt that says {rule} stays a prompt.
    return re.sub(r"\{(\w+)\}", lambda match: fields.get(match[1], match[0]), text)


def parse_template(text: str) -> Template:
    """A template's text cut into its turns."""
    system, mark, user = text.replace("\r\n", "\n").partition(f"{USER}\n")
    return Template(user=user.strip(), system=system.strip() or None) if mark else Template(user=system.strip())


def read_template(name: str, given: str | None, *, once: Collection[str] = ()) -> str:
    """A template's text exactly as it stands in its file.

    Args:
        name: a shipped template.
        given: the user's file that takes its place, None for the shipped one.
        once: what must stand in it exactly once.

    Raises:
        ValueError: if it cannot be read, is empty, or lacks a field.
    """
    path = Path(str(resources.files("flowrl.rewards") / "templates" / f"{name}.txt"))
    path = path if given is None else Path(given).expanduser()
    try:
        text = path.read_bytes().decode("utf-8")  # not read_text, which would translate line breaks
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"template {str(path)!r} cannot be read as UTF-8 text ({error}): give a text file, or leave template out."
        ) from error
    if not parse_template(text).user:
        raise ValueError(f"the template {str(path)!r} is empty.")
    if missing := sorted(field for field in FIELDS.get(name, ()) if f"{{{field}}}" not in text):
        wanted = ", ".join(f"{{{field}}}" for field in missing)
        raise ValueError(f"the template {str(path)!r} must hold {wanted}, so that the judge is told.")
    for piece in once:
        if (count := text.count(piece)) != 1:
            raise ValueError(f"template {str(path)!r} must hold {piece} exactly once, it is there {count} times.")
    return text


def load_template(name: str, given: str | None, *, images: int | None = None) -> Template:
    """A template of questions about `images` images each; None leaves the places for them unchecked.

    Raises:
        ValueError: as `read_template`, or it marks places for another number of images.
    """
    template = parse_template(read_template(name, given))
    if images is not None:
        template.parts([BLANK] * images, {})
    return template


def load_templates(images: Mapping[str, int], given: str | None) -> dict[str, Template]:
    """The templates of a reward by name: the shipped ones, or those that take their place.

    Args:
        images: keys of `FIELDS`, and of how many images each asks.
        given: null for the shipped ones; a text file where there is one name; else a folder with `NAME.txt` for the
            names that it replaces.

    Raises:
        ValueError: as `load_template`, or a file is given where a folder is needed.
    """
    files: dict[str, str | None] = dict.fromkeys(images, given)
    if given is not None and Path(given).expanduser().is_dir():
        own = {name: Path(given).expanduser() / f"{name}.txt" for name in images}
        files = {name: str(path) if path.is_file() or len(images) == 1 else None for name, path in own.items()}
    elif given is not None and len(images) > 1:
        raise ValueError(
            f"several templates are asked with: template must be a folder that holds the files to replace, got "
            f"{given!r}."
        )
    return {name: load_template(name, files[name], images=number) for name, number in images.items()}


def template_name(text: str) -> str:
    """A short hash of a template's text, for a reward's version."""
    return f"template-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def digest_of(templates: Mapping[str, Template]) -> str:
    """A short hash of the words of several templates, for a reward's version."""
    joined = " ".join(f"{name}:{templates[name].digest}" for name in sorted(templates))
    return hashlib.sha256(joined.encode()).hexdigest()[:8]
