"""Images as they travel to a judge: data addresses of files, each distinct image encoded once.

    images = EncodedImages(questions, "jpeg95", threads)
    part = await images.part(image)          # the JSON of the image's part of a message

What each format costs is in docs/serving.md.
"""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterable
from concurrent.futures import Executor, Future

import numpy as np
from PIL import Image

from flowrl.rewards.judges.chat import JudgeImageFormat, Question

_COARSE = 16  # every so many pixels of a side are looked at before two images are compared in full


class EncodedImages:
    """The images of some questions, which are encoded in threads from the moment on that this is made."""

    def __init__(self, questions: Iterable[Question], image_format: JudgeImageFormat, threads: Executor) -> None:
        self._parts: dict[int, Future[bytes]] = {}  # by identity of the array, which the questions keep alive
        alike: dict[tuple[object, ...], list[np.ndarray]] = {}
        for question in questions:
            for image in question.parts:
                if isinstance(image, str) or id(image) in self._parts:
                    continue
                # Who reads an image again for each question gives arrays of one content. A digest of all of it would
                # cost as much as the encoder: few images look alike on a coarse grid, and those are compared.
                others = alike.setdefault((image.shape, image[::_COARSE, ::_COARSE].tobytes()), [])
                same = next((other for other in others if np.array_equal(other, image)), None)
                if same is None:
                    others.append(image)
                    self._parts[id(image)] = threads.submit(image_part, image, image_format)
                else:
                    self._parts[id(image)] = self._parts[id(same)]

    async def part(self, image: np.ndarray) -> bytes:
        """The JSON of an image's part of a message, once it is there."""
        part = self._parts[id(image)]
        return part.result() if part.done() else await asyncio.wrap_future(part)


def image_part(image: np.ndarray, image_format: JudgeImageFormat) -> bytes:
    """An 8-bit image [H, W, 3] as JSON of a message's part, which holds the file in base64."""
    # What else is to be done to an image before it is sent, such as another size, belongs here.
    file = io.BytesIO()
    shown = Image.fromarray(image)
    if image_format == "png":
        shown.save(file, format="PNG", compress_level=1)  # the pixels are the same at every level
    elif image_format == "webp":
        shown.save(file, format="WEBP", lossless=True, method=0, quality=0)
    else:
        shown.save(file, format="JPEG", quality=95)
    kind = "jpeg" if image_format == "jpeg95" else image_format
    return b"".join(
        (
            b'{"type": "image_url", "image_url": {"url": "data:image/',
            kind.encode(),
            b";base64,",
            base64.b64encode(file.getbuffer()),
            b'"}}',
        )
    )
