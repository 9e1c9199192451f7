"""mmdet's own Mask2Former beside what the judge `openmmlab` makes of its weights: GenEval's detector, random weights.

    pip install --target DIR --no-deps mmdet==3.3.0 mmcv-lite==2.2.0 mmengine==0.10.7 addict yapf platformdirs \
        termcolor rich pycocotools terminaltables shapely scipy opencv-python-headless
    python tests/trials/openmmlab_parity.py --library DIR --out docs/research/trials/openmmlab_parity.json

mmdet runs without its compiled operations: `mmcv._ext` is an empty module, and deformable attention takes the fallback
in plain PyTorch. `--fixture` writes a small configuration's names, shapes and outputs, which the tests hold.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.machinery
import json
import sys
import types
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import numpy as np
import torch
from older_layouts import noise, weight
from origin import origin

from flowrl.benchmarks.geneval.published import CLASSES, published_records
from flowrl.benchmarks.geneval.rules import Detection, graded, strict, verdict
from flowrl.rewards.networks.mask2former import UNREAD, post_process, preprocess
from flowrl.rewards.networks.openmmlab import network_of
from flowrl.runtime.files import write_atomically

CONFIG = ".mim/configs/mask2former/mask2former_swin-s-p4-w7-224_8xb2-lsj-50e_coco.py"
FIXTURE = Path(__file__).parents[1] / "rewards" / "networks" / "openmmlab_small.json"
SIZES = ((224, 288), (256, 256))
SCENES = 1500
SMALL = (32, 64)
LIBRARIES = ("mmdet", "mmengine", "mmcv-lite", "opencv-python-headless")


def prepare(library: str) -> Any:
    """mmdet's module, importable without compiled operations."""

    class Empty(types.ModuleType):
        def __getattr__(self, name: str) -> Callable[..., Any]:
            if name.startswith("__"):
                raise AttributeError(name)
            return lambda *_, **__: None

    sys.path.append(library)
    empty = Empty("mmcv._ext")
    empty.__spec__ = importlib.machinery.ModuleSpec("mmcv._ext", None)
    sys.modules["mmcv._ext"] = empty
    importlib.import_module("mmcv").__version__ = "2.1.0"  # type: ignore[attr-defined]  # mmdet 3.3 refuses 2.2
    mmdet = importlib.import_module("mmdet")
    importlib.import_module("mmdet.models")
    importlib.import_module("mmengine.registry").DefaultScope.get_instance("parity", scope_name="mmdet")
    return mmdet


def settings_of(mmdet: Any) -> Any:
    """GenEval's detector as mmdet configures it, no weights to fetch."""
    found = importlib.import_module("mmengine.config").Config.fromfile(Path(mmdet.__file__).parent / CONFIG).model
    found.backbone.init_cfg = None
    return found


def small(settings: Any) -> Any:
    """The same structure in a few thousand weights; the class loss has one weight a class."""
    settings.backbone.update(embed_dims=4, depths=[1, 1, 2, 1], num_heads=[1, 1, 2, 2], window_size=2)
    head = settings.panoptic_head
    head.update(in_channels=[4, 8, 16, 32], feat_channels=32, out_channels=32, num_queries=3, num_things_classes=4)
    head.loss_cls.class_weight = [1.0] * 4 + [0.1]
    encoder, decoder = head.pixel_decoder.encoder, head.transformer_decoder
    encoder.num_layers, decoder.num_layers = 1, 2
    attentions = (encoder.layer_cfg.self_attn_cfg, decoder.layer_cfg.self_attn_cfg, decoder.layer_cfg.cross_attn_cfg)
    for one in attentions:
        one.update(embed_dims=32, num_heads=2)
    for ffn in (encoder.layer_cfg.ffn_cfg, decoder.layer_cfg.ffn_cfg):
        ffn.update(embed_dims=32, feedforward_channels=8)
    for positions in (head.pixel_decoder.positional_encoding, head.positional_encoding):
        positions.num_feats = 16
    settings.panoptic_fusion_head.num_things_classes = 4
    return settings


