"""GenEval's own detector: mmdet's names and numbers in transformers' class, and files that are read without being run.

`openmmlab_small.json` holds what mmdet 3.3.0 computed for a small configuration (`tests/trials/openmmlab_parity.py`).
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
import sys
import types
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evaluation_folders import write_folder
from older_layouts import noise, weight
from tiny_clip import write_tiny_clip
from torch import Tensor

from flowrl.benchmarks.geneval.published import CLASSES
from flowrl.evaluation.runner import run
from flowrl.generation.subject import Settings, Subject
from flowrl.rewards import build_reward, reward_options
from flowrl.rewards.networks import mask2former, openmmlab
from flowrl.rewards.networks.detectors import detector_options
from flowrl.rewards.networks.mask2former import UNREAD, Mask2FormerDetector
from flowrl.rewards.networks.openmmlab import neighbours_apart, network_of, to_transformers
from flowrl.rewards.networks.pretrained import read_weights

CPU = torch.device("cpu")
SMALL: dict[str, Any] = json.loads((Path(__file__).parent / "openmmlab_small.json").read_text())
TOLERANCE = 1e-6  # float64 on both sides; the file rounds to 9 decimals, positions are float32 in transformers


def small_weights() -> dict[str, Tensor]:
    """mmdet's state dict, under the names of mmdet 3."""
    made = {name: weight(name, tuple(shape)) for name, shape in SMALL["shapes"].items()}
    index = "backbone.stages.0.blocks.0.attn.w_msa.relative_position_index"  # a buffer that mmdet saves
    return made | {index: torch.zeros(4, 4, dtype=torch.int64)}


