"""Which model a name means, how it is sampled, and what its fingerprint notices."""

from __future__ import annotations

import inspect
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import toy_pipeline
from evaluation_runs import make_run
from safetensors.torch import save_file

from flowrl.generation.models import (
    EMBEDDED,
    check_source,
    find_source,
    fingerprint,
    label_of,
    load_source,
    schedule_of,
    with_negative,
)
from flowrl.generation.sampling_options import SamplingOptions
from flowrl.pipelines import PIPELINES
from flowrl.pipelines import family as known_family
from flowrl.pipelines.places.known_checkpoints import tables, usual_sampling
from flowrl.prompts.loading import Prompt
from flowrl.samplers import build_schedule


def test_the_embedded_model_and_others_have_their_defaults() -> None:
    embedded = find_source(EMBEDDED)
    assert (embedded.model, embedded.lora) == (EMBEDDED, None)
    assert (embedded.num_steps, embedded.guidance_scale, embedded.max_sequence_length) == (10, 3.0, 16)
    hub = find_source("stabilityai/stable-diffusion-3.5-medium")
    assert (hub.num_steps, hub.guidance_scale, hub.max_sequence_length, hub.dtype) == (40, 4.5, None, "float32")
    changed = find_source(
        EMBEDDED, sampling=SamplingOptions(steps=3, guidance=1.0, max_sequence_length=8, dtype="bfloat16")
    )
    assert (changed.num_steps, changed.guidance_scale, changed.max_sequence_length, changed.dtype) == (
        3,
        1.0,
        8,
        "bfloat16",
    )


OTHER_THAN_STOCK = {
    "sd3": (40, 4.5),
    "kontext": (28, 2.5),
    "chroma": (40, 3.0),
    "hunyuan_image": (50, 3.5),
    "hunyuan_video15": (50, 6.0),
    "motif_video": (50, 8.0),
}
"""Families that model cards sample otherwise than the stock call does unless told: 3.5 Medium, Kontext, Chroma1-HD; and
HunyuanImage, HunyuanVideo-1.5 and Motif-Video, whose scale is that of their `guider` and no argument."""


@pytest.mark.parametrize("family", sorted(PIPELINES))
def test_a_family_is_sampled_as_its_stock_pipeline_is(family: str) -> None:
    usual = usual_sampling(family, "some/folder")
    for stock in tables()["families"][family]["stock"]:
        call = inspect.signature(getattr(diffusers, stock).__call__).parameters
        linear = "guidance_scale" not in call or call["guidance_scale"].default is None
        scale = "true_cfg_scale" if linear else "guidance_scale"
        own = (call["num_inference_steps"].default, call[scale].default if scale in call else None)
        assert (usual["num_steps"], usual["guidance_scale"]) == OTHER_THAN_STOCK.get(family, own)


@pytest.mark.parametrize(
    ("model", "steps", "scale"),
    [
        ("stabilityai/stable-diffusion-3.5-large-turbo", 4, 1.0),
        ("black-forest-labs/FLUX.1-schnell", 4, 1.0),
        ("black-forest-labs/FLUX.2-klein-4B", 4, 1.0),
        ("Tongyi-MAI/Z-Image-Turbo", 8, 0.0),
        ("black-forest-labs/FLUX.1-dev", 28, 3.5),
    ],
)
def test_distilled_checkpoints_are_sampled_in_few_steps_without_guidance(model: str, steps: int, scale: float) -> None:
    source = find_source(model)
    assert (source.num_steps, source.guidance_scale) == (steps, scale)
    if steps < 10:
        assert known_family(source.family).rows(model, scale) == 1
    told = find_source(model, sampling=SamplingOptions(steps=9, guidance=2.0, height=512))
    assert (told.num_steps, told.guidance_scale, told.height, told.width) == (9, 2.0, 512, None)


