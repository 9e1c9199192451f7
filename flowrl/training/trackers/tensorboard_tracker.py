"""TensorBoard: event files in a folder of the run folder."""

from __future__ import annotations

import io
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from flowrl.media.images import to_pixels
from flowrl.media.lossless import read_clip, read_rate
from flowrl.media.reading import image_size
from flowrl.training.trackers.tracker import TENSORBOARD, Numbers, Sample


class TensorBoardTracker:
    """Numbers as scalars, each sample as an image with a slider over evaluations; a video is a GIF, which it plays."""

    name = "TensorBoard"

    def __init__(self, folder: Path, config: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._hook = threading.excepthook
        threading.excepthook = self._of_thread
        try:
            self._writer: Any = SummaryWriter(str(folder / TENSORBOARD))
            self._writer.add_text("config", f"```yaml\n{config}\n```")
        except BaseException:
            threading.excepthook = self._hook
            raise

    def log(self, iteration: int, numbers: Numbers) -> None:
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, iteration)
        self._writer.flush()

    def show(self, iteration: int, samples: Sequence[Sample]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        for sample in samples:
            width, height = image_size(sample.image)
            encoded = sample.image.read_bytes()
            if sample.video is not None:
                encoded, width, height = as_gif(sample.video)
            image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=encoded)
            tag = f"samples/{sample.number} {sample.prompt[:80]}"
            self._writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), iteration)
        self._writer.flush()

    def close(self, report: Path | None, *, failed: bool) -> None:
        try:
            self._writer.flush()  # raises what the thread that writes has met
            self._writer.close()
        finally:
            if threading.excepthook == self._of_thread:
                threading.excepthook = self._hook

    def _of_thread(self, raised: threading.ExceptHookArgs) -> None:
        """Prints nothing of the thread that writes: what it met is raised by the next call here, and told then."""
        frames = traceback.walk_tb(raised.exc_traceback)
        if not any(str(frame.f_globals.get("__name__", "")).startswith("tensorboard.") for frame, _ in frames):
            self._hook(raised)


def as_gif(video: Path) -> tuple[bytes, int, int]:
    """A silent GIF of an MP4 at its own pace, its width and its height."""
    frames = [Image.fromarray(to_pixels(frame)) for frame in read_clip(video)]
    rate = read_rate(video) or 8
    out = io.BytesIO()
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:], duration=round(1000 / rate), loop=0)
    return out.getvalue(), *frames[0].size
