"""The texts that judges are asked with: files of words with `{fields}`, shipped with the package or given by the user.

A checkpoint that was trained as a judge gives its published scores only with its published text, because other words
change the score. `templates/published/SOURCE/` holds published texts, byte for byte, with the licence and the commit
they are from; a scorer with a published name asks with them unless its option `template` says otherwise:

    null                       the published text; where there is none to publish, this package's own words
    own                        this package's own words
    published/SOURCE/NAME.txt  another of the published texts
    a path                     a text file of yours; where several texts are asked with, a folder of them

Where a published text may not be shipped, `template` must be given (`NOT_SHIPPED`).

A template is plain UTF-8 text.

- `{prompt}` and the other fields of the question are filled in; braces around anything else stay as they are, so JSON
  needs no escaping.
- `<image>` marks where an image stands. Without any mark all images come first, in the order of the question.
  `\\<image>` is no mark but these seven letters, which some published texts hold.
- A line `=== user ===` ends the system turn. Without it there is none.
- White space at its ends is cut off, but not of a published text.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from flowrl.config.options import unknown_name
from flowrl.config.strict_yaml import read_mapping
from flowrl.rewards.judges.chat import Pixels, Question

IMAGE = "<image>"
USER = "=== user ==="
OWN = "own"
PUBLISHED = "published"
_TABLES = read_mapping(Path(__file__).with_suffix(".yaml"))
NOT_SHIPPED: dict[str, str] = _TABLES["not_shipped"]
"""Source -> where its published texts are, which may not be shipped."""

BLANK: Pixels = np.zeros((1, 1, 3), dtype=np.uint8)
"""Stands for an image where it is checked whether a template has a place for each."""

_MARK = re.compile(r"(?<!\\)<image>")
FIELDS = {name: frozenset(fields) for name, fields in _TABLES["fields"].items()}
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
            parts=self.parts(images, fields),
            system=None if self.system is None else fill(self.system, fields),
            max_tokens=max_tokens,
            temperature=temperature,
            top_logprobs=top_logprobs,
            seed=seed,
        )

    def parts(self, images: Sequence[Pixels], fields: Mapping[str, str]) -> tuple[str | Pixels, ...]:
        """The user turn: texts and images in the order in which they are read."""
        pieces = _MARK.split(self.user)
        # Filled after splitting: a prompt may say <image>, escaped or not.
        texts = [fill(piece.replace(f"\\{IMAGE}", IMAGE), fields) for piece in pieces]
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


def parse_template(text: str, *, exact: bool = False) -> Template:
    """A template's text cut into its turns; `exact` keeps the white space at their ends."""
    system, mark, user = text.replace("\r\n", "\n").partition(f"{USER}\n")
    turns = [system.removesuffix("\n"), user] if exact else [system.strip(), user.strip()]
    return Template(user=turns[1], system=turns[0] or None) if mark else Template(user=system if exact else turns[0])


def template_path(name: str, given: str | None, source: str | None) -> Path:
    """Where a template is, or a folder of templates; see the module. Raises ValueError: the published text may not be
    shipped and no other is given, or it is none of the published ones."""
    shipped = Path(str(resources.files("flowrl.rewards"))) / "templates"
    if given == OWN or (given is None and source is None):
        return shipped / f"{name}.txt"
    if given is None and source in NOT_SHIPPED:
        raise ValueError(
            f"template must be given: the published text is that of {NOT_SHIPPED[source]}, so it is not shipped. Copy "
            f"it into a text file and name it by template, or ask in this package's own words, whose scores are "
            f"others: template: {OWN}."
        )
    if given is None:
        return shipped / PUBLISHED / str(source) / f"{name}.txt"
    if not given.startswith(f"{PUBLISHED}/"):
        return Path(given).expanduser()
    known = sorted(str(path.relative_to(shipped)) for path in (shipped / PUBLISHED).glob("*/*.txt"))
    if given not in known and not any(path.startswith(f"{given.rstrip('/')}/") for path in known):
        raise ValueError(unknown_name("published template", given, known))
    return shipped / given


def published_file(source: str, name: str) -> Path:
    """A file of the shipped published texts that is no template."""
    return Path(str(resources.files("flowrl.rewards"))) / "templates" / PUBLISHED / source / name


def read_template(name: str, given: str | None, *, source: str | None = None, once: Collection[str] = ()) -> str:
    """A template's text exactly as it stands in its file. `given` is the option `template`, see the module; `source`
    the folder of the published text, None where nothing is published; `once` must stand in it exactly once."""
    path = template_path(name, given, source)
    try:
        text = path.read_bytes().decode("utf-8")  # not read_text, which would translate line breaks
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"template {str(path)!r} cannot be read as UTF-8 text ({error}): give a text file, {OWN}, or leave "
            f"template out."
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


def load_template(name: str, given: str | None, *, source: str | None = None, images: int | None = None) -> Template:
    """A template of questions about `images` images each; None leaves the places for them unchecked."""
    text = read_template(name, given, source=source)
    shipped = Path(str(resources.files("flowrl.rewards"))) / "templates" / PUBLISHED  # asked with as they stand
    template = parse_template(text, exact=template_path(name, given, source).is_relative_to(shipped))
    if images is not None:
        template.parts([BLANK] * images, {})
    return template


def load_templates(images: Mapping[str, int], given: str | None, *, source: str | None = None) -> dict[str, Template]:
    """The templates of a reward by name: the shipped ones, or those that take their place.

    Args:
        images: keys of `FIELDS`, and of how many images each asks.
        given: as the module says; a text file where there is one name; else a folder with `NAME.txt` for each replaced.

    Raises ValueError: as `load_template`, a file is given where a folder is needed, or a folder with none of the names.
    """
    files: dict[str, str | None] = dict.fromkeys(images, given)
    if given is not None and given != OWN:
        place = template_path("", given, source)
        if place.is_dir():
            own = {name: place / f"{name}.txt" for name in images}
            if not any(path.is_file() for path in own.values()):
                wanted = ", ".join(path.name for path in own.values())
                raise ValueError(
                    f"template {given!r} is a folder that holds none of the files that are asked with: {wanted}."
                )
            # Its name, not its path: whether a text is a published one goes by that.
            files = {
                name: f"{given.rstrip('/')}/{name}.txt" if path.is_file() or len(images) == 1 else None
                for name, path in own.items()
            }
        elif len(images) > 1:
            raise ValueError(
                f"several templates are asked with: template must be a folder that holds the files to replace, got "
                f"{given!r}."
            )
    return {name: load_template(name, files[name], source=source, images=number) for name, number in images.items()}


def template_name(text: str) -> str:
    """A short hash of a template's text, for a reward's version."""
    return f"template-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def digest_of(templates: Mapping[str, Template]) -> str:
    """A short hash of the words of several templates, for a reward's version."""
    joined = " ".join(f"{name}:{templates[name].digest}" for name in sorted(templates))
    return hashlib.sha256(joined.encode()).hexdigest()[:8]
