"""GenEval's judge for photos on tiny random models: its arithmetic against plain numpy and PIL."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
import transformers
from older_layouts import noise
from PIL import Image
from tiny_clip import write_tiny_clip
from torch.nn.functional import interpolate

from flowrl.benchmarks.geneval.metadata import COLORS
from flowrl.benchmarks.geneval.published import CLASSES
from flowrl.benchmarks.geneval.rules import Detection
from flowrl.rewards import RewardInputs, build_reward, reward_options
from flowrl.rewards.networks import mask2former
from flowrl.rewards.networks.detectors import detector_options
from flowrl.rewards.networks.mask2former import Mask2FormerDetector, detector_size, post_process, preprocess

CPU = torch.device("cpu")
DOG = CLASSES.index("dog")


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mask2Former folder with random weights that finds dogs everywhere, with different outlines."""
    folder = tmp_path_factory.mktemp("detector")
    backbone = transformers.SwinConfig(
        embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=4, drop_path_rate=0.0,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = transformers.Mask2FormerConfig(
        backbone_config=backbone, feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=16,
        encoder_layers=1, decoder_layers=2, num_attention_heads=2, dim_feedforward=16, num_queries=10, num_labels=80,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Mask2FormerForUniversalSegmentation(config)
    with torch.no_grad():
        model.class_predictor.bias[DOG] += 6.0
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLIP whose embeddings differ enough for every colour to be some crop's nearest."""
    return write_tiny_clip(tmp_path_factory.mktemp("clip"), seed=1, patch=8, positions=64)


@pytest.fixture(scope="module")
def judge(detector: Path, clip: Path) -> Mask2FormerDetector:
    made = detector_options("mask2former", {"detector": str(detector), "clip_model": str(clip)}).build(CPU)
    assert isinstance(made, Mask2FormerDetector)
    return made


@pytest.fixture
def small_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """A detector input of 64 instead of 800 pixels and batches of 2: the network's size, not its rules, costs time."""
    monkeypatch.setattr(mask2former, "SHORT_SIDE", 64)
    monkeypatch.setattr(mask2former, "BATCH", 2)


def images(batch: int, height: int, width: int, seed: int = 0) -> np.ndarray:
    """Smooth random colours, so that masks and crops are not noise."""
    coarse = torch.rand(batch, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    smooth = interpolate(coarse, size=(height, width), mode="bilinear", align_corners=False)
    array: np.ndarray = (smooth * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
    return array


# ---- names and preprocessing -----------------------------------------------------------------------------------------


def test_classes_are_cocos_by_index_under_genevals_names() -> None:
    assert len(CLASSES) == len(set(CLASSES)) == 80
    places = {"person": 0, "bench": 13, "dog": 16, "orange": 49, "tv": 62, "computer mouse": 64, "tv remote": 65,
              "computer keyboard": 66, "cell phone": 67, "teddy bear": 77, "toothbrush": 79}  # fmt: skip
    assert {name: CLASSES.index(name) for name in places} == places
    assert not {"mouse", "remote", "keyboard"} & set(CLASSES)


@pytest.mark.parametrize(
    ("size", "fitted", "padded"),
    [
        ((512, 512), (800, 800), (800, 800)),
        ((1024, 1024), (800, 800), (800, 800)),
        ((512, 768), (800, 1200), (800, 1216)),
        ((300, 900), (444, 1333), (448, 1344)),
        ((900, 300), (1333, 444), (1344, 448)),
    ],
)
def test_preprocessing_fits_and_pads(size: tuple[int, int], fitted: tuple[int, int], padded: tuple[int, int]) -> None:
    """An image of one colour stays that colour inside, and is grey 128 outside, before both are normalised."""
    assert detector_size(*size) == fitted
    color = (10, 200, 77)
    pixels, got = preprocess(torch.tensor(color, dtype=torch.uint8).expand(1, *size, 3))
    assert got == fitted
    assert pixels.shape == (1, 3, *padded)
    mean, std = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
    for channel in range(3):
        inside = pixels[0, channel, : fitted[0], : fitted[1]]
        expected = torch.full_like(inside, (color[channel] - mean[channel]) / std[channel])
        torch.testing.assert_close(inside, expected, rtol=0, atol=1e-6)
        grey = (128 - mean[channel]) / std[channel]
        for outside in (pixels[0, channel, fitted[0] :], pixels[0, channel, :, fitted[1] :]):
            torch.testing.assert_close(outside, torch.full_like(outside, grey), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("size", "target", "checksum"),
    [
        ((64, 64), (100, 100), 3124594010),
        ((128, 128), (100, 100), 1150414866),
        ((60, 180), (89, 267), 3181451223),
        ((31, 17), (47, 26), 2410401339),
        ((20, 20), (20, 20), 3548648731),
    ],
)
def test_images_are_resized_to_opencvs_very_bits(size: tuple[int, int], target: tuple[int, int], checksum: int) -> None:
    """Checksums of what `cv2.resize(image, target, interpolation=cv2.INTER_LINEAR)` of OpenCV 5.0.0 returned."""
    image = ((noise("image", (3, *size)) + 1) * 127.5).to(torch.uint8)
    found = mask2former.opencv_resize(image[None], *target)[0]
    assert crc32(found.to(torch.uint8).permute(1, 2, 0).contiguous().numpy().tobytes()) == checksum


def test_preprocessing_keeps_the_channel_order_and_8_bits() -> None:
    image = torch.zeros(1, 512, 512, 3, dtype=torch.uint8)
    image[..., 0] = torch.arange(512, dtype=torch.int64)[None, None] // 2
    pixels, _ = preprocess(image)
    red = pixels[0, 0] * 58.395 + 123.675
    torch.testing.assert_close(red, red.round(), rtol=0, atol=1e-4)
    assert float(red[0, 0]) == pytest.approx(0, abs=1e-4)
    assert float(red[0, -1]) == pytest.approx(255, abs=1e-4)
    torch.testing.assert_close(pixels[0, 2], torch.full((800, 800), -103.53 / 57.375), rtol=0, atol=1e-6)


# ---- post-processing -------------------------------------------------------------------------------------------------


def plain_resize(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Bilinear between pixel centres, edges repeated, in float64."""

    def weights(target: int, source: int) -> np.ndarray:
        matrix = np.zeros((target, source))
        for i in range(target):
            place = min(max((i + 0.5) * source / target - 0.5, 0.0), source - 1.0)
            low = min(int(place), source - 1)
            matrix[i, low] += 1 - (place - low)
            matrix[i, min(low + 1, source - 1)] += place - low
        return matrix

    result: np.ndarray = weights(height, image.shape[0]) @ image @ weights(width, image.shape[1]).T
    return result


def plain_detections(
    classes: np.ndarray, masks: np.ndarray, padded: tuple[int, int], fitted: tuple[int, int], size: tuple[int, int]
) -> list[tuple[float, int, int, tuple[int, ...], np.ndarray]]:
    """(score, query, label, box, mask) of each detection, one query and one class at a time."""
    candidates = []
    for query, row in enumerate(classes.astype(np.float64)):
        power = np.exp(row - row.max())
        candidates += [(value, query, label) for label, value in enumerate((power / power.sum())[:-1])]
    found: list[tuple[float, int, int, tuple[int, ...], np.ndarray]] = []
    for probability, query, label in sorted(candidates, key=lambda c: -c[0])[:100]:
        logits = plain_resize(masks[query].astype(np.float64), *padded)[: fitted[0], : fitted[1]]
        logits = plain_resize(logits, *size)
        inside = [(y, x) for y in range(size[0]) for x in range(size[1]) if logits[y, x] > 0]
        quality = sum(1 / (1 + math.exp(-logits[place])) for place in inside) / (len(inside) + 1e-6)
        box: tuple[int, ...] = (0, 0, 0, 0)
        if inside:
            ys, xs = zip(*inside, strict=True)
            box = (min(xs), min(ys), max(xs) + 1, max(ys) + 1)
        found.append((probability * quality, query, label, box, logits > 0))
    return found


@pytest.mark.parametrize("queries", [1, 7, 150])
def test_post_processing_is_the_plain_one(queries: int) -> None:
    """Scores, order, boxes and masks; few queries repeat under many classes, the second has no mask at all."""
    generator = torch.Generator().manual_seed(queries)
    classes = 2 * torch.randn(queries, 81, generator=generator)
    masks = torch.randn(queries, 4, 6, generator=generator)
    if queries > 1:
        masks[1], classes[1, 5] = -1.0 - masks[1].abs(), 12.0
    padded, fitted, size = (16, 24), (14, 21), (10, 15)
    found = post_process(classes, masks, padded, fitted, size)
    expected = plain_detections(classes.numpy(), masks.numpy(), padded, fitted, size)
    count = min(100, 80 * queries)
    assert len(found.score) == len(expected) == count
    assert [*zip(found.query.tolist(), found.label.tolist(), strict=True)] == [(q, c) for _, q, c, _, _ in expected]
    np.testing.assert_allclose(found.score.numpy(), [score for score, *_ in expected], rtol=1e-4, atol=1e-7)
    assert [tuple(box) for box in found.box.tolist()] == [box for *_, box, _ in expected]
    for query, (*_, mask) in zip(found.query.tolist(), expected, strict=True):
        assert np.array_equal(found.masks[query].numpy(), mask)
    assert len(set(found.query.tolist())) < count, "some query must appear under several classes"
    if queries > 1:
        assert found.query[0] == 1
        assert found.box[0].tolist() == [0, 0, 0, 0]
        assert found.score[0] == 0


@pytest.mark.usefixtures("small_input")
def test_a_judge_detects_what_its_network_says(judge: Mask2FormerDetector) -> None:
    """Three images, more than a batch: as one at a time; masks above 0.05 only, boxes are those of the masks."""
    shown = images(3, 40, 56)
    found = judge.detect(shown)
    assert len(found) == 3
    assert all(len(detections) == 100 for detections in found)
    alone = judge.detect(shown[2:])[0]
    assert [d.label for d in alone] == [d.label for d in found[2]]
    np.testing.assert_allclose([d.score for d in alone], [d.score for d in found[2]], atol=1e-4)
    masked = [d for detections in found for d in detections if d.mask is not None]
    assert {d.score > 0.05 for d in masked} == {True}
    assert all(d.score <= 0.05 for detections in found for d in detections if d.mask is None)
    for detection in masked:
        assert detection.mask is not None
        assert detection.mask.shape == (40, 56)
        ys, xs = np.nonzero(detection.mask)
        assert detection.box == (xs.min(), ys.min(), xs.max() + 1, ys.max() + 1)
    assert {d.label for d in masked} == {"dog"}


# ---- colours ---------------------------------------------------------------------------------------------------------


def plain_color(model: Any, tokenizer: Any, image: np.ndarray, detection: Detection) -> str:
    """GenEval's colour step by step: PIL for the image, the model's full forward pass for the embeddings."""
    drawn = Image.fromarray(image)
    if detection.mask is not None:
        grey = Image.new("RGB", drawn.size, "#999")
        drawn = Image.composite(drawn, grey, Image.fromarray(detection.mask.astype(np.uint8) * 255))
    drawn = drawn.crop(detection.box)
    width, height = drawn.size
    short = min(width, height)
    drawn = drawn.resize((32 * width // short, 32 * height // short), Image.Resampling.BICUBIC)
    left, top = round((drawn.width - 32) / 2), round((drawn.height - 32) / 2)
    array = np.asarray(drawn.crop((left, top, left + 32, top + 32)), dtype=np.float32) / 255
    array = (array - [0.48145466, 0.4578275, 0.40821073]) / [0.26862954, 0.26130258, 0.27577711]
    pixels = torch.from_numpy(array.transpose(2, 0, 1)).float()[None]
    best, winner = -math.inf, ""
    for color in COLORS:
        vectors = []
        for text in (f"a photo of a {color} {detection.label}", f"a photo of a {color}-colored {detection.label}",
                     f"a photo of a {color} object"):  # fmt: skip
            tokens = tokenizer([text], return_tensors="pt")
            with torch.no_grad():
                output = model(pixel_values=pixels, **tokens)
            vectors.append(output.text_embeds[0])  # normalised by the model's forward pass, as the image is
        mean = sum(vectors) / 3
        logit = 100 * float(output.image_embeds[0] @ mean / mean.norm())
        if logit > best:
            best, winner = logit, color
    return winner


@pytest.mark.slow
def test_colors_are_the_plain_ones(judge: Mask2FormerDetector, clip: Path) -> None:
    """Boxes of many shapes on images of many colours, with and without a mask."""
    model = transformers.CLIPModel.from_pretrained(clip).eval()
    tokenizer = transformers.CLIPTokenizer.from_pretrained(clip)
    seen = set()
    for seed in range(9):
        image = images(1, 48, 64, seed)[0]
        generator = np.random.default_rng(seed)
        x1, y1 = (int(value) for value in generator.integers(0, 30, 2))
        x2, y2 = x1 + int(generator.integers(2, 34)), y1 + int(generator.integers(2, 18))
        mask = None
        if seed % 3:
            mask = np.zeros((48, 64), dtype=bool)
            mask[y1:y2, x1:x2] = generator.random((y2 - y1, x2 - x1)) < 0.6
        label = ("dog", "wine glass", "tv remote")[seed % 3]
        detection = Detection(label, (x1, y1, x2, y2), 0.9, mask)
        color = judge.color_of(image, detection)
        assert color == plain_color(model, tokenizer, image, detection)
        seen.add(color)
    assert len(seen) >= 3, "one answer for everything could not show a mix-up"
    assert set(judge.colors) >= {"dog", "wine glass", "tv remote"}


def test_what_lies_outside_the_mask_does_not_color(judge: Mask2FormerDetector) -> None:
    """Same object, other surroundings: same answers, for objects that differ in colour among themselves."""
    mask = np.zeros((40, 40), dtype=bool)
    mask[10:30, 8:28] = True
    detection = Detection("dog", (5, 5, 35, 35), 0.9, mask)
    for seed in range(6):
        first, second = images(1, 40, 40, seed)[0], images(1, 40, 40, seed + 100)[0]
        second[mask] = first[mask]
        assert judge.color_of(first, detection) == judge.color_of(second, detection)


# ---- the reward ------------------------------------------------------------------------------------------------------


def inputs() -> RewardInputs:
    records: list[dict[str, Any]] = [
        {"tag": "single_object", "include": [{"class": "dog", "count": 1}], "prompt": "a photo of a dog"},
        {"tag": "colors", "include": [{"class": "dog", "count": 10, "color": "red"}], "prompt": "ten red dogs"},
    ]
    pixels = torch.from_numpy(images(2, 64, 64)).permute(0, 3, 1, 2).float() / 255
    return RewardInputs(
        prompts=[record["prompt"] for record in records],
        images=pixels,
        metadata=records,
        group_ids=torch.arange(2),
        sample_ids=torch.arange(2),
    )


@pytest.mark.usefixtures("small_input")
def test_geneval_runs_on_this_judge(judge: Mask2FormerDetector, detector: Path, clip: Path) -> None:
    """The verdict on the first image is what its detections say: dogs, more than one."""
    options = {"judge": "mask2former", "detector": str(detector), "clip_model": str(clip)}
    reward = build_reward("geneval", options=options)
    output = reward(inputs())
    assert set(output.parts) == {"graded", "strict", "official"}
    assert bool(output.valid.all())
    assert bool(torch.isfinite(output.values).all())
    dogs = sum(d.label == "dog" and d.score > 0.3 for d in judge.detect(images(2, 64, 64))[0])
    assert dogs > 1
    assert output.parts["official"][0] == 1
    assert output.parts["strict"][0] == 0
    assert output.values[0] == 1 - abs(1 - dogs)
    assert judge.version in reward.version
    assert f"{detector}@" in judge.version
    assert f"{clip}@" in judge.version


def test_options_are_checked_before_weights_load(clip: Path, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"judge": "mask2former", "detektor": "x"}, r"unknown key 'detektor': did you mean 'detector'"),
        ({"judge": "shapes", "detector": "x"}, r"judge 'shapes': unknown key 'detector': the keys here are none"),
        ({"judge": "mask2former", "detector": 3}, "detector must be text or null, got 3"),
        ({"judge": "mask2former", "detector": "./nowhere"}, r"there is no folder '\./nowhere': give detector"),
        ({"judge": "mask2former", "clip_model": "./nowhere"}, "there is no folder './nowhere': give clip_model"),
        ({"judge": "mask2forme"}, r"did you mean 'mask2former'\?"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            reward_options("geneval", options)
    reward_options("geneval", {"judge": "mask2former"})
    detector_options("mask2former", {"detector": "someone/detector"})
    with pytest.raises(ValueError, match=r"could not load the Mask2Former model .*Give detector: a folder") as caught:
        detector_options("mask2former", {"detector": str(tmp_path), "clip_model": str(clip)}).build(CPU)
    assert "\n" not in str(caught.value)


def test_checkpoints_that_do_not_fit_are_refused(detector: Path, clip: Path, tmp_path: Path) -> None:
    """Other classes, and weights that are not there and that transformers would draw at random."""
    model = transformers.Mask2FormerForUniversalSegmentation.from_pretrained(detector)
    state = {name: tensor for name, tensor in model.state_dict().items() if "class_predictor" not in name}
    model.save_pretrained(tmp_path / "part", state_dict=state)
    model.config.num_labels = 7
    transformers.Mask2FormerForUniversalSegmentation(model.config).save_pretrained(tmp_path / "seven")
    with pytest.raises(ValueError, match=r"lacks 2 weights .*class_predictor\.bias"):
        detector_options("mask2former", {"detector": str(tmp_path / "part"), "clip_model": str(clip)}).build(CPU)
    with pytest.raises(ValueError, match="knows 7 classes"):
        detector_options("mask2former", {"detector": str(tmp_path / "seven"), "clip_model": str(clip)}).build(CPU)