def test_a_run_says_itself_how_it_is_sampled(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", eval={"num_steps": 7, "guidance_scale": 2.5})
    source = find_source(str(run))
    assert (source.model, source.lora) == ("toy", run / "lora")
    assert (source.num_steps, source.guidance_scale, source.dtype) == (7, 2.5, "float32")
    assert source.train_prompts == str(run / "prompts.txt")
    assert find_source(str(run), base=True) == replace(source, lora=None)
    assert find_source(str(run), lora=tmp_path / "other").lora == tmp_path / "other"
    plain = make_run(tmp_path / "plain")
    assert (find_source(str(plain)).num_steps, find_source(str(plain)).guidance_scale) == (4, 1.0)
    assert len(build_schedule({"shift": 2.0}, 4, grid=find_source(str(plain)).grid).timestep) == 4


def test_a_run_gives_its_negative_prompt_and_how_it_decodes(tmp_path: Path) -> None:
    file = tmp_path / "two.txt"
    file.write_text("a red circle\na blue square\n")
    run = make_run(
        tmp_path / "run", prompts={"train": str(file), "negative": "blurred"},
        pipeline={"name": "sd3", "model": "toy", "height": 32, "width": 48, "vae_slice": 2}, eval={"height": 64},
    )  # fmt: skip
    source = find_source(str(run))
    assert (source.negative, source.height, source.width) == ("blurred", 64, 48)
    assert source.options == {"height": 64, "width": 48, "vae_slice": 2}
    own, plain = Prompt(text="a", metadata={}, negative="grey"), Prompt(text="b", metadata={})
    assert [row.negative for row in with_negative([own, plain], source)] == ["grey", "blurred"]
    assert with_negative([own, plain], find_source(EMBEDDED)) == [own, plain]


class Sized:
    """A pipeline whose noise levels are its size; of its own it draws 1024 x 1024."""

    def __init__(self, height: int = 256, width: int = 512) -> None:
        self.size = (height, width)

    def resized(self, height: int | None, width: int | None) -> Sized:
        return Sized(height or 1024, width or 1024)

    def schedule(self, num_steps: int, grid: str, shift: float | None) -> Any:
        return (*self.size, num_steps, grid, shift)


@pytest.mark.parametrize(
    ("trained", "evaluated", "size"),
    [
        ({"height": 64, "width": 96}, {"height": 256, "width": 512, "shift": "training"}, (64, 96)),
        ({"height": 64}, {"height": 256, "shift": "training"}, (64, 1024)),
        ({}, {"width": 512, "shift": "training"}, (1024, 1024)),
        ({"height": 64, "width": 96}, {"height": 256, "width": 512}, (256, 512)),
        ({"height": 256, "width": 512}, {"shift": "training"}, (256, 512)),
    ],
)
def test_the_noise_levels_of_training_are_visited_at_another_size(
    tmp_path: Path, trained: dict[str, int], evaluated: dict[str, Any], size: tuple[int, int]
) -> None:
    run = make_run(tmp_path / "run", pipeline={"name": "flux", "model": "toy", **trained}, eval=evaluated,
                   sampler={"kernel": "flow_sde", "num_steps": 4, "shift": 1.5})  # fmt: skip
    sized: Any = Sized()
    found: Any = schedule_of(find_source(str(run)), sized)
    assert found == (*size, 4, "diffusers", 1.5)


def test_a_model_is_loaded_where_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setitem(PIPELINES, "sd3", "toy_pipeline")
    monkeypatch.setattr(toy_pipeline, "load", lambda model, **options: asked.update(options))
    source = find_source(EMBEDDED)
    load_source(source, "meta")
    assert asked["device"] == "meta"
    load_source(source)
    assert asked["device"] in ("cpu", "cuda")
    assert asked["how"].offload == ()


def test_what_rests_on_the_host_in_a_run_does_so_in_its_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setitem(PIPELINES, "sd3", "toy_pipeline")
    monkeypatch.setattr(toy_pipeline, "load", lambda model, **options: asked.update(options))
    chosen = {"name": "sd3", "model": "toy", "offload": ["text_encoders", "vae"]}
    load_source(find_source(str(make_run(tmp_path / "run", pipeline=chosen)), base=True), "cpu")
    assert asked["how"].offload == ("text_encoders", "vae")


def test_models_of_videos_are_refused_where_images_are_judged() -> None:
    check_source(find_source(EMBEDDED), judging="a card")
    check_source(find_source("asset:tiny-kontext"), judging="a card")
    with pytest.raises(ValueError, match=r"asset:tiny-wan makes videos \(family wan\) and a card judges images"):
        check_source(find_source("asset:tiny-wan"), judging="a card")


def test_the_lora_folder_of_a_run_is_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert find_source(str(run / "lora")) == replace(find_source(str(run)), lora=run / "lora")
    copy = tmp_path / "copy"
    shutil.copytree(run / "lora", copy)
    with pytest.raises(ValueError, match=f"names no base model: give that one, and `lora` {copy}"):
        find_source(str(copy))
    (copy / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": EMBEDDED}))
    assert find_source(str(copy)) == find_source(EMBEDDED, lora=copy)
    with pytest.raises(ValueError, match="is a LoRA and `lora` gives another"):
        find_source(str(copy), lora=run / "lora")


def test_a_bad_dtype_and_missing_parts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`dtype`: unknown dtype 'bfloat' \(did you mean 'bfloat16'\?\)"):
        find_source(EMBEDDED, sampling=SamplingOptions(dtype="bfloat"))
    check_source(find_source(EMBEDDED))
    with pytest.raises(ValueError, match=f"there is no LoRA in {tmp_path}"):
        check_source(find_source(EMBEDDED, lora=tmp_path))
    with pytest.raises(ValueError, match="is not a diffusers pipeline"):
        check_source(find_source(str(tmp_path)))
    with pytest.raises(ValueError, match="there is no"):
        check_source(find_source("asset:nothing"))


def test_the_fingerprint_notices_weights_and_lora_and_not_the_place(tmp_path: Path) -> None:
    def folder(name: str, middle: bytes = b"", end: bytes = b"") -> Path:
        path = tmp_path / name
        (path / "transformer").mkdir(parents=True)
        (path / "model_index.json").write_text('{"_class_name": "StableDiffusion3Pipeline"}')
        (path / "transformer" / "model.safetensors").write_bytes(bytes(2**20) + middle + bytes(2**20) + end)
        return path

    first = folder("first")
    lora = make_run(tmp_path / "run") / "lora"
    source = find_source(str(first))
    mark = fingerprint(source)
    assert mark == fingerprint(source) == fingerprint(find_source(str(folder("second"))))
    (first / "README.md").write_text("words")
    (first / ".cache").mkdir()
    (first / ".cache" / "x").write_text("words")
    assert fingerprint(source) == mark
    marks = {mark, fingerprint(find_source(str(folder("third", end=b"1"))))}
    marks.add(fingerprint(find_source(str(folder("fourth", middle=b"1")))))  # the length tells
    marks.add(fingerprint(replace(source, lora=lora)))
    save_file({"x": torch.ones(2)}, lora / "pytorch_lora_weights.safetensors")
    marks.add(fingerprint(replace(source, lora=lora)))
    (first / "model_index.json").write_text('{ "_class_name": "StableDiffusion3Pipeline"}')
    marks.add(fingerprint(source))
    assert len(marks) == 6
    assert None not in marks


def test_a_hub_model_that_is_not_here_has_no_fingerprint_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = find_source("stabilityai/stable-diffusion-3.5-medium")
    assert fingerprint(source) is None
    snapshot = tmp_path / "models--stabilityai--stable-diffusion-3.5-medium" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (snapshot / "model_index.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda model, name, revision: str(snapshot / name))
    first = fingerprint(source)
    later = snapshot.rename(snapshot.with_name("4567def"))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda model, name, revision: str(later / name))
    assert first is not None
    assert first != fingerprint(source)


def test_labels() -> None:
    assert label_of(EMBEDDED) == "tiny-sd3"
    assert label_of("runs/embedded-3/") == "embedded-3"
    assert label_of("runs/embedded-3/lora") == "embedded-3-lora"
    assert label_of("stabilityai/stable-diffusion-3.5-medium") == "stable-diffusion-3.5-medium"
    assert label_of(EMBEDDED, Path("loras/red")) == "tiny-sd3-red"
