"""Videos on the wire: one lossless file each, FFV1 in Matroska, checked before anything is unpacked.

FFV1 codes 8-bit RGB without loss (RFC 9043) and is part of every build of FFmpeg, without another library. PyAV, which
holds one, is installed with flowrl.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction

from flowrl.rewards.serving.wire_images import Pixels, WireError, bad_request, short, too_large, too_many_images

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
