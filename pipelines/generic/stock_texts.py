"""What a stock `encode_prompt` returned for each text, kept whole, and given back in the place of `encode_prompt`.

Each text is encoded by itself, as the prompt and as the negative prompt of one call, by stock's own call up to there.
What came back is kept by the names of stock's `return`; those with "negative" in them are the negative prompt's. The
dimension in which rows lie is the one that two texts double.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from flowrl.pipelines.generic.stock_call import NEGATIVE
from flowrl.runtime.syntax import parse_python

Text = tuple[Any, ...]
"""What `encode_prompt` returned for one text, a tuple also where it is one thing."""


def text_id(text: str, images: Sequence[str] = ()) -> int:
    """A number of a text and fingerprints of its source images, the same in every process: it stands for them."""
    named = "\0".join([text, *images]).encode("utf-8", "backslashreplace")
    return int.from_bytes(hashlib.sha256(named).digest()[:8], "little", signed=True)


@cache
def returned_names(encode: Callable[..., Any]) -> tuple[str, ...]:
    """Names in the last `return` of a function, from its source; none without its source."""
    try:
        tree = parse_python(inspect.unwrap(encode))
    except (OSError, TypeError, SyntaxError):
        return ()
    found = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return) and node.value is not None]
    if not found:
        return ()
    last = max(found, key=lambda node: node.lineno)
    return tuple(ast.unparse(one) for one in (last.elts if isinstance(last, ast.Tuple) else [last]))


def is_negative(name: str) -> bool:
    """Whether a thing of this name belongs to the negative prompt."""
    return "negative" in name or "uncond" in name


BY_ROW = "by row"
"""How a thing is joined that does not grow with the rows in one of its dimensions: not at all."""


def layout(one: Any, two: Any) -> Any:
    """Where the rows of a value lie, of what one text and twice that text gave. An int is the dimension of a tensor,
    "list" a list with an entry for each row, None what is the same for all rows, a list or dict the layouts of what is
    in it, `BY_ROW` what cannot be joined."""
    if type(one) is not type(two):
        return BY_ROW
    if isinstance(one, Tensor):
        return _rows_in(one.shape, two.shape)
    if isinstance(one, (list, tuple)):
        if len(two) == 2 * len(one):
            return "list"
        return [layout(a, b) for a, b in zip(one, two, strict=True)] if len(one) == len(two) else BY_ROW
    if isinstance(one, dict):
        return {key: layout(value, two[key]) for key, value in one.items()} if one.keys() == two.keys() else BY_ROW
    return None if one == two else BY_ROW


def _rows_in(one: torch.Size, two: torch.Size) -> Any:
    """The dimension that two rows double, as `layout` says it."""
    if len(one) != len(two):
        return BY_ROW
    different = [d for d, (a, b) in enumerate(zip(one, two, strict=True)) if a != b]
    if not different:
        return None
    return different[0] if len(different) == 1 and two[different[0]] == 2 * one[different[0]] else BY_ROW


def join(values: Sequence[Any], where: Any, device: torch.device, floats: torch.dtype | None) -> Any:
    """Rows of values with one layout, on a device; numbers that are not whole in another dtype if one is given."""
    first = values[0]
    if isinstance(where, int):
        return _send(torch.cat(list(values), dim=where), device, floats)
    if where == "list":
        return type(first)(_send(part, device, floats) for value in values for part in value)
    if isinstance(where, list):
        return type(first)(join([value[k] for value in values], own, device, floats) for k, own in enumerate(where))
    if isinstance(where, dict):
        return {key: join([value[key] for value in values], own, device, floats) for key, own in where.items()}
    return _send(first, device, floats)


def alike(value: Any, where: Any) -> Any:
    """What has to be equal of two values for their rows to be in one call: shapes, and what is given once for all."""
    if isinstance(value, Tensor):
        own = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if where is None else b""
        return tuple(value.shape), own
    if isinstance(value, (list, tuple)):
        inner = where if isinstance(where, list) else [where] * len(value)
        return tuple(alike(part, own) for part, own in zip(value, inner, strict=True))
    if isinstance(value, dict):
        return tuple(
            (key, alike(part, where[key] if isinstance(where, dict) else where)) for key, part in value.items()
        )
    return value


def _send(value: Any, device: torch.device | str, floats: torch.dtype | None = None) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, floats if floats is not None and value.is_floating_point() else value.dtype)
    if isinstance(value, (list, tuple)):
        return type(value)(_send(part, device, floats) for part in value)
    if isinstance(value, dict):
        return {key: _send(part, device, floats) for key, part in value.items()}
    return value


@dataclass(kw_only=True, slots=True)
class Texts:
    """Encoded texts, by their numbers."""

    encode: Callable[..., Any]
    """The stock function, bound."""
    rows: dict[int, Text] = field(default_factory=dict)
    """What each text gave, on the host."""
    layouts: tuple[Any, ...] = ()
    """Of what it returns, one for each; empty before the first text."""
    names: tuple[str, ...] = ()
    """Of what it returns."""
    bare: bool = False
    """Whether it returns one thing, not a tuple."""
    freed: bool = False
    """Whether the encoders are gone."""

    def keep(self, number: int, one: Any, two: Callable[[], Any]) -> None:
        """Keeps what a text gave; `two` gives what it gives twice in one call, which is asked for the first text."""
        self.bare = not isinstance(one, tuple)
        found = tuple(_send(part, "cpu") for part in ((one,) if self.bare else one))
        if not self.layouts:
            names = returned_names(self.encode.__func__ if inspect.ismethod(self.encode) else self.encode)
            self.names = names if len(names) == len(found) else tuple(f"part {k}" for k in range(len(found)))
            try:
                twice = two()
                twice = (twice,) if self.bare else twice
                self.layouts = tuple(layout(a, _send(b, "cpu")) for a, b in zip(found, twice, strict=True))
            except (ValueError, TypeError, RuntimeError, IndexError):  # it takes one prompt at a time
                self.layouts = (BY_ROW,) * len(found)
        self.rows[number] = found

    def of(self, number: int) -> Text:
        """What a text gave. Raises ValueError: it was not encoded here."""
        if number not in self.rows:
            raise ValueError("a prompt was not encoded by this pipeline: encode it here, in this process, first")
        return self.rows[number]

    def kind(self, number: int) -> Any:
        """Texts of one kind can be in one call."""
        text = self.of(number)
        return number if _has_by_row(list(self.layouts)) else alike(text, list(self.layouts))

    def standing_in(
        self,
        prompts: Sequence[int],
        negatives: Sequence[int] | None,
        device: torch.device,
        heard: list[bool],
        floats: torch.dtype | None = None,
    ) -> Callable[..., Any]:
        """Returns what `encode_prompt` would for these texts; `heard` gets whether each call asked for negatives."""
        signature = inspect.signature(self.encode)

        def encode_prompt(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            text = given.get("prompt", next(iter(given.values()), None))
            text = text[0] if isinstance(text, (list, tuple)) else text
            if text == NEGATIVE:
                heard.append(True)
                return self._joined(prompts if negatives is None else negatives, None, device, floats)
            against = given.get("negative_prompt")
            against = against[0] if isinstance(against, (list, tuple)) and against else against
            reads = against == NEGATIVE and bool(given.get("do_classifier_free_guidance", True))
            heard.append(reads and any(map(is_negative, self.names)))
            return self._joined(prompts, negatives if reads else None, device, floats)

        return encode_prompt

    def _joined(
        self, prompts: Sequence[int], negatives: Sequence[int] | None, device: torch.device, floats: torch.dtype | None
    ) -> Any:
        found = []
        for k, (name, where) in enumerate(zip(self.names, self.layouts, strict=True)):
            of = negatives if is_negative(name) else prompts
            found.append(None if of is None else join([self.of(n)[k] for n in of], where, device, floats))
        return found[0] if self.bare else tuple(found)


def _has_by_row(where: Any) -> bool:
    if isinstance(where, (list, dict)):
        return any(_has_by_row(own) for own in (where.values() if isinstance(where, dict) else where))
    return bool(where == BY_ROW)