def older_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same under the names of mmdet 2, whose layers number their attentions and feed-forward networks."""
    renamed = {}
    for name, value in weights.items():
        name = re.sub(r"(pixel_decoder\.encoder\.layers\.\d+)\.self_attn\.", r"\1.attentions.0.", name)
        name = re.sub(r"(transformer_decoder\.layers\.\d+)\.cross_attn\.", r"\1.attentions.0.", name)
        name = re.sub(r"(transformer_decoder\.layers\.\d+)\.self_attn\.", r"\1.attentions.1.", name)
        renamed[re.sub(r"(panoptic_head\..*layers\.\d+)\.ffn\.", r"\1.ffns.0.", name)] = value
    return renamed


# ---- the network -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", [2, 3])
def test_outputs_are_those_of_mmdet(release: int) -> None:
    assert SMALL["mmdet"] == "3.3.0"
    weights = small_weights() if release == 3 else older_names(small_weights())
    assert any("attentions.1" in name for name in weights) == (release == 2)
    network = network_of(weights, unread=UNREAD, owner="judge 'x'").double()
    found = network(pixel_values=noise("pixels", tuple(SMALL["pixels"])).double())
    for given, name in ((found.class_queries_logits, "class_logits"), (found.masks_queries_logits, "mask_logits")):
        wanted = torch.tensor(SMALL[name], dtype=torch.float64)
        assert wanted.abs().max() > 1
        torch.testing.assert_close(given, wanted, rtol=0, atol=TOLERANCE)


def test_loading_draws_no_random_numbers() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    network_of(small_weights(), unread=UNREAD, owner="judge 'x'")
    assert torch.equal(torch.get_rng_state(), before)


def test_neighbours_are_reordered_as_the_two_libraries_take_them() -> None:
    """Four neighbours of a 2 x 2 image side by side: by Unfold, as mmdet, and by slices, as transformers."""
    image = torch.randn(1, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    theirs = torch.nn.functional.unfold(image, 2, stride=2)[0, :, 0]
    parts = [image[0, :, row, column] for row, column in ((0, 0), (1, 0), (0, 1), (1, 1))]
    assert torch.equal(neighbours_apart(theirs), torch.cat(parts))
    matrix = torch.randn(5, 12, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(matrix @ theirs, neighbours_apart(matrix) @ torch.cat(parts))


def test_every_weight_of_the_released_size_has_its_place() -> None:
    """Swin-S with 100 queries: the class on shapes alone, no memory."""
    from transformers import Mask2FormerForUniversalSegmentation

    from flowrl.rewards.networks.openmmlab import config_of

    with torch.device("meta"):
        weights = {name: torch.empty(shape) for name, shape in released_shapes().items()}
        renamed = to_transformers(weights)
        network = Mask2FormerForUniversalSegmentation(config_of(renamed))
    wanted = {name: tuple(p.shape) for name, p in network.named_parameters() if "swin.layernorm" not in name}
    assert {name: tuple(tensor.shape) for name, tensor in renamed.items()} == wanted
    assert len(released_shapes()) == 625  # mmdet's 649 entries less 24 tables of places, which are not weights
    assert (network.config.num_labels, network.config.num_queries, network.config.num_attention_heads) == (80, 100, 8)
    assert network.config.backbone_config.depths == [2, 2, 18, 2]
    assert network.config.backbone_config.window_size == 7


def released_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of mmdet's Mask2Former Swin-S for COCO instances, from its configuration."""
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, out: int, into: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (out, into), (out,)

    def norm(name: str, size: int) -> None:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (size,)

    def attention(name: str) -> None:
        shapes[f"{name}.attn.in_proj_weight"], shapes[f"{name}.attn.in_proj_bias"] = (768, 256), (768,)
        linear(f"{name}.attn.out_proj", 256, 256)

    def feed_forward(name: str, size: int, inner: int) -> None:
        linear(f"{name}.layers.0.0", inner, size)
        linear(f"{name}.layers.1", size, inner)

    shapes["backbone.patch_embed.projection.weight"] = (96, 3, 4, 4)
    shapes["backbone.patch_embed.projection.bias"] = (96,)
    norm("backbone.patch_embed.norm", 96)
    for stage, (depth, heads) in enumerate(((2, 3), (2, 6), (18, 12), (2, 24))):
        size = 96 * 2**stage
        norm(f"backbone.norm{stage}", size)
        for i in range(depth):
            block = f"backbone.stages.{stage}.blocks.{i}"
            norm(f"{block}.norm1", size)
            norm(f"{block}.norm2", size)
            shapes[f"{block}.attn.w_msa.relative_position_bias_table"] = (169, heads)
            linear(f"{block}.attn.w_msa.qkv", 3 * size, size)
            linear(f"{block}.attn.w_msa.proj", size, size)
            feed_forward(f"{block}.ffn", size, 4 * size)
        if stage < 3:
            shapes[f"backbone.stages.{stage}.downsample.reduction.weight"] = (2 * size, 4 * size)
            norm(f"backbone.stages.{stage}.downsample.norm", 4 * size)
    pixels, head = "panoptic_head.pixel_decoder", "panoptic_head.transformer_decoder"
    for i, size in enumerate((768, 384, 192)):
        shapes[f"{pixels}.input_convs.{i}.conv.weight"] = (256, size, 1, 1)
        shapes[f"{pixels}.input_convs.{i}.conv.bias"] = (256,)
        norm(f"{pixels}.input_convs.{i}.gn", 256)
    shapes[f"{pixels}.lateral_convs.0.conv.weight"] = (256, 96, 1, 1)
    shapes[f"{pixels}.output_convs.0.conv.weight"] = (256, 256, 3, 3)
    norm(f"{pixels}.lateral_convs.0.gn", 256)
    norm(f"{pixels}.output_convs.0.gn", 256)
    shapes[f"{pixels}.mask_feature.weight"], shapes[f"{pixels}.mask_feature.bias"] = (256, 256, 1, 1), (256,)
    shapes[f"{pixels}.level_encoding.weight"] = (3, 256)
    for i in range(6):
        layer = f"{pixels}.encoder.layers.{i}"
        for name, out in (("sampling_offsets", 192), ("attention_weights", 96), ("value_proj", 256),
                          ("output_proj", 256)):  # fmt: skip
            linear(f"{layer}.self_attn.{name}", out, 256)
        feed_forward(f"{layer}.ffn", 256, 1024)
        for k in range(2):
            norm(f"{layer}.norms.{k}", 256)
    for i in range(9):
        layer = f"{head}.layers.{i}"
        attention(f"{layer}.self_attn")
        attention(f"{layer}.cross_attn")
        feed_forward(f"{layer}.ffn", 256, 2048)
        for k in range(3):
            norm(f"{layer}.norms.{k}", 256)
    norm(f"{head}.post_norm", 256)
    shapes["panoptic_head.query_embed.weight"] = shapes["panoptic_head.query_feat.weight"] = (100, 256)
    shapes["panoptic_head.level_embed.weight"] = (3, 256)
    linear("panoptic_head.cls_embed", 81, 256)
    for k in (0, 2, 4):
        linear(f"panoptic_head.mask_embed.{k}", 256, 256)
    return shapes


