"""Videos on disk and as contact sheets, and the samples that an evaluation leaves for people."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from flowrl.media import lossless, videos
from flowrl.media.images import as_tensor, beside, enlargement, evenly, fit, to_pixels
from flowrl.media.kept import write_samples
from flowrl.media.videos import contact_row, contact_sheet, save_mp4

COLORS = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [1, 1, 1], [0, 0, 0], [0.8, 0.35, 0.1]])


def levels(frames: int, height: int = 16, width: int = 16) -> Tensor:
    """Frame k is grey of level k * 10 of 255, so that a frame tells its number."""
    level = torch.arange(frames, dtype=torch.float32) * 10 / 255
    return level.reshape(-1, 1, 1, 1).expand(frames, 3, height, width)


def numbers(video: Tensor) -> list[int]:
    """The numbers of frames of `levels`, read from their middles."""
    return [round(float(frame[:, 8, 8].mean()) * 25.5) for frame in video]


def frames_of(path: Path) -> Tensor:
    """The frames of a clip as a player shows them."""
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).float() / 255


def image(path: Path) -> Tensor:
    with Image.open(path) as image:
        return as_tensor(image)


def test_clip_is_what_every_browser_plays_and_keeps_colours_rate_and_frames(tmp_path: Path) -> None:
    stripes = COLORS.T.repeat_interleave(32, 1)[:, None].expand(3, 128, 224)
    video = torch.stack([stripes, stripes.flip(-1), stripes])
    path = save_mp4(video, tmp_path / "deep" / "clip.mp4", fps=12.5)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.pix_fmt) == ("h264", "yuv420p")
        assert (stream.average_rate, stream.frames) == (Fraction(25, 2), 3)
        assert (stream.codec_context.colorspace, stream.codec_context.color_range) == (1, 1)  # BT.709, 16 to 235
    content = path.read_bytes()
    assert content.index(b"moov") < content.index(b"mdat")  # plays before it is loaded
    assert [p.name for p in path.parent.iterdir()] == ["clip.mp4"]
    found = frames_of(path)
    assert found.shape == video.shape
    middles = slice(16, None, 32)
    assert (found[:, :, 64, middles] - video[:, :, 64, middles]).abs().max() < 4 / 255


@pytest.mark.slow
def test_same_frames_give_the_same_bytes(tmp_path: Path) -> None:
    video = torch.rand(17, 3, 50, 70, generator=torch.Generator().manual_seed(0)) * 0.2 + levels(17, 50, 70)
    written = set()
    for number in range(5):
        ballast = [bytearray(1000 * number + k) for k in range(50)]  # another place in memory each time
        written.add(save_mp4(video, tmp_path / f"{number}.mp4", fps=8).read_bytes())
        del ballast
    assert len(written) == 1


@pytest.mark.parametrize(
    ("height", "width", "shape"),
    [
        (64, 64, (192, 192)),  # below 128: whole factor, at least 192
        (64, 100, (192, 300)),
        (127, 200, (254, 400)),
        (128, 200, (128, 200)),
        (129, 131, (130, 132)),  # odd: one more row and column
        (65, 67, (196, 202)),
    ],
)
def test_sizes_on_disk(tmp_path: Path, height: int, width: int, shape: tuple[int, int]) -> None:
    path = save_mp4(levels(2, height, width), tmp_path / "clip.mp4", fps=8)
    assert frames_of(path).shape[-2:] == shape


def test_enlarged_pixels_are_repeated_and_odd_edges_too(tmp_path: Path) -> None:
    ramp = torch.linspace(0.1, 0.9, 5).repeat_interleave(27).expand(1, 3, 135, 135)  # cells of 27 pixels, odd size
    found = frames_of(save_mp4(ramp, tmp_path / "clip.mp4", fps=8))
    assert found.shape[-1] == 136
    assert (found[..., -1] - ramp[..., -1, None].mean()).abs().max() < 0.04
    assert (found[..., :135, 13:135:27] - ramp[..., 13:135:27]).abs().max() < 0.04
    small = ramp[..., ::27, ::27]
    assert torch.equal(fit(small, 10)[0, 0, 0, ::39], small[0, 0, 0])  # 5 -> 195


def test_a_failed_write_leaves_the_old_clip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_mp4(levels(2), tmp_path / "clip.mp4", fps=8)
    old = path.read_bytes()

    def broken(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(lossless, "write_sound", broken)
    with pytest.raises(OSError, match="disk full"):
        save_mp4(levels(3), path, fps=8, sound=(torch.zeros(1, 800), 8000))
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("video", "options", "message"),
    [
        (torch.zeros(3, 8, 8), {}, r"shape \[F, 3, H, W\].*got \[3, 8, 8\]"),
        (torch.zeros(3, 5, 8, 8), {}, "frames first"),
        (torch.zeros(0, 3, 8, 8), {}, "F >= 1"),
        (torch.full((2, 3, 8, 8), 1.5), {}, r"lie in \[0, 1\]"),
        (torch.full((2, 3, 8, 8), torch.nan), {}, "not finite"),
        (torch.zeros(2, 3, 8, 8), {"fps": 0.0}, r"fps must be a number above 0, got 0.0"),
        (torch.zeros(2, 3, 8, 8), {"fps": float("inf")}, r"above 0, got inf"),
    ],
)
def test_bad_videos_are_refused(tmp_path: Path, video: Tensor, options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        save_mp4(video, tmp_path / "clip.mp4", fps=options.get("fps", 8.0))
    assert not list(tmp_path.iterdir())


def test_missing_encoder_is_an_error_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(videos, "ENCODERS", ("h264_of_nobody",))
    with pytest.raises(ValueError, match=r"h264_of_nobody.*pip install"):
        save_mp4(levels(2), tmp_path / "clip.mp4", fps=8)


@pytest.mark.parametrize(
    ("total", "count", "places"), [(5, 1, [0]), (5, 5, [0, 1, 2, 3, 4]), (81, 5, [0, 20, 40, 60, 80]), (2, 2, [0, 1])]
)
def test_places_include_the_first_and_the_last(total: int, count: int, places: list[int]) -> None:
    assert evenly(total, count) == places


def test_contact_row_enlarges_small_frames_and_reduces_large_ones() -> None:
    row = contact_row(levels(9))
    side = 16 * enlargement(16, 16)
    assert side == 192
    assert row.shape == (3, side, 5 * side + 4 * 4)
    assert [round(float(row[0, 0, k * (side + 4)]) * 25.5) for k in range(5)] == [0, 2, 4, 6, 8]
    assert (row[:, :, side : side + 4] == 1).all()
    wide = contact_row(torch.rand(5, 3, 240, 416, generator=torch.Generator().manual_seed(0)))
    assert wide.shape == (3, 185, 5 * 320 + 4 * 4)  # five frames in about 1600 pixels, 240 * 320 / 416 high
    assert contact_row(levels(2)).shape == (3, side, 2 * side + 4)  # all that there are


def test_contact_sheet_has_one_row_per_clip_between_numbers_and_captions() -> None:
    clips = torch.stack([levels(9), levels(9).flip(0)])
    plain = contact_sheet(clips)
    sheet = contact_sheet(clips, captions=["short", "word " * 90])
    assert sheet.shape[-1] == plain.shape[-1] == contact_row(levels(9)).shape[-1] + 2 * 16
    assert sheet.shape[-2] > plain.shape[-2] + 3 * 12  # one line and several
    heading = plain.shape[-2] - 2 * (192 + 16) - 16
    assert heading > 12
    first = plain[0, heading + 16 + 96]
    assert [round(float(first[16 + 96 + k * 196]) * 25.5) for k in range(5)] == [0, 2, 4, 6, 8]
    assert float(plain[0, heading + 2 * 16 + 192 + 96, 16]) * 25.5 == pytest.approx(8, abs=0.01)  # the second, reversed
    columns = plain[:, :heading].mean(0).min(0).values  # ink of "frame 1" to "frame 9" at their columns
    assert all(float(columns[16 + k * 196 : 16 + k * 196 + 60].min()) < 0.8 for k in range(5))


def test_contact_sheets_refuse_what_they_cannot_show() -> None:
    with pytest.raises(ValueError, match="at least one video"):
        contact_sheet([])
    with pytest.raises(ValueError, match="captions has 1 texts for 2"):
        contact_sheet(levels(3).expand(2, 3, 3, 16, 16), captions=["one"])


def test_beside_puts_sources_an_arrow_and_the_result_in_a_row() -> None:
    red, blue = torch.zeros(3, 48, 96), torch.zeros(3, 96, 96)
    red[0], blue[2] = 1, 1
    sheet = beside([[red], [red, blue]], [blue, blue], captions=["make it blue", "use both"])
    pixels = to_pixels(sheet).astype(int)
    is_red = (pixels == [255, 0, 0]).all(-1)
    is_blue = (pixels == [0, 0, 255]).all(-1)
    assert is_red.sum() == 2 * 96 * 192  # 48 x 96 becomes as tall as the result: 96 x 192
    assert is_blue.sum() == 3 * 96 * 96
    row = pixels[16 + 48]  # through the middle of the first cell
    assert row[16].tolist() == [255, 0, 0]
    start = int(np.flatnonzero(is_blue[16 + 48])[0])
    assert 16 + 192 < start < 16 + 192 + 60
    assert (row[16 + 192 : start] != 255).any()  # the arrow's ink between them


def test_beside_leaves_a_result_without_sources_alone() -> None:
    blue, black = torch.zeros(3, 96, 96), torch.zeros(3, 96, 96)
    blue[2] = 1
    pixels = to_pixels(beside([[black], []], [black, blue])).astype(int)
    assert ((pixels == [0, 0, 255]).all(-1)).sum() == 96 * 96
    place = np.flatnonzero((pixels == [0, 0, 255]).all(-1).any(-1))[0]
    ink = np.flatnonzero((pixels[place + 48] != 255).any(-1))
    assert len(ink) == 96  # no arrow from nowhere


def test_beside_keeps_very_wide_sources_in_bounds_and_error_cases_teach() -> None:
    square, panorama = torch.zeros(3, 40, 40), torch.zeros(3, 10, 400)
    assert beside([[panorama]], [square]).shape[-1] < 200
    with pytest.raises(ValueError, match="2 results came with 1 lists of sources: give"):
        beside([[square]], [square, square])
    with pytest.raises(ValueError, match="0 results"):
        beside([], [])
    with pytest.raises(ValueError, match="differ in size"):
        beside([[square], [square]], [square, panorama])


def test_samples_of_images(tmp_path: Path) -> None:
    kept = list(levels(3, 64, 64))
    write_samples(tmp_path, 10, kept, ["a", "b", "c"])
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.*")) == [
        "iteration_000010.png",
        *(f"iteration_000010/000{k}.png" for k in range(3)),
    ]
    assert torch.equal(image(tmp_path / "iteration_000010/0002.png"), kept[2])
    assert image(tmp_path / "iteration_000010.png").shape[-1] == 2 + 2 * (128 + 2)  # two columns, twice as large


def test_samples_of_videos(tmp_path: Path) -> None:
    kept = [levels(9, 64, 64), levels(9, 64, 64).flip(0)]
    write_samples(tmp_path, 10, kept, ["up", "down"], fps=8.0)
    folder = tmp_path / "iteration_000010"
    assert sorted(p.name for p in folder.iterdir()) == ["0000.mp4", "0000.png", "0001.mp4", "0001.png"]
    assert numbers(frames_of(folder / "0001.mp4")) == list(range(8, -1, -1))
    assert torch.equal(image(folder / "0000.png"), contact_row(kept[0]))
    assert torch.equal(image(tmp_path / "iteration_000010.png"), contact_sheet(kept, ["up", "down"]))


@pytest.mark.parametrize("fps", [None, 8.0])
def test_samples_beside_their_sources(tmp_path: Path, fps: float | None) -> None:
    kept = list(levels(2, 64, 64)) if fps is None else [levels(9, 64, 64)] * 2
    sources = [[torch.zeros(3, 20, 30)], [torch.zeros(3, 20, 30), torch.ones(3, 40, 10)]]
    for iteration in (0, 10):
        write_samples(tmp_path, iteration, kept, ["a", "b"], sources, fps)
    assert sorted(p.name for p in (tmp_path / "sources").iterdir()) == ["0000.png", "0001.png", "0001_1.png"]
    assert torch.equal(image(tmp_path / "sources/0001_1.png"), sources[1][1])
    shown = [fit(x, 448) if fps is None else contact_row(x) for x in kept]
    assert torch.equal(image(tmp_path / "iteration_000010.png"), beside(sources, shown, ["a", "b"]))
    assert (tmp_path / "iteration_000010/0001.mp4").is_file() == (fps is not None)


def test_samples_that_do_not_match_are_refused(tmp_path: Path) -> None:
    clip = levels(3)
    with pytest.raises(ValueError, match="1 samples came with 2 captions"):
        write_samples(tmp_path, 0, [clip], ["a", "b"], fps=8)
    with pytest.raises(ValueError, match="1 captions and 0 lists of sources"):
        write_samples(tmp_path, 0, [clip], ["a"], [], fps=8)
    with pytest.raises(ValueError, match=r"fps=None asks for images .*\(3, 3, 16, 16\)"):
        write_samples(tmp_path, 0, [clip], ["a"])
    with pytest.raises(ValueError, match="asks for videos"):
        write_samples(tmp_path, 0, [clip[0]], ["a"], fps=8)
    write_samples(tmp_path, 0, [], [])
    assert not list(tmp_path.iterdir())


def test_samples_of_text_alone_in_a_run_that_may_have_sources(tmp_path: Path) -> None:
    kept = list(levels(2, 64, 64))
    write_samples(tmp_path / "none", 0, kept, ["a", "b"])
    write_samples(tmp_path / "empty", 0, kept, ["a", "b"], [[], []])
    sheets = [(tmp_path / name / "iteration_000000.png").read_bytes() for name in ("none", "empty")]
    assert sheets[0] == sheets[1]
