"""DreamSim on small random towers in the released layout; against the package's own network where it lies about."""

from __future__ import annotations

import importlib.util
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_clip import assert_pointwise, inputs_of
from torch import Tensor, nn

from flowrl.rewards import build_reward, reward_options, to_uint8
from flowrl.rewards.metrics import dream_sim

pytest.importorskip("timm")
DEPTH = 3 if importlib.util.find_spec("dreamsim") is None else 12  # the package reads its twelfth block
WIDTH, RANK, ALPHA = 128, 2, 3.0
PATCH = 56


def coarse(batch: int, height: int, width: int | None = None, seed: int = 0) -> Tensor:
    """Blocks of colour, which random networks tell apart better than noise."""
    small = torch.rand(batch, 3, height // 8, (width or height) // 8, generator=torch.Generator().manual_seed(seed))
    return small.repeat_interleave(8, -1).repeat_interleave(8, -2)


def tower_weights(patch: int, *, clip: bool, seed: int) -> dict[str, Tensor]:
    """A vision transformer of two heads by the names of DINO's code, and of DreamSim's conversions of CLIP."""
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, WIDTH), "pos_embed": (1, (224 // patch) ** 2 + 1, WIDTH),
        "patch_embed.proj.weight": (WIDTH, 3, patch, patch), "patch_embed.proj.bias": (WIDTH,),
        "norm.weight": (WIDTH,), "norm.bias": (WIDTH,),
    }  # fmt: skip
    layers: dict[str, tuple[int, ...]] = {
        "attn.qkv": (3 * WIDTH, WIDTH),
        "attn.proj": (WIDTH, WIDTH),
        "mlp.fc1": (4 * WIDTH, WIDTH),
    }
    layers |= {"mlp.fc2": (WIDTH, 4 * WIDTH), "norm1": (WIDTH,), "norm2": (WIDTH,)}
    for block in range(DEPTH):
        for name, shape in layers.items():
            shapes |= {f"blocks.{block}.{name}.weight": shape, f"blocks.{block}.{name}.bias": shape[:1]}
    if clip:
        shapes |= {"proj": (WIDTH, 24), "pos_drop.weight": (WIDTH,), "pos_drop.bias": (WIDTH,)}
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 0.15 for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every variant's files as the package leaves them in its cache folder, patches of 56 pixels all."""
    folder = tmp_path_factory.mktemp("dreamsim")
    (folder / "checkpoints").mkdir()
    torch.save(tower_weights(PATCH, clip=False, seed=0), folder / "checkpoints/dino_vitbase16_pretrain.pth")
    for seed, name in enumerate(("clip_vitb16", "open_clip_vitb16", "clip_vitb32", "open_clip_vitb32"), 1):
        weights = tower_weights(PATCH, clip=True, seed=seed)
        torch.save({"state_dict": weights, "kwargs": {}}, folder / f"{name}_pretrain.pth.tar")
    for seed, (adapter, towers) in enumerate(dream_sim.VARIANTS.values()):
        generator = torch.Generator().manual_seed(seed)
        start, lora = "base_model.model.extractor_list", {}
        for place in range(len(towers)):
            for block in range(DEPTH):
                name = f"{start}.{place}.model.blocks.{block}.attn.qkv.lora_"
                lora[f"{name}A.weight"] = torch.randn(RANK, WIDTH, generator=generator) * 0.3
                lora[f"{name}B.weight"] = torch.randn(3 * WIDTH, RANK, generator=generator) * 0.3
        (folder / adapter).mkdir()
        torch.save(lora, folder / adapter / "adapter_model.bin")
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.3, "bias": "none"}
        config |= {"target_modules": ["qkv"], "inference_mode": True}
        (folder / adapter / "adapter_config.json").write_text(json.dumps(config))
    return folder


def normalised(x: Tensor, name: str, *, w: dict[str, Tensor], eps: float) -> Tensor:
    return nn.functional.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)