def test_other_networks_are_refused() -> None:
    complete = small_weights()
    lacking = {name: value for name, value in complete.items() if "mask_embed.2" not in name}
    sizeless = {name: value for name, value in complete.items() if "query_feat" not in name}
    cases = [
        ({**complete, "roi_head.x": torch.zeros(1)}, r"1 of \d+ weights have no place .*\(first: roi_head\.x\): give"),
        (
            lacking,
            r"2 of the checkpoint's weights do not fit \(.*mask_embedder\.1\.0\.bias: wanted \(32,\), got None",
        ),
        (sizeless, r"lacks '.*queries_features\.weight': give OpenMMLab's"),
        ({}, "lacks .*: give OpenMMLab's"),
    ]
    for weights, message in cases:
        with pytest.raises(ValueError, match=f"judge 'x': .*{message}"):
            network_of(weights, unread=UNREAD, owner="judge 'x'")


# ---- the file --------------------------------------------------------------------------------------------------------


class HistoryBuffer:
    """Stands for mmengine's class of that name, which is not installed where files are read."""

    def __reduce__(self) -> Any:
        return HistoryBuffer, (), {"values": np.arange(3.0), "since": datetime.datetime(2022, 5, 4)}


class Runs:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.fixture
def mmengine(monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with that class while a file is written; gone when `forget` is called."""
    name = "mmengine.logging.history_buffer"
    for place in ("mmengine", "mmengine.logging", name):
        monkeypatch.setitem(sys.modules, place, types.ModuleType(place))
    monkeypatch.setattr(HistoryBuffer, "__module__", name)
    monkeypatch.setattr(sys.modules[name], "HistoryBuffer", HistoryBuffer, raising=False)
    return name


@pytest.mark.parametrize("zipped", [True, False])  # the released file is in the format before torch 1.6
def test_objects_beside_the_tensors_are_left_out(mmengine: str, zipped: bool, tmp_path: Path) -> None:
    state = OrderedDict(a=torch.arange(3.0), b=torch.ones(2, 2))
    meta = {"CLASSES": ("person",), "logs": HistoryBuffer(), "loss": np.float64(3.5), "when": datetime.datetime.now()}
    path = tmp_path / "model.pth"
    torch.save({"meta": meta, "state_dict": state}, path, _use_new_zipfile_serialization=zipped)
    for name in [name for name in sys.modules if name.startswith("mmengine")]:
        del sys.modules[name]
    found = read_weights(path, owner="judge 'x'", others=True)
    assert not [name for name in sys.modules if name.startswith("mmengine")], "the file's module must not be imported"
    assert {name: value.tolist() for name, value in found.items()} == {"a": [0, 1, 2], "b": [[1, 1], [1, 1]]}
    with pytest.raises(ValueError, match=r"asks to run mmengine\.logging.*no code of a file is run"):
        read_weights(path, owner="judge 'x'")


class ConfigDict(dict[str, int]):
    """A dict of another program's class."""


@pytest.mark.parametrize("zipped", [True, False])
def test_what_training_programs_put_beside_the_tensors(zipped: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.pth"

    def read(meta: Any) -> dict[str, Tensor]:
        torch.save({"meta": meta, "state_dict": {"a": torch.ones(1)}}, path, _use_new_zipfile_serialization=zipped)
        return read_weights(path, owner="judge 'x'", others=True)

    counts = defaultdict(int, seen=3)
    for meta in (counts, slice(1, 2), range(3), "text".upper, {1, 2}, Counter("ab"), b"bytes", bytearray(b"b")):
        assert set(read(meta)) == {"a"}
    with pytest.raises(ValueError, match=r"of the class ConfigDict, and no code of a file is run\. Fetch") as caught:
        read(ConfigDict(lr=1))
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_file_is_not_run(zipped: bool, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    path = tmp_path / "model.pth"

    def read(call: Runs) -> dict[str, Tensor]:
        torch.save({"meta": call, "state_dict": {"a": torch.ones(1)}}, path, _use_new_zipfile_serialization=zipped)
        return read_weights(path, owner="judge 'x'", others=True)

    assert set(read(Runs(Path, str(trace)))) == {"a"}  # a stand-in is made, no path
    assert set(read(Runs(eval, f"__import__('os').mkdir({str(trace)!r})"))) == {"a"}
    assert not trace.exists()
    with pytest.raises(ValueError, match=r"asks to run posix\.mkdir, and no code of a file is run") as caught:
        read(Runs(os.mkdir, str(trace)))
    assert "weights_only" not in str(caught.value)
    assert not trace.exists()
    torch.save({"meta": {}, "state_dict": {"a": Runs(Path, "x")}}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match="is not a checkpoint"):
        read_weights(path, owner="judge 'x'", others=True)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    whole = tmp_path / "whole.pth"
    torch.save({"state_dict": {"a": torch.ones(400)}}, whole)
    for content in (b"", b"<html>not found</html>", whole.read_bytes()[:700], whole.read_bytes()[:-40]):
        path = tmp_path / "damaged.pth"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"judge 'x' could not read damaged\.pth: .*Fetch it again"):
            read_weights(path, owner="judge 'x'", others=True)


# ---- the judge -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file as OpenMMLab writes them, of 80 classes, which finds dogs everywhere."""
    path = tmp_path_factory.mktemp("openmmlab") / "small.pth"
    weights = older_names(small_weights())
    weights["panoptic_head.cls_embed.weight"] = weight("cls", (81, 32))
    weights["panoptic_head.cls_embed.bias"] = torch.zeros(81)
    weights["panoptic_head.cls_embed.bias"][CLASSES.index("dog")] = 6.0
    content = {"meta": {"CLASSES": CLASSES, "epoch": 50}, "state_dict": OrderedDict(weights)}
    torch.save(content, path, _use_new_zipfile_serialization=False)
    return path


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_clip(tmp_path_factory.mktemp("clip"), seed=1, patch=8, positions=64)


@pytest.fixture
def small_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask2former, "SHORT_SIDE", 64)


def judge_of(released: Path, clip: Path, **options: Any) -> Mask2FormerDetector:
    made = detector_options("openmmlab", {"detector": str(released), "clip_model": str(clip), **options}).build(CPU)
    assert isinstance(made, Mask2FormerDetector)
    return made


@pytest.mark.usefixtures("small_input")
def test_the_reward_runs_on_it(released: Path, clip: Path) -> None:
    judge = judge_of(released, clip)
    shown = torch.rand(1, 3, 40, 56, generator=torch.Generator().manual_seed(0))
    found = judge.detect((shown * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy())[0]
    best = max(found, key=lambda detection: detection.score)
    assert best.label == "dog"
    options = {"judge": "openmmlab", "detector": str(released), "clip_model": str(clip)}
    reward = build_reward("geneval", options=options)
    assert judge.version in reward.version
    assert "small.pth@" in judge.version


@pytest.mark.usefixtures("small_input")
def test_rgb_as_bgr_shows_the_detector_red_as_blue(released: Path, clip: Path) -> None:
    plain, swapped = judge_of(released, clip), judge_of(released, clip, rgb_as_bgr=True)
    assert plain.network is swapped.network
    shown = np.random.default_rng(0).integers(0, 256, (2, 40, 56, 3), dtype=np.uint8)

    def scores(judge: Mask2FormerDetector, images: np.ndarray) -> list[list[float]]:
        return [[detection.score for detection in found] for found in judge.detect(images)]

    assert scores(swapped, shown) == scores(plain, shown[..., ::-1])
    assert scores(swapped, shown) != scores(plain, shown)
    detection = plain.detect(shown)[0][0]
    assert swapped.color_of(shown[0], detection) == plain.color_of(shown[0], detection)
    assert plain.version.replace(":rgb:", ":rgb_as_bgr:") == swapped.version
    assert any("Flow-GRPO's reward server" in remark for remark in swapped.remarks)


def test_only_the_released_file_gives_genevals_own_numbers(
    released: Path, clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is known by its bytes, whatever its name."""
    other = judge_of(released, clip)
    assert any("is not one that OpenMMLab released" in remark for remark in other.remarks)
    digits = hashlib.sha256(released.read_bytes()).hexdigest()[:8]
    monkeypatch.setitem(openmmlab.RELEASED, digits, "the file")
    monkeypatch.setattr(openmmlab, "DEFAULT_CLIP", str(clip))
    own = judge_of(released, clip)
    assert f"openmmlab-1:released-{digits}:rgb:" in own.version
    assert len(own.remarks) == 1
    assert "GenEval's own: published numbers" in own.remarks[0]
    assert not any("GenEval's own: published" in remark for remark in other.remarks)


@pytest.mark.usefixtures("small_input")
def test_an_evaluation_says_with_what_its_numbers_compare(
    released: Path, clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images of COCO's objects through `flowrl eval --judge openmmlab`; options come as texts."""
    dog = {"tag": "single_object", "include": [{"class": "dog", "count": 1}], "prompt": "a photo of a dog"}
    random = np.random.default_rng(0).integers(0, 256, (40, 56, 3), dtype=np.uint8)
    folder = write_folder(tmp_path / "images", [dog], samples=1, image=lambda *_: random)
    given = {"detector": str(released), "clip_model": str(clip)}

    def notes(**options: str) -> str:
        settings = Settings(
            benchmark="geneval", subject=Subject(label="model", folder=tmp_path / "out", images=folder), samples=1,
            out=tmp_path / "out", judge="openmmlab", options=given | options,
        )  # fmt: skip
        return " ".join(run(settings).notes)

    assert "is not one that OpenMMLab released" in notes()
    assert "Flow-GRPO's reward server" in notes(rgb_as_bgr="true")
    monkeypatch.setitem(openmmlab.RELEASED, hashlib.sha256(released.read_bytes()).hexdigest()[:8], "the file")
    monkeypatch.setattr(openmmlab, "DEFAULT_CLIP", str(clip))
    said = notes()
    assert "GenEval's own: published numbers of the same prompts" in said
    assert "Not the benchmark's 553 prompts" in said, "one prompt is not the benchmark, whatever the judge"


def test_options_are_checked_before_weights_load(released: Path, clip: Path, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, r"has no file to load: give detector: the path of mask2former_swin-s.*743b7d99\.pth"),
        ({"detector": "nowhere.pth"}, r"there is no file 'nowhere\.pth': give detector"),
        ({"detector": str(tmp_path)}, "there is no file"),
        ({"detector": str(released), "clip_model": "./nowhere"}, "there is no folder './nowhere': give clip_model"),
        ({"detector": str(released), "rgb_as_bgr": "yes"}, "rgb_as_bgr must be true or false"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            reward_options("geneval", {"judge": "openmmlab", **options})
    with pytest.raises(ValueError, match="judge 'mask2former': unknown key 'rgb_as_bgr'"):
        reward_options("geneval", {"judge": "mask2former", "rgb_as_bgr": True})
    path = tmp_path / "four.pth"
    torch.save({"state_dict": small_weights()}, path)
    with pytest.raises(ValueError, match=r"judge 'openmmlab': .*knows 4 classes"):
        judge_of(path, clip)
