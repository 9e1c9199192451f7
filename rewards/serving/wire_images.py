"""Images on the wire: encoded files from anybody, checked before anything is unpacked, and 8-bit RGB arrays.

A video is one lossless file, FFV1 in Matroska: it codes 8-bit RGB without loss (RFC 9043) and is part of every build of
FFmpeg, without another library. PyAV, which holds one, is installed with flowrl.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal

import numpy as np
from PIL import Image

from flowrl.media.reading import BROKEN, as_rgb, open_image
from flowrl.runtime.shapes import UInt8

Pixels = UInt8[np.ndarray, " h w 3"]
ImageFormat = Literal["png", "jpeg95"]

_FORMATS = ("PNG", "JPEG", "WEBP")
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
MOST_CHUNKS = 20_000
"""Chunks of a PNG: 64 MiB in pieces of 8 KiB are 8,192."""
MOST_SEGMENTS, MOST_SCANS = 2_000, 200
"""Segments before the first scan of a JPEG, and its scans: a progressive one has some ten."""


class WireError(ValueError):
    """A request that is refused: the HTTP status, a short word, a sentence for the sender, and when to come back."""

    def __init__(self, status: int, word: str, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.word, self.retry_after = status, word, retry_after


def queue_full(seconds: int) -> WireError:
    """The refusal of a request for which there is no room now."""
    return WireError(429, "queue_full", f"the queue is full, try again in {seconds} s.", retry_after=seconds)


def stopping(message: str) -> WireError:
    """The refusal of a server that stops."""
    return WireError(503, "stopping", message, retry_after=5)


def image_file(image: Pixels, image_format: ImageFormat) -> bytes:
    """An image as a file: PNG, lossless, with zlib's fastest level, since it lives for one request; or JPEG of quality
    95 with colours at full resolution, about a quarter of the bytes."""
    buffer = io.BytesIO()
    if image_format == "png":
        Image.fromarray(image).save(buffer, format="PNG", compress_level=1)
    else:
        Image.fromarray(image).save(buffer, format="JPEG", quality=95, subsampling=0)
    return buffer.getvalue()


def encode_image(image: Pixels, image_format: ImageFormat = "png") -> str:
    """Base64 of `image_file`."""
    return base64.b64encode(image_file(image, image_format)).decode("ascii")


def decode_image(data: bytes, max_pixels: int, where: str = "the image") -> Pixels:
    """An encoded image as 8-bit RGB [H, W, 3], read as `flowrl.media.reading` says.

    The size is read from the header, and nothing is unpacked of an image that is too large.

    Raises WireError: 413 for more pixels than `max_pixels` or Pillow's own guard against decompression bombs allow, 422
    for damaged files and other formats.
    """
    if _has_many_pieces(data):
        raise bad_request(f"{where} is cut into more pieces than an image is")
    try:
        with open_image(io.BytesIO(data), _FORMATS) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise too_large(where, f"{width} x {height} pixels where {max_pixels} are left")
            if image.mode not in _MODES:
                raise bad_request(f"{where} has the pixel format {image.mode}: send 8 bits per channel")
            return np.asarray(as_rgb(image))
    except WireError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise too_large(where, str(error)) from error
    except BROKEN as error:
        raise bad_request(
            f"{where} is not a PNG, JPEG or WebP that can be read ({type(error).__name__}: {short(str(error))})"
        ) from error


def _has_many_pieces(data: bytes) -> bool:
    """Whether a PNG has more chunks, or a JPEG more segments or scans, than images have: each takes a reader time."""
    at, count = (8, 0) if data.startswith(b"\x89PNG") else (2, 0)
    if data.startswith(b"\x89PNG"):
        while at + 8 <= len(data) and count <= MOST_CHUNKS:
            at, count = at + 12 + int.from_bytes(data[at : at + 4], "big"), count + 1
        return count > MOST_CHUNKS
    if data.startswith(b"\xff\xd8"):
        while data[at : at + 1] == b"\xff" and data[at + 1 : at + 2] != b"\xda" and count <= MOST_SEGMENTS:
            at, count = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big"), count + 1
        return count > MOST_SEGMENTS or data.count(b"\xff\xda") > MOST_SCANS
    return False


def short(value: Any) -> str:
    """What a stranger gave, in few letters."""
    text = value if isinstance(value, str) else type(value).__name__ if isinstance(value, (dict, list)) else repr(value)
    text = text.encode(errors="replace").decode()  # half a surrogate pair could not be sent back
    return text if len(text) <= 80 else f"{text[:77]}..."


def bad_request(message: str) -> WireError:
    """Something is not as the format wants it; `message` without its full stop."""
    return WireError(422, "bad_request", f"{message}.")


def too_many_images(message: str) -> WireError:
    """The refusal of a request or a video with too many images; `message` without its full stop."""
    return WireError(413, "too_many_images", f"{message}: send fewer, or raise --max-images.")


def too_large(where: str, message: str) -> WireError:
    """The refusal of an image or video with too many pixels; `message` without its full stop."""
    return WireError(413, "too_many_pixels", f"{where} is too large: {message}.")


# ---- videos ----------------------------------------------------------------------------------------------------------


_CODEC, _CONTAINER = "ffv1", "matroska"
_LAYOUT = "bgr0"  # 8-bit RGB as FFV1 takes it; from and to rgb24 is a change of order


def encode_video(frames: Sequence[Pixels]) -> bytes:
    """Frames of one size as one file; `decode_video` gives the same bits."""
    import av

    buffer = io.BytesIO()
    slices = "4" if min(frames[0].shape[:2]) >= 16 else "1"  # small frames cannot be cut
    with av.open(buffer, "w", format=_CONTAINER) as container:
        stream = container.add_stream(_CODEC, rate=Fraction(25), options={"level": "3", "slices": slices})
        assert isinstance(stream, av.VideoStream)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = _LAYOUT
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24").reformat(format=_LAYOUT)))
        container.mux(stream.encode(None))
    return buffer.getvalue()


def decode_video(data: bytes, max_pixels: int, where: str = "the video", max_frames: int = 4096) -> tuple[Pixels, ...]:
    """The frames of a file of `encode_video`, 8-bit RGB [H, W, 3] each.

    The size of a frame is read from the header, and as many frames are unpacked as `max_pixels` and `max_frames` allow.

    Raises WireError: 413 for more than that, 422 for damaged files and other formats.
    """
    import av

    frames: list[Pixels] = []
    try:
        with av.open(io.BytesIO(data), "r", format=_CONTAINER) as container:
            if len(container.streams) != 1 or len(container.streams.video) != 1:
                raise bad_request(f"{where} must hold one video and nothing else")
            stream = container.streams.video[0]
            context = stream.codec_context
            size = context.width * context.height
            if context.name != _CODEC:
                raise bad_request(f"{where} is coded as {context.name}: send FFV1, which loses nothing")
            if not 0 < size <= max_pixels:
                raise too_large(where, f"frames of {context.width} x {context.height} where {max_pixels} are left")
            for number, packet in enumerate(container.demux(stream)):
                if number > max_frames:  # the last one is empty and has the decoder give what it holds back
                    raise too_many_images(f"{where} has {number} frames or more where {max_frames} images are left")
                for frame in packet.decode():
                    if (len(frames) + 1) * size > max_pixels or frame.width * frame.height != size:
                        count = len(frames) + 1
                        raise too_large(where, f"{count} frames or more of {size} pixels, {max_pixels} are left")
                    if frame.format.name != _LAYOUT:
                        name = frame.format.name
                        raise bad_request(f"{where} has the pixel format {name}: send 8-bit RGB ({_LAYOUT})")
                    frames.append(frame.to_ndarray(format="rgb24"))
    except WireError:
        raise
    except (av.FFmpegError, ValueError, IndexError) as error:
        raise bad_request(
            f"{where} is not FFV1 in Matroska that can be read ({type(error).__name__}: {short(str(error))})"
        ) from error
    if not frames:
        raise bad_request(f"{where} has no frames")
    return tuple(frames)
