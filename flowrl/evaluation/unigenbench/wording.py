"""The words of UniGenBench's questions to a judge: a template, and the meaning of each test point.

One question per image. Its words come from a template with the fields {prompt}, {testpoints} (a Python list),
{definitions} and {descriptions} (a line "test point: text" for each); `<image>` marks the place of the image. Without
the mark the image comes first, or last if the judge is a hosted Gemini, as in the published code.

Template and definitions are the published ones (CC BY 4.0, `rewards/templates/published/unigenbench`), on which its
offline judges were trained: other words make another judge. Options `template` and `definitions` replace them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flowrl.benchmarks.unigenbench.items import MEANINGS, Item, Language
from flowrl.rewards.judges.chat import Question, array_schema, object_schema
from flowrl.rewards.judges.templates import IMAGE, OWN, Template, load_template, published_file
from flowrl.runtime.files import read_json

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
