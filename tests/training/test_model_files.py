"""What tells models apart: all of their files, through links, to the last byte."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.generation.models import Source, fingerprint
from flowrl.rewards.image_files import image_files
from flowrl.runtime import digests
from flowrl.runtime.digests import content_digest, files_below
from flowrl.training.model_files import (
    digest_of_file,
    digests_of,
    encoders_digest,
    files_of,
    named_files,
    same_digest,
)

PARTS = (
    "transformer/a.safetensors", "transformer_2/a.safetensors", "text_encoder/model.safetensors",
    "text_encoder_3/model-00002-of-00002.safetensors", "tokenizer_2/vocab.json", "tokenizer/merges.txt",
    "vae/config.json", "scheduler/scheduler_config.json", "model.gguf", "model_index.json",
)  # fmt: skip


def model(folder: Path, mark: str = "") -> Path:
    for part in PARTS:
        (folder / part).parent.mkdir(parents=True, exist_ok=True)
        (folder / part).write_text(part + mark)
    return folder


def marks(folder: Path) -> tuple[object, ...]:
    source = Source(model=str(folder), lora=None, num_steps=1, guidance_scale=1.0, grid="diffusers",
                    max_sequence_length=None, dtype="float32")  # fmt: skip
    return fingerprint(source), digests_of(folder), encoders_digest(str(folder), ("transformer", "transformer_2"))


@pytest.mark.parametrize("part", PARTS)
def test_every_part_is_in_the_digests(tmp_path: Path, part: str) -> None:
    folder = model(tmp_path / "model")
    before, old = marks(folder), (folder / part).stat()
    (folder / part).write_text(part[::-1])  # of the same length, and as old
    os.utime(folder / part, ns=(old.st_atime_ns, old.st_mtime_ns))
    now = marks(folder)
    assert (now[0] != before[0], now[1] != before[1]) == (True, True)
    assert (now[2] != before[2]) is not part.startswith("transformer")


def test_folders_that_are_links_are_part_of_a_model(tmp_path: Path) -> None:
    first, second = model(tmp_path / "first"), model(tmp_path / "second", "!")
    folder = tmp_path / "model"
    (folder / "deep").mkdir(parents=True)
    for name in ("text_encoder", "deep/encoder"):
        (folder / name).symlink_to(first / "text_encoder")
    before = marks(folder)
    assert list(files_of(folder)) == ["deep/encoder/model.safetensors", "text_encoder/model.safetensors"]
    for name in ("text_encoder", "deep/encoder"):
        (folder / name).unlink()
        (folder / name).symlink_to(second / "text_encoder")
        now = marks(folder)
        assert all(a != b for a, b in zip(before, now, strict=True))
        before = now


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x").write_text("x")
    (tmp_path / "a" / "b" / "up").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "self").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "a" / "other").symlink_to(tmp_path / "a" / "b")
    assert list(files_below(tmp_path / "a")) == ["b/x", "other/x"]


def test_reference_images_in_a_linked_folder_are_found(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "a.png").write_bytes(b"")
    (tmp_path / "references").mkdir()
    (tmp_path / "references" / "more").symlink_to(tmp_path / "far")
    assert image_files(str(tmp_path / "references")) == {None: [tmp_path / "references" / "more" / "a.png"]}


def test_weights_that_differ_in_the_middle_differ(tmp_path: Path) -> None:
    """A training of some layers alone leaves both ends of a file as they were."""
    file = tmp_path / "model.safetensors"
    content = bytearray(3 * 2**20)
    file.write_bytes(content)
    before, whole = digest_of_file(file), marks(tmp_path)
    content[len(content) // 2] = 1
    file.write_bytes(content)
    now = digest_of_file(file)
    assert not same_digest(before, now)
    assert all(a != b for a, b in zip(whole, marks(tmp_path), strict=True))
    earlier = before.partition("-")[0]  # as earlier versions sealed it, of the ends alone
    assert (same_digest(earlier, before), same_digest(earlier, now), same_digest(None, now)) == (True, True, False)


def test_digests_of_large_files_are_kept_as_long_as_nothing_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "KEPT_FROM", 4)
    monkeypatch.setattr(digests, "_SETTLED", 0)
    file = tmp_path / "weights"
    file.write_bytes(b"12345")

    def read() -> str:
        """As a new process, which knows what is kept alone."""
        digests._digests.clear()
        digests._kept_digests.cache_clear()
        return content_digest(file)

    first, old = read(), file.stat()
    kept = tmp_path / "cache" / "flowrl" / "digests"
    assert len(kept.read_text().splitlines()) == 1
    kept.write_text("cut sho\n" + kept.read_text().replace(first, "f" * 64))
    assert read() == "f" * 64  # it was not read again
    file.write_bytes(b"54321")
    os.utime(file, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert read() not in (first, "f" * 64)
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # where nothing can be kept
    assert read() == read()


def test_files_that_options_of_a_reward_name_are_told_apart(tmp_path: Path) -> None:
    folder = model(tmp_path / "judge")
    options = {
        "judge": {"model": str(folder)},
        "heads": [str(folder / "model.gguf")],
        "field": "text",
        "x" * 9: "y" * 2000,
    }
    before = named_files(options)
    assert sorted(before) == ["heads.0", "judge.model"]
    (folder / "text_encoder" / "model.safetensors").write_text("other")
    now = named_files(options)
    assert (now["judge.model"] != before["judge.model"], now["heads.0"] != before["heads.0"]) == (True, False)


def test_a_variant_is_another_model(tmp_path: Path) -> None:
    source = Source(model=str(model(tmp_path / "model")), lora=None, num_steps=1, guidance_scale=1.0, grid="diffusers",
                    max_sequence_length=None, dtype="float32")  # fmt: skip
    assert fingerprint(source) != fingerprint(replace(source, variant="fp16"))