def by_hand(folder: Path, variant: str, image: np.ndarray) -> np.ndarray:
    """The joint embedding of an image, float64, from the weights alone."""
    adapter, towers = dream_sim.VARIANTS[variant]
    lora = torch.load(folder / adapter / "adapter_model.bin")
    pixels = torch.from_numpy(np.asarray(Image.fromarray(image).resize((224, 224), Image.Resampling.BICUBIC)).copy())
    features = []
    for place, tower in enumerate(towers):
        stored = torch.load(next(folder / name for name in tower.files if (folder / name).is_file()))
        w = {name: weight.double() for name, weight in stored.get("state_dict", stored).items()}
        look = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
        if tower.clip:
            look = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
        x = ((pixels.double() / 255 - torch.tensor(look[0]).double()) / torch.tensor(look[1]).double()).permute(2, 0, 1)
        norm = partial(normalised, w=w, eps=1e-5 if tower.clip else 1e-6)
        kernel = w["patch_embed.proj.weight"]
        x = nn.functional.conv2d(x[None], kernel, w["patch_embed.proj.bias"], stride=kernel.shape[-1])
        x = torch.cat([w["cls_token"][0], x[0].flatten(1).T]) + w["pos_embed"][0]
        x = norm(x, "pos_drop") if tower.clip else x
        for block in range(DEPTH):
            at, name = f"blocks.{block}", f"base_model.model.extractor_list.{place}.model.blocks.{block}.attn.qkv"
            qkv = w[f"{at}.attn.qkv.weight"]
            qkv = qkv + ALPHA / RANK * lora[f"{name}.lora_B.weight"].double() @ lora[f"{name}.lora_A.weight"].double()
            q, k, v = (
                (norm(x, f"{at}.norm1") @ qkv.T + w[f"{at}.attn.qkv.bias"]).unflatten(1, (3, 2, 64)).permute(1, 2, 0, 3)
            )
            y = (torch.softmax(q @ k.transpose(1, 2) / 8, -1) @ v).transpose(0, 1).flatten(1)
            x = x + y @ w[f"{at}.attn.proj.weight"].T + w[f"{at}.attn.proj.bias"]
            y = norm(x, f"{at}.norm2") @ w[f"{at}.mlp.fc1.weight"].T + w[f"{at}.mlp.fc1.bias"]
            y = y * torch.sigmoid(1.702 * y) if tower.quick_gelu else nn.functional.gelu(y)
            x = x + y @ w[f"{at}.mlp.fc2.weight"].T + w[f"{at}.mlp.fc2.bias"]
        features.append(norm(x, "norm")[0] @ w["proj"] if tower.clip else x[0])
    joined = torch.cat(features)
    joined = joined - joined.mean()
    found: np.ndarray = (joined / joined.norm()).numpy()
    return found


def test_distance_by_hand_to_the_nearest_reference(folder: Path) -> None:
    images, others = coarse(3, 40, 56), coarse(4, 48, 32, seed=5)
    references = [[others[0]], [others[1], others[2]], [others[3]]]
    reward = build_reward("dreamsim", options={"folder": str(folder)})
    output = reward(inputs_of(images, reference_images=references))
    for item, image in enumerate(to_uint8(images)):
        mine = by_hand(folder, "ensemble", image)
        nearest = min(1 - mine @ by_hand(folder, "ensemble", to_uint8(o[None])[0]) for o in references[item])
        assert float(output.values[item]) == pytest.approx(-nearest, abs=1e-5)
    torch.testing.assert_close(output.parts["distance"], -output.values)
    assert_pointwise(reward, inputs_of(images, reference_images=references))
    same = reward(inputs_of(images, reference_images=[[image] for image in images])).values
    torch.testing.assert_close(same, torch.zeros(3), rtol=0, atol=1e-5)


def test_sources_of_edits_and_missing_references(folder: Path) -> None:
    images = coarse(2, 40)
    reward = build_reward("dreamsim", options={"folder": str(folder), "variant": "dino_vitb16", "against": "sources"})
    assert reward.needs == {"images", "source_images"}
    output = reward(inputs_of(images, source_images=[[images[1]], []]))
    assert output.valid.tolist() == [True, False]
    assert output.errors == {"missing_reference": 1}


