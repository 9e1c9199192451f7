"""Which trackers a configuration asks for, and each of them.

TensorBoard: event files in a folder of the run folder. Weights & Biases: online, or into `wandb/` of the run folder for
`wandb sync` later. trackio: a database on this machine, or a Space on the hub.
"""

from __future__ import annotations

import importlib.util
import io
import os
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from PIL import Image

from flowrl.media.images import to_pixels
from flowrl.media.lossless import read_clip, read_rate
from flowrl.media.reading import image_size
from flowrl.runtime.extras import check_extra
from flowrl.runtime.scrubbing import settings_without_secrets, without_secrets
from flowrl.training.trackers.tracker import TENSORBOARD, Numbers, Sample, Tracker, Trackers


def check_trackers(wandb: str, trackio: str, tensorboard: bool | None = None) -> None:
    """Refuses trackers of the section `logging` that cannot work, before anything loads."""
    if tensorboard:
        check_extra("tensorboard", "logging.tensorboard=true")
    if wandb != "none":
        check_wandb(wandb)
    if trackio != "none":
        if importlib.util.find_spec("trackio") is None:
            raise ValueError(
                f"logging.trackio={trackio} needs the package trackio, which is not installed: docs/trackers.md says "
                "how to install it beside flowrl, or logging.trackio=none"
            )
        if trackio != LOCAL and (trackio.count("/") != 1 or not all(trackio.split("/"))):
            raise ValueError(f"logging.trackio={trackio}: allowed are none, local, or a Space of the hub as OWNER/NAME")


def open_trackers(settings: Mapping[str, Any], text: str, folder: Path, *, run: str, resumed: bool) -> Trackers:
    """Opens them on the main process. Settings are sections as mappings, `text` the configuration's, and `run` the
    identity that it keeps when it is continued. Raises ValueError: a distant tracker refuses or does not answer."""
    own, shown = settings["logging"], dict[str, Any](settings_without_secrets(settings))
    found: list[Tracker] = []
    if own["tensorboard"] or (own["tensorboard"] is None and importlib.util.find_spec("tensorboard") is not None):
        found.append(TensorBoardTracker(folder, without_secrets(text)))
    try:
        project = own["project"]
        if own["wandb"] != "none":
            online = own["wandb"] == "online"
            found.append(WandbTracker(folder, shown, run=run, online=online, project=project, entity=own["entity"]))
        if own["trackio"] != "none":
            found.append(TrackioTracker(folder, shown, space=own["trackio"], project=project, resumed=resumed))
    except Exception as error:  # their servers, keys and quotas: whatever they raise, nothing was trained yet
        Trackers(found).close(failed=True)
        raise ValueError(
            f"a tracker could not be started: {error}. Nothing was trained; logging.wandb=offline and "
            "logging.trackio=local need no server"
        ) from error
    return Trackers(found)


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
        """Prints nothing of the writing thread: the next call here raises its error."""
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


LOCAL = "local"


class TrackioTracker:
    """A run by its folder's name; `trackio show --project PROJECT` opens it. It cannot hold the report."""

    name = "trackio"

    def __init__(self, folder: Path, config: Mapping[str, Any], *, space: str, project: str, resumed: bool) -> None:
        import trackio

        self._trackio: Any = trackio
        self._run: Any = trackio.init(
            project=project,
            name=folder.name,
            space_id=None if space == LOCAL else space,
            config=dict(config),
            resume="allow" if resumed else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, iteration: int, numbers: Numbers) -> None:
        self._run.log(dict(numbers), step=iteration)

    def show(self, iteration: int, samples: Sequence[Sample]) -> None:
        shown: dict[str, Any] = {}
        for sample in samples:
            made = self._trackio.Image if sample.video is None else self._trackio.Video
            shown[f"samples/{sample.number}"] = made(str(sample.video or sample.image), caption=sample.prompt)
        self._run.log(shown, step=iteration)

    def close(self, report: Path | None, *, failed: bool) -> None:
        self._run.finish()


class WandbTracker:
    """A run by the manifest's identity, so that a continued run goes on there. Numbers are plotted over `iteration`,
    not W&B's count of calls: repeated iterations fall on the same place, where W&B would drop them as late. It sends
    neither code nor terminal output."""

    name = "Weights & Biases"

    def __init__(
        self, folder: Path, config: Mapping[str, Any], *, run: str, online: bool, project: str, entity: str | None
    ) -> None:
        import wandb

        self._wandb: Any = wandb
        settings = wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, save_code=False, disable_job_creation=True
        )
        self._run: Any = wandb.init(
            project=project,
            entity=entity,
            dir=str(folder),
            id=run,
            name=folder.name,
            config=dict(config),
            mode="online" if online else "offline",
            resume="allow" if online else None,
            settings=settings,
        )
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def log(self, iteration: int, numbers: Numbers) -> None:
        self._run.log({"iteration": iteration, **numbers})

    def show(self, iteration: int, samples: Sequence[Sample]) -> None:
        shown: dict[str, Any] = {}
        for sample in samples:
            key = f"samples/{sample.number}"
            if sample.video is None:
                shown[key] = self._wandb.Image(str(sample.image), caption=sample.prompt)
            else:
                shown[key] = self._wandb.Video(str(sample.video), caption=sample.prompt, format="mp4")
        self._run.log({"iteration": iteration, **shown})

    def close(self, report: Path | None, *, failed: bool) -> None:
        if report is not None:
            self._run.log({"report": self._wandb.Html(report.read_text(encoding="utf-8"), inject=False)})
        self._run.finish(exit_code=int(failed))


def check_wandb(mode: str) -> None:
    """Refuses what W&B would ask about on a terminal, or fail at, during a start. Raises ValueError: it is
    not installed, or `online` has no key."""
    try:
        import wandb
    except ImportError:
        raise ValueError(
            f"logging.wandb={mode} needs the package wandb, which is not installed: in flowrl's folder, pip "
            "install -e '.[wandb]', or logging.wandb=none"
        ) from None
    with redirect_stderr(io.StringIO()):  # on which it calls its own way to ask deprecated
        key = mode == "online" and (os.environ.get("WANDB_API_KEY") or wandb.api.api_key)
    if mode == "online" and not key:
        raise ValueError(
            "logging.wandb=online has no key: run 'wandb login', or set WANDB_API_KEY; logging.wandb=offline needs "
            "none and is sent later by 'wandb sync'"
        )
