"""Source images of a stock call: its argument `image`, what networks make of it, and what latents hold of it.

Networks that read images run once for each source and number of rows, without gradient; an autoencoder gives the mode
of its posterior, where stock may draw from it. Some image-to-video classes hold the first frame of the latents at the
image's and step the others alone: `stepped` says which numbers those are.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from flowrl.media.images import to_pixels
from flowrl.pipelines.shared import common
from flowrl.pipelines.shared.prompt_embeddings import digest
from flowrl.runtime.randomness import counter_normal

KEPT = 16
"""Sources of which what networks made is kept: those that were used last."""
_DIGIT = 256
"""Whole numbers below that are exact in every dtype of latents."""


class StockSources:
    """The source images of prompts, by fingerprints."""

    def __init__(self, count: int) -> None:
        """Of so many images for each prompt."""
        self.count = count
        self.images: dict[str, Sequence[Tensor]] = {}
        self.of: dict[int, str] = {}
        self.kept: OrderedDict[str, dict[Any, Any]] = OrderedDict()
        self.stepped: Tensor | None = None

    def take(self, number: int, images: Sequence[Tensor]) -> None:
        """Has the source images of the prompt of this number."""
        self.of[number] = name = " ".join(map(digest, images))
        self.images.setdefault(name, images)

    def examples(self, count: int, size: tuple[int, int]) -> list[Sequence[Tensor]]:
        """Images for so many prompts to test a pipeline with."""
        return [
            [counter_normal((3, *size), "source", row, place).sigmoid() for place in range(self.count)]
            for row in range(count)
        ]

    def argument(self, name: str, size: tuple[int, int] | None) -> Any:
        """A source as stock calls take it: an image, or a list of several; at a size, where one is given."""
        sized = [one if size is None else common.covering(one, *size) for one in self.images[name]]
        made = [Image.fromarray(to_pixels(one)) for one in sized]
        return made[0] if self.count == 1 else made

    def made_of(self, name: str) -> dict[Any, Any]:
        """Results for a source; forgets the oldest ones."""
        found = self.kept.setdefault(name, {})
        self.kept.move_to_end(name)
        if len(self.kept) > KEPT:
            self.kept.popitem(last=False)
        return found

    @contextmanager
    def remembering(
        self, name: str, rows: int, networks: Mapping[str, nn.Module], device: torch.device
    ) -> Iterator[None]:
        """Inside, the answers of networks to a source, and its autoencoder's latents, are those of the first time."""
        made, times = self.made_of(name), Counter[str]()

        def once(part: str, stock: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(stock)
            def answer(*args: Any, **kwargs: Any) -> Any:
                place = part, rows, times[part]
                times[part] += 1
                if place not in made:
                    with torch.no_grad(), torch.autocast(device.type, enabled=False):
                        made[place] = found = stock(*args, **kwargs)
                    if (posterior := getattr(found, "latent_dist", None)) is not None:
                        vars(posterior)["sample"] = lambda *_, **__: posterior.mode()  # the same in every process
                return made[place]

            return answer

        with ExitStack() as stack:
            for part, network in networks.items():
                member = "encode" if part == "vae" else "forward"
                own = {member: once(part, getattr(network, member))}
                stack.enter_context(common.standing_in(network, **own))
            yield

    def find_stepped(self, shape: Sequence[int], sampled: Callable[[Tensor], Tensor]) -> None:
        """Finds which numbers of latents of this shape a scheduler steps, by `sampled`: what it is handed of some.
        Raises ValueError: it is handed other numbers too."""
        self.stepped, count = None, math.prod(shape)
        numbers, found = torch.arange(count), torch.zeros((), dtype=torch.int64)
        for digit in range(3):
            latents = (numbers // _DIGIT**digit % _DIGIT).float().reshape(1, *shape)
            sample = sampled(latents)
            if sample.shape == latents.shape:
                return
            found = found + sample.detach().cpu().double().round().long() * _DIGIT**digit
        stepped = found.flatten()
        if len(stepped.unique()) != len(stepped) or not 0 <= int(stepped.min()) <= int(stepped.max()) < count:
            raise ValueError("what its scheduler steps is no part of its latents, so that neither can be recorded")
        self.stepped = stepped

    def pick(self, x: Tensor, like: Tensor) -> Tensor:
        """The numbers of latents that a scheduler steps, as it is handed them."""
        return x if self.stepped is None else x.flatten(1)[:, self.stepped.to(x.device)].reshape(like.shape)

    def hold(self, x: Tensor, made: Callable[[], Tensor]) -> Tensor:
        """Latents whose numbers that are not stepped are a source's."""
        if self.stepped is None:
            return x
        held = made().to(x).expand_as(x).flatten(1).clone()
        held[:, self.stepped.to(x.device)] = x.flatten(1)[:, self.stepped.to(x.device)]
        return held.view_as(x)

    def lead(self, velocity: Tensor, x: Tensor, made: Callable[[], Tensor], sigma: float) -> Tensor:
        """The velocity of all numbers: for those that are not stepped it leads straight to a source's."""
        if self.stepped is None:
            return velocity
        led = ((x.float() - made().to(x.device).float()) / sigma).flatten(1)
        return led.index_copy(1, self.stepped.to(x.device), velocity.flatten(1)).view_as(x)
