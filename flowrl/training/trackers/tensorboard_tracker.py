"""TensorBoard: event files in `tensorboard/` of the run folder."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from flowrl.training.trackers.tracker import Numbers, Sample


class TensorBoardTracker:
    """Numbers as scalars, each sample as an image with a slider over evaluations; a video is a GIF, which it plays."""

    name = "TensorBoard"

    def __init__(self, folder: Path, config: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))
        self._config = config

    def log(self, iteration: int, numbers: Numbers) -> None:
        if self._config:
            self._writer.add_text("config", f"```yaml\n{self._config}\n```")
            self._config = ""
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, iteration)
        self._writer.flush()

    def show(self, iteration: int, samples: Sequence[Sample]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        for sample in samples:
            with Image.open(sample.image) as still:
                width, height = still.size
            encoded = sample.image.read_bytes()
            if sample.video is not None:
                encoded, width, height = as_gif(sample.video)
            image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=encoded)
            tag = f"samples/{sample.number} {sample.prompt[:80]}"
            self._writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), iteration)
        self._writer.flush()

    def close(self, report: Path | None, *, failed: bool) -> None:
        self._writer.close()


def as_gif(video: Path) -> tuple[bytes, int, int]:
    """A silent GIF of an MP4 at its own pace, its width and its height."""
    import av

    with av.open(str(video)) as file:
        rate = float(file.streams.video[0].average_rate or 8)
        frames = [Image.fromarray(frame.to_ndarray(format="rgb24")) for frame in file.decode(video=0)]
    out = io.BytesIO()
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:], duration=round(1000 / rate), loop=0)
    return out.getvalue(), *frames[0].size
