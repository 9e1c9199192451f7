"""Embeddings on disk: what is read is what is embedded, bit for bit; what is damaged or foreign is never taken."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_folders import SETTINGS, save_tiny
from torch import Tensor

from flowrl.pipelines import family
from flowrl.pipelines.shared import prompt_embeddings
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.pipelines.weights.embedding_cache import EmbeddingCache, check_cache
from flowrl.pipelines.weights.loading_choices import Loading
from flowrl.runtime.randomness import counter_normal
from flowrl.training.model_files import encoders_digest
from flowrl.trajectory import Conditioning

PROMPTS = ["a red circle", "", "two blue squares"]
FAMILIES = ("sd3", "flux", "kontext", "qwen_image_edit", "wan", "sana")
OTHERS = ("transformer", "transformer_2", "unet", "scheduler")


def sources_of(pipeline: FamilyPipeline, count: int) -> list[list[Tensor]]:
    """Source images of prompts, as many as the pipeline takes."""
    images = [counter_normal((3, 40, 36), "image", number).sigmoid() for number in range(pipeline.num_sources[1])]
    return [images] * count


def load(name: str, folder: Path, **options: Any) -> FamilyPipeline:
    return family(name).load(str(folder), dtype=torch.float32, **{**SETTINGS.get(name, {}), **options})  # type: ignore[return-value]


def same(a: Conditioning, b: Conditioning) -> None:
    assert a.tensors.keys() == b.tensors.keys()
    for name, tensor in a.tensors.items():
        assert tensor.dtype == b.tensors[name].dtype
        assert torch.equal(tensor, b.tensors[name]), name


@torch.no_grad()
def velocity_of(pipeline: FamilyPipeline, noise: Tensor, cond: Conditioning) -> Tensor:
    half = torch.full((len(noise),), 0.5)
    return pipeline.guided(pipeline.network, cond, None, 1.0)(noise, half, 1000 * half)


@pytest.fixture
def row() -> Conditioning:
    return Conditioning({"embeds": counter_normal((1, 3, 4), "row").bfloat16(), "number_on_host": torch.tensor([2])})


@pytest.fixture
def cache(tmp_path: Path) -> EmbeddingCache:
    return EmbeddingCache(folder=tmp_path / "kept", settings={"encoders": "these", "tokens": 3})


# ---- whole pipelines -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_loaded_in_order_and_read_from_disk_embeddings_are_the_same(name: str, tmp_path: Path) -> None:
    folder = save_tiny(name, tmp_path / "model")
    whole = load(name, folder)
    sources = sources_of(whole, len(PROMPTS))
    wanted = whole.encode(PROMPTS, sources)
    noise = counter_normal((3, *whole.latent_shape), "start")
    velocity = velocity_of(whole, noise, wanted)

    later, digest = load(name, folder, how=Loading(later=True)), encoders_digest(str(folder), OTHERS)
    assert [part for part in (*later.family.encoders, *later.family.denoisers) if getattr(later.pipe, part, None)] == []
    later.keep_embeddings(tmp_path / "cache", digest)
    assert not later.keeps(PROMPTS, sources)
    later.load_text_encoders()
    same(later.encode(PROMPTS, sources), wanted)
    later.free_text_encoders()
    later.load_denoiser()
    assert torch.equal(velocity_of(later, noise, later.encode(PROMPTS, sources)), velocity)
    assert later.attention == whole.attention

    for part in later.family.encoders:  # nothing of them is read again
        for path in (folder / part).rglob("*.safetensors"):
            path.unlink()
    again = load(name, folder, how=Loading(later=True))
    again.keep_embeddings(tmp_path / "cache", digest)
    assert again.keeps(PROMPTS, sources)
    same(again.encode(PROMPTS, sources), wanted)
    assert not again.keeps(["something else"], sources[:1])


def test_sources_of_another_size_are_other_entries(tmp_path: Path) -> None:
    folder = save_tiny("kontext", tmp_path / "model")
    pipeline = load("kontext", folder)
    sources = sources_of(pipeline, 1)
    pipeline.keep_embeddings(tmp_path / "cache", "these")
    larger = pipeline.resized(48, 48)
    small, large = pipeline.encode(["one"], sources), larger.encode(["one"], sources)
    assert small.tensors["image_latents"].shape != large.tensors["image_latents"].shape
    assert torch.equal(small.tensors["embeds"], large.tensors["embeds"])
    assert len(list((tmp_path / "cache").glob("*/*"))) == 3  # a text and two images
    again = load("kontext", folder)
    again.keep_embeddings(tmp_path / "cache", "these")
    same(again.resized(48, 48).encode(["one"], sources), large)


def test_what_moves_an_embedding_is_in_its_name(tmp_path: Path) -> None:
    folder = save_tiny("sd3", tmp_path / "model")
    cut = {"max_sequence_length": 8}
    cases = {
        "usual": load("sd3", folder),
        "tokens": load("sd3", folder, **cut),
        "height": load("sd3", folder, height=64),
    }
    for pipeline in cases.values():
        pipeline.keep_embeddings(tmp_path / "cache", "these")
        pipeline.encode(["one"])
    assert len(list((tmp_path / "cache").glob("*/*"))) == 2  # text has no size
    before = encoders_digest(str(folder), OTHERS)
    for part, changes in (("transformer", False), ("vae", True), ("text_encoder", True)):
        other = tmp_path / part
        shutil.copytree(folder, other)
        (path,) = (other / part).glob("*.safetensors")
        path.write_bytes(path.read_bytes()[:-1] + b"\x01")
        assert (encoders_digest(str(other), OTHERS) != before) == changes, part


@pytest.mark.slow
def test_rows_on_the_host_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny("sd3", tmp_path / "model")
    pipeline = load("sd3", folder)
    pipeline.keep_embeddings(tmp_path / "cache", "these")
    prompts = [f"prompt {number}" for number in range(6)]
    wanted = pipeline.encode(prompts)
    size = sum(tensor[:1].nbytes for tensor in wanted.tensors.values())
    monkeypatch.setattr(prompt_embeddings, "CACHED_BYTES", 2 * size)
    pipeline.free_text_encoders()
    for number, prompt in enumerate(prompts):
        same(pipeline.encode([prompt]), wanted[torch.tensor([number])])
        assert len(pipeline.embeddings.texts.rows) <= 2
    assert list(pipeline.embeddings.texts.rows) == [("prompt 4",), ("prompt 5",)]
    pipeline.encode(["prompt 4", "prompt 0"])  # what was used last stays
    assert list(pipeline.embeddings.texts.rows) == [("prompt 4",), ("prompt 0",)]


# ---- entries ---------------------------------------------------------------------------------------------------------


def test_an_entry_is_read_as_it_was_written(cache: EmbeddingCache, row: Conditioning) -> None:
    key = cache.key("one", ())
    assert not cache.has(key)
    assert cache.read(key) is None
    cache.write(key, row)
    assert cache.has(key)
    found = cache.read(key)
    assert found is not None
    same(found, row)
    keys = {cache.key("one", ()), cache.key("two", ()), cache.key("one", ("image",)), cache.key("", ("one",))}
    assert len(keys | {EmbeddingCache(folder=cache.folder, settings={"tokens": 4}).key("one", ())}) == 5


@pytest.mark.parametrize("how", ["cut", "empty", "other", "swapped", "longer"])
def test_damaged_and_foreign_entries_are_noticed(
    how: str, cache: EmbeddingCache, row: Conditioning, capsys: pytest.CaptureFixture[str]
) -> None:
    key, other = cache.key("one", ()), cache.key("two", ())
    cache.write(key, row)
    cache.write(other, row)
    path = cache.path(key)
    data = path.read_bytes()
    damage = {"cut": data[:-7], "empty": b"", "other": b"PNG" * 99, "swapped": cache.path(other).read_bytes(),
              "longer": data + b"1"}  # fmt: skip
    path.write_bytes(damage[how])
    assert not cache.has(key)
    assert cache.read(key) is None
    assert capsys.readouterr().out.count(f"Note: {path} cannot be used as an embedding") == 2
    cache.write(key, row)
    assert cache.has(key)


def test_changed_numbers_are_noticed_when_they_are_read(cache: EmbeddingCache, row: Conditioning) -> None:
    key = cache.key("one", ())
    cache.write(key, row)
    path = cache.path(key)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    assert cache.has(key)  # its head is whole
    assert cache.read(key) is None


@pytest.mark.slow
def test_an_entry_that_goes_bad_ends_the_run_and_is_made_again(tmp_path: Path) -> None:
    folder = save_tiny("sd3", tmp_path / "model")
    pipeline = load("sd3", folder)
    pipeline.keep_embeddings(tmp_path / "cache", "these")
    wanted = pipeline.encode(["one"])
    (path,) = (tmp_path / "cache").glob("*/*")
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    pipeline = load("sd3", folder, how=Loading(later=True))
    pipeline.keep_embeddings(tmp_path / "cache", "these")
    assert pipeline.keeps(["one"])
    pipeline.free_text_encoders()
    with pytest.raises(ValueError, match=r"embedding of prompt 'one' was in prompts\.cache .* continue with resume"):
        pipeline.encode(["one"])
    assert not pipeline.keeps(["one"])
    pipeline.load_text_encoders()
    same(pipeline.encode(["one"]), wanted)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"prompts\.cache: nothing can be written into .*file/below .*another folder"):
        check_cache(tmp_path / "file" / "below")
    check_cache(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
