"""Images as cameras, scanners, editors and other programs write them, and folders of them: how they become pixels."""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from unlisted_case import Case, Outcome, Silent, command, refused, refused_call, same

from flowrl.generation.image_folder import read_items
from flowrl.media.reading import image_size, read_image
from flowrl.prompts.source_images import read_image as read_source

Array = np.ndarray[Any, Any]
Write = Callable[[Path], Path]

RGB = np.random.default_rng(7).integers(0, 256, size=(6, 9, 3), dtype=np.uint8)
GREY = RGB[..., 0]
ALPHA = np.random.default_rng(8).integers(0, 256, size=(6, 9), dtype=np.uint8)
TURNS: tuple[Callable[[Array], Array], ...] = (
    lambda a: a,
    lambda a: a[:, ::-1],
    lambda a: a[::-1, ::-1],
    lambda a: a[::-1],
    lambda a: a.swapaxes(0, 1),
    lambda a: np.rot90(a, -1),
    lambda a: a[::-1, ::-1].swapaxes(0, 1),
    lambda a: np.rot90(a, 1),
)
"""What EXIF's orientations 1 to 8 ask for, as the standard draws them."""


# ---- files by hand ---------------------------------------------------------------------------------------------------


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(
    samples: Array,
    depth: int,
    colour: int,
    before: Sequence[tuple[bytes, bytes]] = (),
    after: Sequence[tuple[bytes, bytes]] = (),
) -> bytes:
    """A PNG by the letter of its standard: samples [H, W] or [H, W, channels], unfiltered rows."""
    height, width = samples.shape[:2]
    rows = samples.reshape(height, -1)
    if depth < 8:
        bits = ((rows[..., None] >> np.arange(depth - 1, -1, -1)) & 1).reshape(height, -1)
        lines = [np.packbits(row.astype(np.uint8)).tobytes() for row in bits]
    else:
        lines = [row.astype(">u2" if depth == 16 else "u1").tobytes() for row in rows]
    body = zlib.compress(b"".join(b"\0" + line for line in lines))
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    chunks = [(b"IHDR", head), *before, (b"IDAT", body), *after, (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*one) for one in chunks)


def tiff(
    data: bytes, width: int, height: int, tags: Mapping[int, tuple[int, Sequence[int]]], order: str = "<"
) -> bytes:
    """A TIFF of one strip by the letter of its standard; `tags` are added to those of its size, or stand for them."""
    strip = {256: (3, [width]), 257: (3, [height]), 259: (3, [1]), 273: (4, [8]), 278: (3, [height])}
    fields: dict[int, tuple[int, Sequence[int]]] = {**strip, 279: (4, [len(data)]), **tags}
    data += b"\0" * (len(data) % 2)
    start, entries, extra = 8 + len(data), b"", b""
    beyond = start + 2 + 12 * len(fields) + 4
    for tag, (kind, values) in sorted(fields.items()):
        packed = b"".join(struct.pack(order + {3: "H", 4: "I"}[kind], value) for value in values)
        if len(packed) > 4:
            place = struct.pack(order + "I", beyond + len(extra))
            extra += packed
        else:
            place = packed.ljust(4, b"\0")
        entries += struct.pack(order + "HHI", tag, kind, len(values)) + place
    head = (b"II" if order == "<" else b"MM") + struct.pack(order + "HI", 42, start)
    return head + data + struct.pack(order + "H", len(fields)) + entries + b"\0\0\0\0" + extra


def wrote(data: bytes, name: str) -> Write:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return write


def pillow(image: Image.Image, name: str, **options: Any) -> Write:
    def write(folder: Path) -> Path:
        image.save(folder / name, **options)
        return folder / name

    return write


def packed(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format=kind, **options)
    return stream.getvalue()


# ---- judges ----------------------------------------------------------------------------------------------------------


def on_white(colour: Array, alpha: Array) -> Array:
    """Colours over white, worked in float."""
    weight = alpha[..., None].astype(float) / 255
    return np.rint(colour * weight + 255 * (1 - weight))