def test_what_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no folder"):
        reward_options("dreamsim", {"folder": str(tmp_path / "none")})
    with pytest.raises(ValueError, match="adapter_config"):
        build_reward("dreamsim", options={"folder": str(tmp_path)})
    (tmp_path / "ensemble_lora").symlink_to(folder / "ensemble_lora")
    with pytest.raises(ValueError, match=r"lacks dino_vitbase16_pretrain\.pth"):
        build_reward("dreamsim", options={"folder": str(tmp_path)})
    torch.save({"cls_token": torch.zeros(1, 1, 8)}, tmp_path / "dino_vitbase16_pretrain.pth")
    with pytest.raises(ValueError, match=r"changes blocks\.0\.attn\.qkv\.weight"):
        build_reward("dreamsim", options={"folder": str(tmp_path)})
    (tmp_path / "dino_vitb16_single_lora").symlink_to(folder / "ensemble_lora")
    (tmp_path / "dino_vitbase16_pretrain.pth").unlink()
    torch.save(tower_weights(PATCH, clip=False, seed=0), tmp_path / "dino_vitbase16_pretrain.pth")
    with pytest.raises(ValueError, match="more networks"):
        build_reward("dreamsim", options={"folder": str(tmp_path), "variant": "dino_vitb16"})


@pytest.mark.parametrize("variant", ["ensemble", "dino_vitb16", "clip_vitb32", "open_clip_vitb32"])
@pytest.mark.filterwarnings("ignore")
def test_distances_are_those_of_the_package(folder: Path, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's own network; its towers have the small width, and DINO's code comes from itself, not from a hub."""
    pytest.importorskip("dreamsim")
    package: Any = importlib.import_module("dreamsim.model")
    room = "dreamsim.feature_extraction."
    vit: Any = importlib.import_module(f"{room}vision_transformer")

    def small(patch_size: int = 16) -> Any:
        eps = partial(nn.LayerNorm, eps=1e-6)
        return vit.VisionTransformer(
            patch_size=PATCH, embed_dim=WIDTH, depth=DEPTH, num_heads=2, qkv_bias=True, norm_layer=eps
        )

    def dino(repository: str, name: str) -> Any:
        network = small()
        network.load_state_dict(torch.load(folder / "checkpoints/dino_vitbase16_pretrain.pth"))
        return network

    for loader in ("load_clip_as_dino", "load_open_clip_as_dino"):
        monkeypatch.setattr(importlib.import_module(f"{room}{loader}"), "vit_base", small)
    extractor: Any = importlib.import_module(f"{room}extractor")
    monkeypatch.setattr(extractor.torch.hub, "load", dino)
    monkeypatch.setattr(extractor.torch.hub, "set_dir", lambda path: None)
    head = {f"module.head.{k}": torch.zeros(1) for k in ("mlp.0.weight", "mlp.0.bias", "mlp.2.weight", "mlp.2.bias")}
    head |= {f"module.head.{k}": torch.zeros(1) for k in ("mlp.4.weight", "mlp.4.bias", "last_layer.weight")}
    torch.save({"student": head}, folder / "dino_vitb16_pretrain.pth")
    monkeypatch.setattr(extractor.ViTExtractor, "patch_vit_resolution", staticmethod(lambda model, stride: model))
    own, preprocess = package.dreamsim(pretrained=True, device="cpu", cache_dir=str(folder), dreamsim_type=variant)
    images, others = coarse(3, 40, 56), coarse(3, 48, 32, seed=5)
    files = [[preprocess(Image.fromarray(image)) for image in to_uint8(batch)] for batch in (images, others)]
    wanted = [float(own(image, other)) for image, other in zip(*files, strict=True)]
    reward = build_reward("dreamsim", options={"folder": str(folder), "variant": variant})
    output = reward(inputs_of(images, reference_images=[[other] for other in others]))
    np.testing.assert_allclose(output.parts["distance"], wanted, rtol=0, atol=5e-6)
    assert np.std(wanted) > 1e-4