def built(mmdet: Any, settings: Any) -> Any:
    """mmdet's model on random weights."""
    torch.manual_seed(0)
    return importlib.import_module("mmdet.registry").MODELS.build(settings).eval()


@torch.no_grad()
def logits_of(model: Any, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Class and mask logits of mmdet's last layer."""
    classes, masks = model.panoptic_head(model.extract_feat(pixels), [])
    return classes[-1], masks[-1]


def networks(model: Any) -> list[dict[str, Any]]:
    """Largest differences between mmdet's outputs and those of its weights in transformers' class."""
    ours = network_of(model.state_dict(), unread=UNREAD, owner="trial")
    rows = []
    for size in SIZES:
        pixels = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            found = ours(pixel_values=pixels)
        row: dict[str, Any] = {"size": list(size)}
        pairs = zip(logits_of(model, pixels), (found.class_queries_logits, found.masks_queries_logits), strict=True)
        for name, (theirs, mine) in zip(("class_logits", "mask_logits"), pairs, strict=True):
            row[name] = {"largest": float(theirs.abs().max()), "difference": float((theirs - mine).abs().max())}
        rows.append(row)
        print(row, flush=True)
    return rows


def scenes(mmdet: Any, settings: Any) -> dict[str, Any]:
    """Random logits through mmdet's post-processing and ours, then through GenEval's rules for a published record."""
    registry = importlib.import_module("mmdet.registry").MODELS
    fusion = registry.build({**settings.panoptic_fusion_head, "test_cfg": settings.test_cfg})
    sample = importlib.import_module("mmdet.structures").DetDataSample
    records = published_records()
    padded, fitted, size = (16, 32), (14, 30), (21, 45)
    counted = {"scenes": SCENES, "detections": 0, "labels": 0, "boxes": 0, "masks": 0, "verdicts": 0, "correct": 0}
    worst = 0.0
    for scene in range(SCENES):
        generator = torch.Generator().manual_seed(scene)
        record = records[scene % len(records)]
        classes = 2 * torch.randn(10, 81, generator=generator)
        for query, clause in enumerate(one for one in record["include"] for _ in range(one["count"])):
            classes[query, CLASSES.index(clause["class"])] += 14 * torch.rand((), generator=generator)
        masks = 4 * torch.randn(10, 4, 8, generator=generator)
        data = sample(metainfo={"img_shape": fitted, "ori_shape": size})
        upsampled = torch.nn.functional.interpolate(masks[None], size=padded, mode="bilinear", align_corners=False)
        theirs = fusion.predict(classes[None], upsampled, [data], rescale=True)[0]["ins_results"]
        ours = post_process(classes, masks, padded, fitted, size)
        # mmdet leaves its detections unordered; GenEval orders those of a class by their scores.
        a, b = ordered(theirs.labels, theirs.scores), ordered(ours.label, ours.score)
        worst = max(worst, float((theirs.scores[a] - ours.score[b]).abs().max()))
        counted["detections"] += len(ours.score)
        counted["labels"] += int((theirs.labels[a] != ours.label[b]).sum())
        counted["boxes"] += int((theirs.bboxes[a] != ours.box[b]).any(1).sum())
        counted["masks"] += int((theirs.masks[a] != ours.masks[ours.query[b]]).flatten(1).any(1).sum())
        told = [
            judged(detections_of(labels, boxes, scores), record)
            for labels, boxes, scores in (
                (theirs.labels, theirs.bboxes, theirs.scores), (ours.label, ours.box, ours.score)
            )
        ]  # fmt: skip
        counted["verdicts"] += told[0] != told[1]
        counted["correct"] += told[1][0]
    assert 0.05 < counted["correct"] / SCENES < 0.95, counted
    different = {key: counted[key] for key in ("labels", "boxes", "masks", "verdicts")}
    of = {key: counted[key] for key in ("scenes", "detections", "correct")}
    return {**of, "different": {**different, "largest_score_difference": worst}}


def ordered(labels: torch.Tensor, scores: torch.Tensor) -> list[int]:
    """Places by label, and of one label by score, the best first."""
    pairs = list(zip(labels.tolist(), scores.tolist(), strict=True))
    return sorted(range(len(pairs)), key=lambda place: (pairs[place][0], -pairs[place][1]))


def detections_of(labels: torch.Tensor, boxes: torch.Tensor, scores: torch.Tensor) -> list[Detection]:
    return [
        Detection(label=CLASSES[label], box=tuple(map(float, box)), score=score, mask=None)  # type: ignore[arg-type]
        for label, box, score in zip(labels.tolist(), boxes.tolist(), scores.tolist(), strict=True)
    ]


def judged(detections: list[Detection], record: Any) -> tuple[bool, float, bool, str]:
    """Official verdict, graded and strict credit, the reason; colours by the box, so that they occur in both kinds."""

    def color_of(detection: Detection) -> str:
        return ("red", "blue", "green", "white", "black")[int(sum(detection.box)) % 5]

    official = verdict(detections, record, color_of)
    return official.correct, graded(detections, record, color_of), strict(detections, record, color_of), official.reason


def pixels() -> list[dict[str, Any]]:
    """The detector's input by OpenCV, as mmcv calls it, and ours: 8-bit levels after resizing, and how many differ."""
    cv2 = importlib.import_module("cv2")
    rows = []
    for size in ((512, 512), (1024, 1024), (512, 768), (300, 900)):
        coarse = torch.rand(1, 3, size[0] // 4, size[1] // 4, generator=torch.Generator().manual_seed(0))
        image = (torch.nn.functional.interpolate(coarse, size=size, mode="bicubic").clamp(0, 1) * 255).round()
        shown = image.to(torch.uint8).permute(0, 2, 3, 1).contiguous()
        found, fitted = preprocess(shown)
        mean, std = (np.array(v, np.float32) for v in ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375)))
        ours = np.round(found[0, :, : fitted[0], : fitted[1]].permute(1, 2, 0).numpy() * std + mean)
        theirs = cv2.resize(shown[0].numpy(), fitted[::-1], interpolation=cv2.INTER_LINEAR).astype(np.float32)
        off = np.abs(ours - theirs)
        rows.append({
            "size": list(size), "fitted": list(fitted), "largest_in_levels": float(off.max()),
            "share_that_differs": round(float((off > 0).mean()), 5),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def write_fixture(mmdet: Any) -> None:
    """The small configuration in float64, weights by `older_layouts.weight`."""
    model = built(mmdet, small(settings_of(mmdet))).double()
    shapes = {
        name: tuple(value.shape) for name, value in model.state_dict().items() if not name.endswith("position_index")
    }
    model.load_state_dict({name: weight(name, shape).double() for name, shape in shapes.items()}, strict=False)
    classes, masks = logits_of(model, noise("pixels", (1, 3, *SMALL)).double())
    content = {
        "mmdet": version("mmdet"), "shapes": {name: list(shape) for name, shape in shapes.items()},
        "pixels": [1, 3, *SMALL],
        "class_logits": np.round(classes.numpy(), 9).tolist(), "mask_logits": np.round(masks.numpy(), 9).tolist(),
    }  # fmt: skip
    write_atomically(FIXTURE, json.dumps(content, separators=(",", ":")) + "\n")
    print(f"{FIXTURE.name}: {FIXTURE.stat().st_size} bytes", float(classes.abs().max()), float(masks.abs().max()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True, help="folder that holds mmdet")
    parser.add_argument("--fixture", action="store_true", help="write the tests' small configuration instead")
    parser.add_argument("--out", type=Path, help="file to write")
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    mmdet = prepare(parsed.library)
    if parsed.fixture:
        write_fixture(mmdet)
        return
    model = built(mmdet, settings_of(mmdet))
    found: dict[str, Any] = {
        **origin(),
        "versions": {name: version(name) for name in (*LIBRARIES, "transformers")},
        "weights": len(model.state_dict()), "networks": networks(model), "pixels": pixels(),
        "scenes": scenes(mmdet, settings_of(mmdet)),
    }  # fmt: skip
    found["command"] = found["command"].replace(parsed.library, "DIR")
    text = json.dumps(found, indent=1) + "\n"
    print(text)
    if parsed.out is not None:
        write_atomically(parsed.out, text)


if __name__ == "__main__":
    main()