def read_as(write: Write, expected: Array, folder: Path, *, within: float = 0) -> Outcome:
    """Every way in gives the expected levels, and the size that was told before is the size."""
    path = write(folder)
    wanted = expected.astype(float) if expected.ndim == 3 else np.repeat(expected[..., None].astype(float), 3, axis=2)
    ways = {"reader": read_image(path), "source": read_source(path).permute(1, 2, 0).mul(255).numpy()}
    for name, found in ways.items():
        if found.shape != wanted.shape:
            raise Silent(f"{name}: shape {found.shape} where {wanted.shape} is right")
        if (error := float(np.abs(found - wanted).max())) > within + 1e-3:
            raise Silent(f"{name}: levels off by {error:g}, such as {found[0, 0]} for {wanted[0, 0]}")
    return same(image_size(path), (wanted.shape[1], wanted.shape[0]), "size")


def no_image(write: Write, folder: Path, *names: str) -> Outcome:
    path = write(folder)
    outcome = refused_call(lambda: read_image(path), path.name, *names)
    refused_call(lambda: read_source(path), path.name)
    return outcome


def image(name: str, write: Write, expected: Array, within: float = 0) -> Case:
    return Case(f"images: {name}", lambda folder: read_as(write, expected, folder, within=within))


def no(name: str, write: Write, *names: str) -> Case:
    return Case(f"images: {name}", lambda folder: no_image(write, folder, *names))


# ---- kinds of files --------------------------------------------------------------------------------------------------


def orientations() -> list[Case]:
    """Orientation by every container and every place in it where programs put it."""
    found = []
    for number, turn in enumerate(TURNS, start=1):
        exif = Image.Exif()
        exif[0x0112] = number
        raw = exif.tobytes().removeprefix(b"Exif\0\0")
        smooth = np.repeat(np.repeat(RGB, 16, axis=0), 16, axis=1)
        tags = {258: (3, [8, 8, 8]), 262: (3, [2]), 277: (3, [3]), 274: (3, [number])}
        found += [
            image(
                f"orientation {number} in PNG, after the pixels",
                wrote(png(RGB, 8, 2, after=[(b"eXIf", raw)]), "a.png"),
                turn(RGB),
            ),
            image(f"orientation {number} in TIFF", wrote(tiff(RGB.tobytes(), 9, 6, tags), "a.tif"), turn(RGB)),
            image(
                f"orientation {number} in JPEG",
                pillow(Image.fromarray(smooth), "a.jpg", exif=exif, quality=100, subsampling=0),
                turn(smooth),
                6,
            ),
            image(
                f"orientation {number} in WebP",
                pillow(Image.fromarray(RGB), "a.webp", exif=exif, lossless=True),
                turn(RGB),
            ),
        ]
    return found


