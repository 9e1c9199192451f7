"""The Qwen-Image-Edit pipelines against stock diffusers, images and instructions given to both."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import flow_family as flow
import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from family_sampling import start_noise
from PIL import Image
from rounding import assert_same_sum
from tiny_qwen_image import SIZE, save_tiny_qwen_image, save_tiny_qwen_image_edit
from torch import Tensor
from transformers import Qwen2VLImageProcessor

from flowrl.media.images import to_pixels
from flowrl.pipelines.families.qwen_image_edit import FAMILY, image_tokens, source_size
from flowrl.pipelines.shared.common import pack
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.pipelines.weights.lora import check_targets
from flowrl.runtime.randomness import counter_normal

LENGTH = {"one": 48, "several": 480, "newest": 480}
KINDS = list(LENGTH)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of the first pipeline, of the second, and of the second with sources that are free of noise."""
    root = tmp_path_factory.mktemp("tiny")
    save_tiny_qwen_image_edit(root / "one")
    save_tiny_qwen_image_edit(root / "several", several=True)
    save_tiny_qwen_image_edit(root / "newest", several=True, zero_cond_t=True)
    return root


def load(root: Path, kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> FamilyPipeline:
    options = {"height": SIZE, "width": SIZE, "max_sequence_length": LENGTH[kind], **options}
    if kind != "one":
        options = {"num_sources": 2, **options}
    return FAMILY.load(str(root / kind), dtype=dtype, **options)


@cache
def shared(root: Path, kind: str) -> FamilyPipeline:
    """Loaded once; the tests that take it leave it as it was."""
    return load(root, kind)


def image(name: int, height: int = 20, width: int = 28) -> Tensor:
    """A source image with 8-bit values."""
    smooth = counter_normal((1, 3, 3, 3), "picture", name)
    drawn = torch.nn.functional.interpolate(smooth, (height, width), mode="bilinear")[0]
    return (drawn.sigmoid() * 255).round() / 255


def sources_of(pipeline: FamilyPipeline) -> list[list[Tensor]]:
    """The sources of both prompts: their shapes differ, their number does not."""
    count = pipeline.num_sources[0]
    return [[image(i) for i in range(count)], [image(9 - i, 24, 16) for i in range(count)]]


def stock_call(
    monkeypatch: pytest.MonkeyPatch, pipe: Any, pipeline: FamilyPipeline, scale: float, output: str
) -> Tensor:
    """The stock pipeline, prompt by prompt, with its size of sources, about 1024 x 1024, replaced by ours."""
    height, width = source_size(pipeline.card, pipeline.options)
    plus = pipeline_qwenimage_edit_plus
    real, seen = plus.calculate_dimensions, plus.CONDITION_IMAGE_SIZE
    monkeypatch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", lambda area, ratio: (width, height, None))
    monkeypatch.setattr(
        plus, "calculate_dimensions", lambda area, ratio: real(area, ratio) if area == seen else (width, height)
    )
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler = flow.OnSchedule(pipeline.schedule(flow.STEPS, "diffusers"))
    start, found = start_noise(pipeline, 2), []
    for i, (prompt, sources) in enumerate(zip(flow.PROMPTS, sources_of(pipeline), strict=True)):
        images = [Image.fromarray(to_pixels(source)) for source in sources]
        found.append(
            pipe(
                image=images if pipeline.num_sources[1] > 1 else images[0], prompt=prompt,
                negative_prompt=flow.NEGATIVE if scale > 1 else None, true_cfg_scale=scale,
                latents=pack(start[i : i + 1]), num_inference_steps=flow.STEPS, output_type=output,
                height=pipeline.image_shape[1], width=pipeline.image_shape[2],
            ).images
        )  # fmt: skip
    return torch.cat(found)


def sampled(pipeline: FamilyPipeline, scale: float) -> Tensor:
    sources = sources_of(pipeline)
    negative = pipeline.encode([flow.NEGATIVE] * 2, sources) if pipeline.passes(scale) == 2 else None
    return flow.sample_ode(pipeline, pipeline.encode(flow.PROMPTS, sources), negative, scale)


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("kind", KINDS)
def test_ode_sampling_equals_the_stock_pipeline(
    root: Path, kind: str, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, pipe = shared(root, kind), DiffusionPipeline.from_pretrained(root / kind)
    final = sampled(pipeline, scale)
    expected = stock_call(monkeypatch, pipe, pipeline, scale, "latent")
    assert_same_sum(pack(final), expected)
    assert (final - start_noise(pipeline, 2)).abs().mean() > 0.1  # the network did something


@pytest.mark.slow
def test_sources_may_have_another_size_than_what_is_drawn(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = load(root, "one", height=24, width=16, source_height=16, source_width=32)
    cond = pipeline.encode(flow.PROMPTS, sources_of(pipeline))
    assert cond.tensors["sources"].shape == (2, 1, 4, 8, 16)
    final, pipe = sampled(pipeline, 4.0), DiffusionPipeline.from_pretrained(root / "one")
    images = stock_call(monkeypatch, pipe, pipeline, 4.0, "pt")
    assert images.shape == (2, 3, 24, 16)
    assert_same_sum(pipeline.decode(final), images)
    # What was encoded stays what it is at another drawn size.
    other = pipeline.resized(16, 16)
    assert other.latent_shape == (4, 8, 8)
    assert torch.equal(other.encode(flow.PROMPTS, sources_of(pipeline)).tensors["sources"], cond.tensors["sources"])


@pytest.mark.parametrize("kind", ["one", "several"])
def test_prompts_and_every_source_change_the_image(root: Path, kind: str) -> None:
    pipeline, x = shared(root, kind), start_noise(shared(root, kind), 1)
    given = sources_of(pipeline)[0]

    def velocity(prompt: str, sources: list[Tensor]) -> Tensor:
        with torch.no_grad():
            return pipeline.network(x, torch.tensor([700.0]), pipeline.encode([prompt], [sources]))

    plain = velocity(flow.PROMPTS[0], given)
    assert (velocity(flow.PROMPTS[1], given) - plain).abs().mean() > 1e-3
    for i in range(len(given)):
        changed = [image(40) if i == j else source for j, source in enumerate(given)]
        assert (velocity(flow.PROMPTS[0], changed) - plain).abs().mean() > 1e-3


@pytest.mark.parametrize("kind", ["one", "several"])
def test_encoding_equals_stock(root: Path, kind: str) -> None:
    pipeline, pipe = shared(root, kind), DiffusionPipeline.from_pretrained(root / kind)
    sources = sources_of(pipeline)
    cond = pipeline.encode(flow.PROMPTS, sources)
    size = {"one": [(16, 16), (16, 16)], "several": [(448, 320), (320, 480)]}[kind]  # about 384 x 384, by 32s
    for i, prompt in enumerate(flow.PROMPTS):
        images = [pipe.image_processor.resize(Image.fromarray(to_pixels(s)), *size[i][::-1]) for s in sources[i]]
        embeds, mask = pipe.encode_prompt([prompt], images if kind == "several" else images[0])
        n = embeds.shape[1]
        assert mask is None
        assert torch.equal(cond.tensors["embeds"][i, :n], embeds[0])
        assert cond.tensors["mask"][i].tolist() == [True] * n + [False] * (LENGTH[kind] - n)
        for j, source in enumerate(sources[i]):
            ready = pipe.image_processor.preprocess(Image.fromarray(to_pixels(source)), SIZE, SIZE)
            latents = pipe._encode_vae_image(ready.unsqueeze(2), None)[0, :, 0]
            assert_same_sum(cond.tensors["sources"][i, j], latents)
    again = pipeline.encode(flow.PROMPTS[::-1], sources[::-1])
    assert all(torch.equal(tensor.flip(0), cond.tensors[name]) for name, tensor in again.tensors.items())


@pytest.mark.parametrize(
    ("kind", "dtype"), [("one", torch.float32), ("one", torch.bfloat16), ("newest", torch.bfloat16)], ids=str
)
def test_replay_is_exact_and_every_lora_tensor_that_can_learn_has_gradient(
    root: Path, kind: str, dtype: torch.dtype
) -> None:
    pipeline = load(root, kind, dtype)
    policy, sources = flow.adapted(pipeline), sources_of(pipeline)
    cond = pipeline.encode(flow.PROMPTS, sources)
    assert {cond.tensors[name].dtype for name in ("embeds", "sources")} == {dtype}
    idle = flow.check_replay(pipeline, policy, cond, pipeline.encode([flow.NEGATIVE] * 2, sources), 4.0)
    blind = ("add_q_proj", "to_add_out", "txt_mlp")
    assert idle == {n for n in policy.parameters if "transformer_blocks.1" in n and any(part in n for part in blind)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one", "several"])
def test_a_saved_lora_gives_the_same_images_in_stock(
    root: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = load(root, kind)
    policy = flow.adapted(pipeline)
    ours = sampled(pipeline, 4.0)
    assert (ours - sampled(shared(root, kind), 4.0)).abs().mean() > 1e-3
    pipeline.save_lora(tmp_path, policy.tensors(), policy.config)
    pipe = DiffusionPipeline.from_pretrained(root / kind)
    pipe.load_lora_weights(tmp_path)
    stock = stock_call(monkeypatch, pipe, pipeline, 4.0, "latent")
    assert_same_sum(pack(ours), stock)


def test_images_go_into_latents_and_back_as_in_qwen_image(root: Path) -> None:
    pipeline = shared(root, "one")
    images = torch.stack([image(i, SIZE, SIZE) for i in range(3)])
    cond = pipeline.encode([flow.PROMPTS[0]] * 3, [[image] for image in images])
    latents = pipeline.encode_images(images)
    assert_same_sum(latents, cond.tensors["sources"][:, 0])
    decoded = pipeline.decode(latents.requires_grad_(), gradient=True)
    assert decoded.shape == images.shape
    assert torch.autograd.grad(decoded.sum(), latents)[0].abs().sum() > 0


def test_the_schedule_counts_drawn_tokens_only(root: Path) -> None:
    flow.check_schedule_is_stocks(shared(root, "several"), 0.5 + 0.4 * (16 - 256) / (8192 - 256))


@pytest.mark.parametrize("settings", [None, {}, {"min_pixels": 3136, "max_pixels": 100_000}])
def test_tokens_of_an_image_are_those_of_stocks_processor(settings: dict[str, int] | None, tmp_path: Path) -> None:
    stock = Qwen2VLImageProcessor(size={"shortest_edge": 56 * 56, "longest_edge": 12_845_056})
    if settings is not None:
        stock = Qwen2VLImageProcessor(**settings)
        stock.save_pretrained(tmp_path / "processor")
    for height, width in ((16, 33), (56, 56), (100, 70), (512, 512), (777, 1033), (4096, 1024), (4001, 3999)):
        expected = stock.get_number_of_image_patches(height, width, {}) // stock.merge_size**2
        assert image_tokens(str(tmp_path), height, width) == expected


# ---- what is known and what is refused -------------------------------------------------------------------------------


@pytest.mark.slow
def test_known_checkpoints_have_the_published_size_and_the_targets_bind() -> None:
    for model in flow.published(FAMILY):
        network: Any = FAMILY.meta_denoiser(model)
        assert sum(p.numel() for p in network.parameters()) == 20_430_401_088
        assert network.config.zero_cond_t == model.endswith("2511")
    check_targets(network, FAMILY.lora_targets)


def test_wrong_folders_and_targets_are_refused(root: Path, tmp_path: Path) -> None:
    for kind in KINDS:
        FAMILY.check(str(root / kind), FAMILY.lora_targets)
    with pytest.raises(ValueError, match=r"'attn\.to_qkv' matches no linear layer"):
        FAMILY.check(str(root / "one"), ["attn.to_qkv"])
    other = save_tiny_qwen_image(tmp_path / "text")
    with pytest.raises(ValueError, match=r"is a QwenImagePipeline, and pipeline\.name=qwen_image_edit loads"):
        FAMILY.check(str(other), None)
    with pytest.raises(ValueError, match="is a QwenImagePipeline, and"):
        FAMILY.load(str(other))
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}), encoding="utf-8")
    with pytest.raises(ValueError, match="is a FluxPipeline, and"):
        FAMILY.load(str(tmp_path))


@pytest.mark.parametrize(("kind", "image_tokens"), [("one", 18 * 37), ("several", 2 * 14 * 14)])
def test_prompts_have_room_beside_their_images_by_default(root: Path, kind: str, image_tokens: int) -> None:
    """A side of 512 pixels is 18 squares of 28, one of 1024 37, and one of 384 14, rounded."""
    size: dict[str, Any] = {"source_height": 512, "source_width": 1024, "max_sequence_length": None}
    assert load(root, kind, **size).max_sequence_length == 512 + image_tokens
    bare = root / f"{kind}_bare"
    shutil.copytree(root / kind, bare, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    message = rf"max_sequence_length \({image_tokens}\) must lie in .* take {image_tokens} tokens"
    with pytest.raises(ValueError, match=message):  # before weights load: there are none
        FAMILY.load(str(bare), **size | {"max_sequence_length": image_tokens, "num_sources": 1 + (kind != "one")})
    one_more = load(root, kind, **size | {"max_sequence_length": image_tokens + 1})
    assert one_more.max_sequence_length == image_tokens + 1


def test_published_models_are_checked_without_a_download() -> None:
    first, second = "Qwen/Qwen-Image-Edit", "Qwen/Qwen-Image-Edit-2511"
    with pytest.raises(ValueError, match=r"max_sequence_length \(1024\) must lie in 1370 \.\. 4064: .* for 1881, or"):
        FAMILY.load(first, max_sequence_length=1024)
    with pytest.raises(ValueError, match=r"\(3, seen at 384 x 384\) take 588 tokens of it; leave it out for 1100$"):
        FAMILY.load(second, max_sequence_length=512, num_sources=3)
    with pytest.raises(ValueError, match=r"\(8192\) must lie in 197 \.\. 4064"):  # 4096 positions, half a side's before
        FAMILY.load(second, max_sequence_length=8192)
    assert [FAMILY.text_tokens(model, {}) for model in (first, second)] == [512 + 1369, 512 + 196]
    assert FAMILY.text_tokens(second, {"max_sequence_length": 250}) == 250


@pytest.mark.parametrize("kind", ["one", "several"])
def test_an_images_tokens_are_counted_as_the_text_encoder_sees_them(root: Path, kind: str) -> None:
    pipeline = load(root, kind, source_height=140, source_width=84, max_sequence_length=None)
    square = [image(i, 32, 32) for i in range(pipeline.num_sources[0])]
    seen: list[Tensor] = []
    hook = pipeline.pipe.text_encoder.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True
    )
    pipeline.encode(["a"], [square])
    hook.remove()
    pad = pipeline.pipe.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert int((seen[0] == pad).sum()) == pipeline.max_sequence_length - 512 == {"one": 15, "several": 392}[kind]


def test_wrong_sources_and_sizes_are_refused(root: Path) -> None:
    one, two = image(0), [image(0), image(1)]
    with pytest.raises(ValueError, match=r"has 2 source images, and qwen_image_edit as loaded .*num_sources=1 takes 1"):
        shared(root, "one").encode(["a"], [two])
    with pytest.raises(ValueError, match=r"has 0 source images, .*num_sources=2 takes 2"):
        shared(root, "several").encode(["a"])
    with pytest.raises(ValueError, match=r"has 1 source images"):
        shared(root, "several").encode(["a", "b"], [two, [one]])
    with pytest.raises(ValueError, match=r"num_sources \(2\) must lie in 1 \.\. 1 for .*2509"):
        load(root, "one", num_sources=2)
    with pytest.raises(ValueError, match=r"num_sources \(4\) must lie in 1 \.\. 3"):
        load(root, "several", num_sources=4)
    with pytest.raises(ValueError, match=r"source_height and source_width \(18, 16\) must be multiples of 4"):
        load(root, "one", source_height=18)
    with pytest.raises(ValueError, match=r"pipeline\.height \(18\) must be a multiple of 4"):
        load(root, "one", height=18)
    with pytest.raises(ValueError, match=r"take \d+ tokens: raise pipeline\.max_sequence_length \(9\)"):
        load(root, "one", max_sequence_length=9).encode(["a"], [[one]])
    pipeline = shared(root, "one")
    with pytest.raises(ValueError, match="reads a negative prompt"):
        pipeline.guided(pipeline.network, pipeline.encode(["a"], [[one]]), None, 4.0)
