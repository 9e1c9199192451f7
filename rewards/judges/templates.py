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
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from flowrl.rewards.judges.chat import Pixels

IMAGE = "<image>"
USER = "=== user ==="

FIELDS: dict[str, frozenset[str]] = {
    "aesthetic": frozenset(),
    "consistency": frozenset(),
    "consistency_edit": frozenset({"criterion"}),
    "edit_following": frozenset({"prompt"}),
    "edit_instruction": frozenset({"prompt"}),
    "edit_quality": frozenset(),
    "edit_score": frozenset({"prompt", "requirement"}),
    "edit_score_plain": frozenset({"prompt"}),
    "final_score": frozenset({"prompt"}),
    "dimensions": frozenset({"prompt"}),
    "principle_list": frozenset({"prompt"}),
    "principle_reasoned": frozenset({"prompt", "principle"}),
    "principle_yes_no": frozenset({"prompt", "principle"}),
    "rational": frozenset({"prompt"}),
    "rational_edit": frozenset({"prompt"}),
    "rubric_propose": frozenset({"prompt"}),
    "rubric_rule": frozenset({"rule"}),
}
"""Shipped templates, and the fields that each must hold, one that replaces it too; other fields it may hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """A user turn with fields to fill in, and the system turn before it."""

    user: str
    system: str | None = None

    @property
    def digest(self) -> str:
        """A short hash of the words, for a reward's version."""
        return hashlib.sha256(f"{self.system}\0{self.user}".encode()).hexdigest()[:8]

    def system_of(self, **fields: str) -> str | None:
        """The system turn with its fields filled in."""
        return None if self.system is None else _fill(self.system, fields)

    def parts(self, images: Sequence[Pixels], **fields: str) -> tuple[str | Pixels, ...]:
        """The user turn: texts and images in the order in which they are read.

        Raises:
            ValueError: if the template marks places for another number of images.
        """
        pieces = self.user.split(IMAGE)
        texts = [_fill(piece, fields) for piece in pieces]  # filled after splitting: a prompt may say <image>
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


def _fill(text: str, fields: dict[str, str]) -> str:
    # One pass: what is filled in is never searched again, so a prompt that says {rule} stays a prompt.
    return re.sub(r"\{(\w+)\}", lambda match: fields.get(match[1], match[0]), text)


def parse_template(text: str) -> Template:
    """A template's text cut into its turns."""
    system, mark, user = text.partition(f"{USER}\n")
    return Template(user=user.strip(), system=system.strip() or None) if mark else Template(user=text.strip())


def load_templates(names: Sequence[str], template: str | None, *, owner: str) -> dict[str, Template]:
    """The templates of a reward by name: the shipped ones, or those that take their place.

    Args:
        names: keys of `FIELDS`.
        template: null for the shipped ones; a text file where there is one name; else a folder with `NAME.txt` for the
            names that it replaces.
        owner: who asks, for messages: "reward 'rubric'".

    Raises:
        ValueError: if a file is not there, is empty, or lacks a field.
    """
    return {name: _load(name, template, alone=len(names) == 1, owner=owner) for name in names}


def digest_of(templates: dict[str, Template]) -> str:
    """A short hash of the words of several templates, for a reward's version."""
    joined = " ".join(f"{name}:{templates[name].digest}" for name in sorted(templates))
    return hashlib.sha256(joined.encode()).hexdigest()[:8]


def _load(name: str, template: str | None, *, alone: bool, owner: str) -> Template:
    path = Path(str(resources.files("flowrl.rewards") / "templates" / f"{name}.txt"))
    if template is not None:
        given = Path(template).expanduser()
        if given.is_dir():
            path = given / f"{name}.txt" if (given / f"{name}.txt").is_file() or alone else path
        elif alone:
            path = given
        else:
            raise ValueError(
                f"{owner} asks with several templates: template must be a folder that holds the files to replace, got "
                f"{template!r}."
            )
    if not path.is_file():
        raise ValueError(f"{owner}: there is no template {str(path)!r}: give a text file, or leave template out.")
    text = path.read_text(encoding="utf-8").strip()
    parsed = parse_template(text)
    if not parsed.user:
        raise ValueError(f"{owner}: the template {str(path)!r} is empty.")
    missing = sorted(field for field in FIELDS[name] if f"{{{field}}}" not in text)
    if missing:
        wanted = ", ".join(f"{{{field}}}" for field in missing)
        raise ValueError(f"{owner}: the template {str(path)!r} must hold {wanted}, so that the judge is told.")
    return parsed
