"""What the generic route keeps of texts, and which of them share a call."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from flowrl.pipelines.generic.stock_texts import Texts, text_id


def _encode(prompt: list[str]) -> tuple[Tensor, Tensor]:
    """Embeddings by row, and one thing for all rows that depends on the prompt beside its shape."""
    embeds = torch.stack([torch.full((4, 2), float(len(text))) for text in prompt])
    place = torch.full((3,), float(prompt[0].startswith("b")), dtype=torch.bfloat16)
    return embeds, place


def test_texts_share_a_call_where_what_is_given_once_for_all_is_the_same() -> None:
    texts = Texts(encode=_encode)
    for text in ("a cat", "a dog at sea", "big cat"):
        texts.keep(text_id(text), _encode([text]), partial(_encode, [text] * 2))
    cat, dog, big = (text_id(text) for text in ("a cat", "a dog at sea", "big cat"))
    assert texts.layouts == (0, None)
    assert texts.kind(cat) == texts.kind(dog)
    assert texts.kind(cat) != texts.kind(big)
    embeds, place = texts.standing_in([cat, dog], None, torch.device("cpu"), [])(prompt=["a cat"])
    assert embeds[:, 0, 0].tolist() == [5.0, 12.0]
    assert place.tolist() == [0.0] * 3