def pngs() -> list[Case]:
    wide = RGB.astype(np.uint32) * 257
    deep = np.array([[0, 255, 4095, 32767, 65535]])
    colours = [(b"PLTE", RGB[:4, 0].tobytes())]
    places = np.array([[0, 1, 2, 3], [3, 2, 1, 0]])
    seen = on_white(RGB[:4, 0][places], np.array([0, 128, 255, 255])[places])
    keyed = np.where(np.arange(5) == 1, 255, np.rint(deep / 257))
    two = np.array([[0, 1, 2, 3]])
    bits = np.array([[0, 1, 1, 0, 1]])
    profile = b"icc\0\0" + zlib.compress(b"no profile")
    return [
        image("16-bit RGB PNG", wrote(png(wide, 16, 2), "a.png"), RGB),
        image(
            "16-bit RGB PNG, levels between",
            wrote(png(np.minimum(wide + 100, 65535), 16, 2), "a.png"),
            np.minimum(wide + 100, 65535) / 257,
            1,
        ),
        image(
            "16-bit RGBA PNG",
            wrote(png(np.dstack([wide, ALPHA.astype(np.uint32) * 257]), 16, 6), "a.png"),
            on_white(RGB, ALPHA),
            1,
        ),
        image("16-bit grey PNG", wrote(png(deep, 16, 0), "a.png"), np.rint(deep / 257)),
        image(
            "16-bit grey PNG with alpha",
            wrote(png(np.dstack([wide[..., 0], ALPHA.astype(np.uint32) * 257]), 16, 4), "a.png"),
            on_white(GREY[..., None].repeat(3, 2), ALPHA),
            1,
        ),
        image(
            "16-bit grey PNG, one clear level",
            wrote(png(deep, 16, 0, [(b"tRNS", struct.pack(">H", 255))]), "a.png"),
            keyed,
        ),
        image(
            "16-bit RGB PNG, one clear colour",
            wrote(png(wide, 16, 2, [(b"tRNS", struct.pack(">3H", *wide[0, 0].tolist()))]), "a.png"),
            np.where((RGB == RGB[0, 0]).all(2, keepdims=True), 255, RGB),
        ),
        image(
            "RGB PNG, one clear colour",
            wrote(png(RGB, 8, 2, [(b"tRNS", struct.pack(">3H", *RGB[2, 3].tolist()))]), "a.png"),
            np.where((RGB == RGB[2, 3]).all(2, keepdims=True), 255, RGB),
        ),
        image(
            "grey PNG, one clear level",
            wrote(png(GREY, 8, 0, [(b"tRNS", struct.pack(">H", int(GREY[1, 1])))]), "a.png"),
            np.where(GREY == GREY[1, 1], 255, GREY),
        ),
        image("2-bit grey PNG", wrote(png(two, 2, 0), "a.png"), two * 85),
        image(
            "2-bit grey PNG, one clear level",
            wrote(png(two, 2, 0, [(b"tRNS", b"\0\1")]), "a.png"),
            np.array([[0, 255, 170, 255]]),
        ),
        image(
            "4-bit grey PNG, one clear level",
            wrote(png(two, 4, 0, [(b"tRNS", b"\0\1")]), "a.png"),
            np.array([[0, 255, 34, 51]]),
        ),
        image("1-bit PNG", wrote(png(bits, 1, 0), "a.png"), bits * 255),
        image("1-bit PNG, black is clear", wrote(png(bits, 1, 0, [(b"tRNS", b"\0\0")]), "a.png"), bits * 0 + 255),
        image(
            "palette PNG of 2 bits with tRNS",
            wrote(png(places, 2, 3, [*colours, (b"tRNS", b"\0\x80")]), "a.png"),
            seen,
            1,
        ),
        image("palette PNG, nothing clear", wrote(png(places, 8, 3, colours), "a.png"), RGB[:4, 0][places]),
        image("PNG with gAMA", wrote(png(RGB, 8, 2, [(b"gAMA", struct.pack(">I", 100000))]), "a.png"), RGB),
        image("PNG with a profile that is none", wrote(png(RGB, 8, 2, [(b"iCCP", profile)]), "a.png"), RGB),
        image(
            "PNG with bKGD",
            wrote(png(np.dstack([RGB, ALPHA]), 8, 6, [(b"bKGD", struct.pack(">3H", 0, 0, 0))]), "a.png"),
            on_white(RGB, ALPHA),
            1,
        ),
        image(
            "APNG whose first frame is another",
            pillow(
                Image.fromarray(RGB),
                "a.png",
                save_all=True,
                append_images=[Image.fromarray(RGB[::-1])],
                default_image=True,
            ),
            RGB,
        ),
        no("PNG of half a file", wrote(png(RGB, 8, 2)[:-60], "a.png")),
        no("PNG with a broken sum", wrote(png(RGB, 8, 2).replace(b"IDAT", b"IDAT", 1)[:60] + b"\xff" * 40, "a.png")),
        no("empty file", wrote(b"", "a.png")),
        no("PNG of no width", wrote(png(np.zeros((1, 0, 3), np.uint8), 8, 2), "a.png")),
        no(
            "a billion pixels in a small file",
            wrote(
                b"\x89PNG\r\n\x1a\n"
                + chunk(b"IHDR", struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0))
                + chunk(b"IDAT", b"")
                + chunk(b"IEND", b""),
                "a.png",
            ),
        ),
        no("a page of the web under a picture's name", wrote(b"<!doctype html><html>404</html>", "a.png")),
        no("HEIC without a plugin", wrote(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + b"\0" * 64, "a.heic")),
        no("SVG", wrote(b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="6"/>', "a.svg")),
        no(
            "a pointer of Git LFS",
            wrote(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "a.png"),
        ),
    ]


def tiffs() -> list[Case]:
    def grey(levels: Array, depth: int, dtype: str, photometric: int = 1, order: str = "<", **more: int) -> Write:
        tags = {258: (3, [depth]), 262: (3, [photometric]), 277: (3, [1])}
        tags |= {int(tag[1:]): (3, [value]) for tag, value in more.items()}
        data = levels.astype(dtype).tobytes() if dtype else more_bits(levels, depth)
        return wrote(tiff(data, levels.shape[1], levels.shape[0], tags, order), "a.tif")

    def more_bits(levels: Array, depth: int) -> bytes:
        bits = (levels.reshape(levels.shape[0], -1, 1) >> np.arange(depth - 1, -1, -1)) & 1
        return b"".join(np.packbits(row.reshape(-1).astype(np.uint8)).tobytes() for row in bits)

    deep = GREY.astype(np.uint32) * 257
    clear = {258: (3, [8] * 4), 262: (3, [2]), 277: (3, [4])}
    weight = ALPHA[..., None].astype(float) / 255
    before = np.dstack([np.rint(RGB * weight).astype(np.uint8), ALPHA])
    colour = {262: (3, [2]), 277: (3, [3]), 258: (3, [16] * 3)}
    return [
        image("16-bit grey TIFF", grey(deep, 16, "<u2"), GREY),
        image("16-bit grey TIFF of the other byte order", grey(deep, 16, ">u2", order=">"), GREY),
        image("8-bit TIFF in which 0 is white", grey(GREY, 8, "u1", 0), 255 - GREY.astype(int)),
        no("16-bit TIFF in which 0 is white", grey(deep, 16, "<u2", 0), "range"),
        no("12-bit grey TIFF", grey(GREY.astype(int) * 16, 12, ""), "range"),
        no("TIFF of 32-bit whole numbers", grey(GREY, 32, "<u4"), "range"),
        no("TIFF of signed 16 bits", grey(GREY, 16, "<i2", s339=2), "range"),
        no("TIFF of floats", grey(GREY / 255, 32, "<f4", s339=3), "range"),
        image(
            "16-bit RGB TIFF",
            wrote(tiff((RGB.astype(np.uint32) * 257).astype("<u2").tobytes(), 9, 6, colour), "a.tif"),
            RGB,
            1,
        ),
        image(
            "TIFF with alpha",
            wrote(tiff(np.dstack([RGB, ALPHA]).tobytes(), 9, 6, {**clear, 338: (3, [2])}), "a.tif"),
            on_white(RGB, ALPHA),
            1,
        ),
        image(
            "TIFF with colours times alpha",
            wrote(tiff(before.tobytes(), 9, 6, {**clear, 338: (3, [1])}), "a.tif"),
            on_white(RGB, ALPHA),
            3,
        ),
        image(
            "TIFF with a channel that is no alpha",
            wrote(tiff(np.dstack([RGB, ALPHA]).tobytes(), 9, 6, {**clear, 338: (3, [0])}), "a.tif"),
            RGB,
        ),
        image(
            "first page of a TIFF",
            pillow(Image.fromarray(RGB), "a.tif", save_all=True, append_images=[Image.fromarray(RGB[::-1])]),
            RGB,
        ),
        no("LAB TIFF", pillow(Image.new("LAB", (4, 4)), "a.tif"), "LAB"),
        *(
            no(
                f"TIFF of half a file, {kind}",
                wrote(
                    (lambda data: data[: len(data) * 2 // 3])(
                        packed(Image.fromarray(np.tile(RGB, (9, 9, 1))), "TIFF", compression=kind)
                    ),
                    "a.tif",
                ),
            )
            for kind in ("raw", "tiff_lzw", "tiff_deflate", "packbits")
        ),
    ]


def others() -> list[Case]:
    smooth = np.repeat(np.repeat(RGB, 16, axis=0), 16, axis=1)
    ink = Image.fromarray(255 - np.dstack([smooth, np.full_like(smooth[..., 0], 255)]), "CMYK")
    jpeg = packed(Image.fromarray(smooth), "JPEG", quality=100, subsampling=0)
    rgba = Image.fromarray(np.dstack([RGB, ALPHA]))
    half = np.where(ALPHA > 127, 255, 0).astype(np.uint8)
    clear = Image.fromarray(np.dstack([RGB, half]))
    bmp = (
        b"BM"
        + struct.pack("<IHHI", 54 + 216, 0, 0, 54)
        + struct.pack("<IiiHHIIiiII", 40, 9, -6, 1, 32, 0, 216, 0, 0, 0, 0)
    )
    pixels = np.dstack([RGB[..., ::-1], np.zeros((6, 9), np.uint8)]).tobytes()
    masks = struct.pack("<IIII", 0xFF0000, 0xFF00, 0xFF, 0xFF000000) + b"BGRs" + b"\0" * 48
    v4 = (
        b"BM"
        + struct.pack("<IHHI", 122 + 216, 0, 0, 122)
        + struct.pack("<IiiHHIIiiII", 108, 9, -6, 1, 32, 3, 216, 0, 0, 0, 0)
    )
    run = bytes([3, 0, 0, 0, 2, 1, 0, 0, 0, 1])
    rle = (
        b"BM"
        + struct.pack("<IHHI", 62 + len(run), 0, 0, 62)
        + struct.pack("<IiiHHIIiiII", 40, 3, 2, 1, 8, 1, len(run), 0, 0, 2, 2)
        + b"\0\0\0\0\0\0\xff\0"
        + run
    )
    pgm = b"P5\n# made by a scanner\n9 6\n1023\n" + (GREY.astype(np.uint32) * 1023 // 255).astype(">u2").tobytes()
    return [
        image("CMYK JPEG of Adobe, inverted", pillow(ink, "a.jpg", quality=100, subsampling=0), smooth, 8),
        image("CMYK TIFF", pillow(ink, "a.tif"), smooth, 1),
        image(
            "progressive JPEG",
            pillow(Image.fromarray(smooth), "a.jpg", quality=100, subsampling=0, progressive=True),
            smooth,
            6,
        ),
        image("JPEG under the name of a PNG", wrote(jpeg, "a.png"), smooth, 6),
        image("JPEG with bytes behind its end", wrote(jpeg + b"\0" * 999, "a.jpg"), smooth, 6),
        no("JPEG of half a file", wrote(jpeg[: len(jpeg) // 2], "a.jpg")),
        no(
            "progressive JPEG of half a file",
            wrote((lambda d: d[: len(d) // 2])(packed(Image.fromarray(smooth), "JPEG", progressive=True)), "a.jpg"),
        ),
        no(
            "WebP of half a file",
            wrote((lambda d: d[: len(d) // 2])(packed(Image.fromarray(smooth), "WEBP")), "a.webp"),
        ),
        no(
            "GIF of half a file",
            wrote((lambda d: d[: len(d) // 2])(packed(Image.fromarray(smooth).quantize(64), "GIF")), "a.gif"),
        ),
        no("BMP of half a file", wrote((bmp + pixels)[:150], "a.bmp")),
        image("BMP of 32 bits without alpha", wrote(bmp + pixels, "a.bmp"), RGB),
        image(
            "BMP with alpha",
            wrote(v4 + masks + np.dstack([RGB[..., ::-1], ALPHA]).tobytes(), "a.bmp"),
            on_white(RGB, ALPHA),
            1,
        ),
        image(
            "BMP by lengths of runs", wrote(rle, "a.bmp"), np.array([[[255, 0, 0]] * 2 + [[0, 0, 0]], [[0, 0, 0]] * 3])
        ),
        image(
            "ICO with alpha",
            pillow(
                Image.fromarray(np.dstack([smooth[:32, :32], np.full((32, 32), 128, np.uint8)])),
                "a.ico",
                sizes=[(16, 16), (32, 32)],
            ),
            on_white(smooth[:32, :32], np.full((32, 32), 128)),
            1,
        ),
        image("JPEG 2000", pillow(Image.fromarray(smooth), "a.jp2", irreversible=False), smooth),
        image(
            "JPEG 2000 of 16 bits",
            pillow(Image.fromarray(smooth[..., 0].astype(np.uint16) * 257), "a.jp2"),
            smooth[..., 0],
        ),
        image(
            "animated GIF, first frame with holes",
            pillow(clear, "a.gif", save_all=True, append_images=[Image.fromarray(RGB)]),
            np.where(half[..., None] == 255, RGB, 255),
            0,
        ),
        image(
            "animated WebP with alpha",
            pillow(rgba, "a.webp", save_all=True, append_images=[rgba.rotate(180)], lossless=True, exact=True),
            on_white(RGB, ALPHA),
            1,
        ),
        image("TGA from the bottom up", pillow(rgba, "a.tga"), on_white(RGB, ALPHA), 1),
        image("PGM of 10 bits", wrote(pgm, "a.pgm"), GREY, 1),
        image("PPM of text", wrote(b"P3 9 6 255\n" + " ".join(map(str, RGB.ravel())).encode(), "a.ppm"), RGB),
        no("PFM", wrote(b"Pf\n9 6\n-1.0\n" + (GREY / 255).astype("<f4").tobytes(), "a.pfm"), "range"),
    ]


# ---- names -----------------------------------------------------------------------------------------------------------


def folder_of(place: Path, names: Sequence[str], junk: Sequence[str] = ()) -> Path:
    """Images by their names, each of the level that is its place in the list; `junk` are files that are no images."""
    folder = place / "images"
    for level, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (level, 0, 0)).save(folder / name, format="PNG")
    for name in junk:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"\0\5\x16\7\0\2\0\0Mac OS X        ")
    return folder


def paired(names: Sequence[str], junk: Sequence[str], place: Path) -> Outcome:
    """Line K of a text file goes to the image that was made K-th, or the folder is refused."""
    folder, lines = folder_of(place, names, junk), [f"prompt {k}" for k in range(len(names))]
    (place / "prompts.txt").write_text("\n".join(lines))
    try:
        items = read_items(folder, prompts=place / "prompts.txt")
    except ValueError as error:
        return refused(1, str(error), "before|first", "rename")
    found = {item.prompt: int(read_image(item.path)[0, 0, 0]) for item in items}
    return same(found, {line: k for k, line in enumerate(lines)}, "pairs")


def alone(place: Path) -> Outcome:
    """What a system leaves in a folder is no image of it."""
    junk = (
        ".DS_Store",
        "Thumbs.db",
        "._1.png",
        ".ipynb_checkpoints/1-checkpoint.png",
        "__MACOSX/._1.png",
        "desktop.ini",
    )
    folder = folder_of(place, ["1.png", "2.png"], junk)
    items = read_items(folder, prompt="a red circle")
    return same([item.file for item in items], ["1.png", "2.png"], "images")


def listed(place: Path) -> Outcome:
    """A list names its files, whatever their order is."""
    names = ["b 10.png", "a,1.png", "sub dir/ü.PNG", "c#2.png"]
    folder = folder_of(place, names)
    rows = [{"file": name, "prompt": f"prompt {k}"} for k, name in enumerate(names)]
    (place / "rows.jsonl").write_text(
        "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8-sig"
    )
    items = read_items(folder, prompts=place / "rows.jsonl")
    return same(
        [(item.prompt, int(read_image(item.path)[0, 0, 0])) for item in items], [(f"prompt {k}", k) for k in range(4)]
    )


def scored(place: Path) -> Outcome:
    """The command scores each image with its own prompt, and leaves a file that is none out by name."""
    folder = folder_of(place, [f"img_{k}.PNG" for k in range(1, 13)])
    (place / "level.py").write_text(
        "def match(images, prompts, metadata):\n"
        "    return [float(int(p.split()[1]) == round(float(i[0, 0, 0]) * 255)) for i, p in zip(images, prompts)]\n"
    )
    (place / "match.yaml").write_text(f"rewards: [{{file: {place}/level.py, function: match}}]")
    (place / "prompts.txt").write_text("\n".join(f"prompt {k}" for k in range(12)))
    code, said = command(
        "reward",
        "score",
        str(place / "match.yaml"),
        str(folder),
        "--prompts",
        str(place / "prompts.txt"),
        "--out",
        str(place / "scores.jsonl"),
    )
    if code != 0:
        raise Silent(said[-300:])
    rows = [json.loads(line) for line in (place / "scores.jsonl").read_text().splitlines()]
    return same([row["values"] for row in rows], [{"match": 1.0}] * 12)


def in_script(number: int, zero: int) -> str:
    """A number in the digits of a script, by the code of its zero."""
    return "".join(chr(zero + int(digit)) for digit in str(number))


NAMES: dict[str, list[str]] = {
    "img_1 to img_12": [f"img_{k}.png" for k in range(1, 13)],
    "frame-0001 on": [f"frame-{k:04d}.png" for k in range(1, 13)],
    "Windows' copies": [f"photo ({k}).png" for k in range(1, 13)],
    "mixed widths": ["01.png", "2.png", "003.png", "10.png", "0011.png"],
    "one number twice": ["1.png", "01.png", "2.png"],
    "a copy beside its image": ["1.png", "1 (1).png", "2.png", "2 (1).png"],
    "full-width digits": [f"img_{in_script(k, 0xFF10)}.png" for k in range(1, 11)],
    "Arabic digits": [f"{in_script(k, 0x660)}.png" for k in range(1, 11)],
    "superscripts": ["x².png", "x³.png", "x¹⁰.png"],
    "mixed endings and cases": ["1.PNG", "2.jpg", "3.JPEG", "10.WebP"],
    "two kinds of names": ["cat_10.png", "dog_2.png"],
    "cameras": ["IMG_9999.png", "IMG_10000.png"],
    "decimals": ["t_0.25.png", "t_0.5.png", "t_0.75.png", "t_1.0.png"],
    "signs": ["x-2.png", "x-1.png", "x0.png", "x1.png"],
    "dates": ["2024-9-30 at 10.png", "2024-10-1 at 9.png"],
    "folders of numbers": ["1/a.png", "2/a.png", "10/a.png"],
    "folders and files": ["1.png", "2/1.png", "3.png"],
    "seeds of a prompt": [f"{p:03d}_seed{s}.png" for p in range(3) for s in (0, 5, 10)],
    "upper and lower case": ["A1.png", "a2.png", "B3.png", "b4.png"],
    "hashes": ["0a1f.png", "10bc.png", "9f00.png"],
    "letters": ["a.png", "b.png", "c.png"],
    "umlauts in two forms": ["u\u0308_1.png", "\u00fc_2.png"],
    "ComfyUI": [f"ComfyUI_{k:05d}_.png" for k in range(1, 13)],
}


def names() -> list[Case]:
    junk = ("._img_1.png", ".DS_Store", "Thumbs.db")
    found = [Case(f"names: {name}", partial(paired, files, ())) for name, files in NAMES.items()]
    return [
        *found,
        Case("names: files of the system beside images", partial(paired, NAMES["img_1 to img_12"], junk)),
        Case("names: files of the system and one prompt", alone),
        Case("names: a list of files in any order", listed),
        Case("names: scored by the command", scored),
    ]


def cases() -> list[Case]:
    return [*orientations(), *pngs(), *tiffs(), *others(), *names()]
