"""The embedded model's pre-training at toy size: resumable, and what it writes is a stock pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusion3Pipeline
from PIL import Image
from tiny_runs import differences

from flowrl.benchmarks.geneval.rules import verdict
from flowrl.cli import main
from flowrl.config.train import resolve_path
from flowrl.pipelines import STOCK, family, family_of
from flowrl.pretraining import make_kontext as pretrain_kontext
from flowrl.pretraining import make_sd3 as pretrain
from flowrl.pretraining import make_sd15 as pretrain_sd15
from flowrl.pretraining import make_wan as pretrain_wan
from flowrl.pretraining import making
from flowrl.pretraining.make_kontext import KontextConfig, edit_row
from flowrl.pretraining.make_sd3 import PretrainConfig, scene_batch
from flowrl.pretraining.make_wan import clip_batch
from flowrl.pretraining.network_training import learning_rate
from flowrl.pretraining.pretrain import MODELS
from flowrl.pretraining.pretrain import pretrain as make
from flowrl.pretraining.tiny_sd3 import CONTEXT, clip_tokenizer, t5_tokenizer
from flowrl.prompts.loading import read_prompts
from flowrl.world.captions import WRONG
from flowrl.world.clips import motion_records, motion_verdict
from flowrl.world.detector import color_of, detect_shapes
from flowrl.world.edits import edit_verdict, source_scene
from flowrl.world.scene_prompts import OPENINGS, combinations, word_record
from flowrl.world.scenes import COLORS, SHAPES, draw_scene


def toy(out: Path, **changes: Any) -> PretrainConfig:
    sizes = {"vae_steps": 2, "vae_batch_size": 2, "num_right": 8, "steps": 2, "batch_size": 2, "checkpoint_every": 1,
             "num_wrong": 4, "wrong_steps": 1}  # fmt: skip
    return PretrainConfig(out=str(out), **(sizes | changes))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Those after both courses, the label head's among them."""
    found = torch.load(folder / "wrong.pt", weights_only=True)["model"]
    assert "head.linear.weight" in found
    return found


@pytest.fixture
def few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made is scored on one sample of two steps each of a few prompts, of all tasks."""
    values = making.held_out_values
    monkeypatch.setattr(making, "SAMPLES", 1)
    monkeypatch.setattr(making, "read_prompts", lambda path: read_prompts(path)[::40])
    monkeypatch.setattr(making, "held_out_values", lambda *a, **options: values(*a, **options | {"num_steps": 2}))


def unscored(_: Path, folder: Path, *__: object, **___: object) -> Path:
    """In the place of `describe` for what is made a second time, of which the weights are read."""
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("few_prompts")
def test_stopped_and_resumed_equals_uninterrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrain, "_MEASURED", 32)
    asset = pretrain.main(toy(tmp_path / "whole"))
    original = pretrain.flow_matching_loss

    def stop_at_one(*arguments: object) -> torch.Tensor:
        if arguments[-1] == 1:
            raise KeyboardInterrupt
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(pretrain, "flow_matching_loss", stop_at_one)
    with pytest.raises(KeyboardInterrupt):
        pretrain.main(toy(tmp_path / "stopped"))
    monkeypatch.setattr(pretrain, "flow_matching_loss", original)
    monkeypatch.setattr(pretrain, "describe", unscored)
    pretrain.main(toy(tmp_path / "stopped"))
    whole, stopped = weights(tmp_path / "whole"), weights(tmp_path / "stopped")
    assert whole.keys() == stopped.keys()
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)
    # What came out is complete: stock diffusers loads and samples it, and the README carries its score.
    pipe = StableDiffusion3Pipeline.from_pretrained(asset, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    image = pipe("a photo of a red circle", num_inference_steps=2, guidance_scale=1.0, max_sequence_length=CONTEXT)
    assert image.images[0].size == (64, 64)
    readme = (asset / "README.md").read_text(encoding="utf-8")
    assert "Held-out score (12 images" in readme
    assert all(f"| {task} | " in readme for task in WRONG)
    assert not any(key.startswith("head") for key in pipe.transformer.state_dict())
    vocabulary = json.loads((asset / "tokenizer" / "vocab.json").read_text(encoding="utf-8"))
    assert vocabulary == clip_tokenizer().get_vocab()
    assert (asset / "tokenizer_2" / "merges.txt").read_text(encoding="utf-8").startswith("#version")


def test_every_prompt_of_the_world_fits_the_context_and_every_word_is_one_token() -> None:
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    assert 550 <= len(clip) <= 700
    for groups in combinations().values():
        for record in (word_record(record, opening) for group in groups for record in group for opening in OPENINGS):
            words = len(record["prompt"].split())
            assert len(clip(record["prompt"]).input_ids) == words + 2 <= CONTEXT
            assert len(t5(record["prompt"]).input_ids) == words + 1 <= CONTEXT


def test_tokenizers_are_the_same_in_every_process() -> None:
    """Pre-training resumes in a new process: ids that move there would swap the words' meanings.

    The shipped model's were written by another process, which had its sets in another order.
    """
    written = json.loads((resolve_path("asset:tiny-sd3") / "tokenizer" / "vocab.json").read_text(encoding="utf-8"))
    assert clip_tokenizer().get_vocab() == written


def test_tokenizer_covers_any_text() -> None:
    clip = clip_tokenizer()
    assert clip.decode(clip("xylophone 漢字!").input_ids, skip_special_tokens=True).replace(" ", "") == "xylophone漢字!"


def test_scenes_are_a_function_of_their_numbers() -> None:
    scenes = scene_batch(range(5, 9), seed=0, stage="x")
    again, other = scene_batch(range(7, 9), seed=0, stage="x"), scene_batch(range(7, 9), seed=1, stage="x")
    assert torch.equal(scenes.images[2:], again.images)
    assert torch.equal(scenes.labels[2:], again.labels)
    assert scenes.records[2:] == again.records
    assert not torch.equal(again.images, other.images)
    assert scenes.images.shape == (4, 3, 64, 64)
    assert scenes.labels.shape == (4, 8, 8)
    assert -1 <= float(scenes.images.min()) < float(scenes.images.max()) <= 1


def test_some_captions_are_wrong_in_the_way_of_their_task() -> None:
    """The judge of the world finds a scene right by its own record, and wrong where a neighbour is shown."""

    def right(wrong: float) -> list[bool]:
        scenes = scene_batch(range(120), 0, "x", wrong)
        pixels = ((scenes.images + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
        return [
            verdict(detect_shapes(image), record, color_of=partial(color_of, image)).correct
            for image, record in zip(pixels, scenes.records, strict=True)
        ]

    assert all(right(0.0))
    assert not any(right(1.0))
    assert sum(right(0.45)) / 120 == pytest.approx(0.55, abs=0.18)  # four standard errors


def test_learning_rate_warms_up_and_decays() -> None:
    rates = [learning_rate(step, 1000, 1.0) for step in range(1000)]
    assert rates[0] == pytest.approx(0.01)
    assert max(rates) == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.02, abs=1e-3)
    assert all(a >= b for a, b in pairwise(rates[100:]))


def test_overrides_are_as_strict_as_a_training_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[PretrainConfig] = []
    monkeypatch.setattr(pretrain, "main", seen.append)
    for overrides in (["steps=7", "lr=1e-4"], ["sd3", "steps=7", "lr=1e-4"]):
        assert main(["pretrain", *overrides]) == 0
        assert seen.pop() == PretrainConfig(steps=7, lr=1e-4)
    make(steps=7, lr=1e-4)
    assert seen.pop() == PretrainConfig(steps=7, lr=1e-4)
    for wrong, said in (
        (["sd3", "stepz=7"], "stepz"),
        (["wan", "steps=many"], "steps"),
        (["sd16"], "did you mean 'sd15'"),
    ):
        with pytest.raises(ValueError, match=said):
            make(*wrong)
    assert set(MODELS) == {"kontext", "prompts", "scorer", "sd15", "sd3", "verifier", "wan"}


def _numbers(made: Any) -> Any:
    """A loss as it is; of a stock pipeline, the tensors of its networks."""
    if isinstance(made, torch.Tensor):
        return made.detach()
    return {name: part.state_dict() for name, part in made.components.items() if isinstance(part, torch.nn.Module)}


@pytest.mark.slow
@pytest.mark.usefixtures("few_prompts")
@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("sd15", ("noise_loss", "build_tiny_sd15")),
        ("wan", ("reconstruction_loss", "velocity_loss", "build_tiny_wan")),
        ("kontext", ("velocity_loss", "build_tiny_kontext")),
    ],
)
def test_every_model_is_made_and_depends_on_nothing_that_was_drawn_before(
    name: str, own: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At toy size: stock diffusers loads the folder. They go on by the code that SD3 goes on by; of what a model has of
    its own, losses and networks, the second call gives the bits of the first, as in a process that goes on."""
    module = {"sd15": pretrain_sd15, "wan": pretrain_wan, "kontext": pretrain_kontext}[name]
    monkeypatch.setattr(module, "_MEASURED", 32, raising=False)
    if name == "wan":  # which measures 32 clips at once
        drawn = pretrain_wan.clip_batch
        monkeypatch.setattr(pretrain_wan, "clip_batch", lambda numbers, *how: drawn(numbers[:4], *how))
    called = set[str]()

    def twice(key: str, made: Callable[..., Any], *arguments: Any) -> Any:
        called.add(key)
        first = made(*arguments)
        assert differences(_numbers(first), _numbers(made(*arguments))) == 0, key
        return first

    for key in own:
        monkeypatch.setattr(module, key, partial(twice, key, getattr(module, key)))
    sizes = ["vae_steps=1", "vae_batch_size=1"] if name == "wan" else []
    settings = [*sizes, "num_right=4", "num_wrong=4", "steps=1", "wrong_steps=1", "batch_size=2"]
    whole = make(name, f"out={tmp_path / 'whole'}", *settings)
    assert called == {*own}
    weights(tmp_path / "whole")
    assert type(DiffusionPipeline.from_pretrained(whole)).__name__ in STOCK
    assert sum(path.stat().st_size for path in whole.rglob("*")) < 10_000_000
    assert "Held-out score (" in (whole / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("steps=-1", "steps=-1 must be a finite number above 0"),
        ("steps=0", "steps=0 must be"),
        ("batch_size=0", "batch_size=0 must be"),
        ("vae_lr=0", "vae_lr=0.0 must be"),
        ("kl_weight=-1", "kl_weight=-1.0 must be 0 or a finite number above"),
        ("prompt_dropout=1.5", "prompt_dropout=1.5 must lie in [0, 1]"),
        ("threads=100000", "threads=100000 must lie in 1 .. 256"),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused(setting: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must") as refused:
        make("sd3", f"out={tmp_path / 'made'}", setting)
    assert said in str(refused.value)
    assert not (tmp_path / "made").exists()


def test_prompt_lists_are_the_shipped_ones(tmp_path: Path) -> None:
    made, shipped = make("prompts", out=tmp_path), resolve_path("asset:prompts")
    lists = sorted(path.name for path in made.glob("*.jsonl"))
    assert lists == sorted(path.name for path in shipped.glob("*.jsonl"))
    assert all((made / name).read_bytes() == (shipped / name).read_bytes() for name in lists)
    sources = sorted(path.relative_to(made) for path in made.glob("*/*.png"))
    assert sources == sorted(path.relative_to(shipped) for path in shipped.glob("*/*.png"))
    for source in sources[::8]:  # pixels: the bytes of a PNG depend on the version of zlib
        with Image.open(made / source) as one, Image.open(shipped / source) as other:
            assert np.array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("name", ["tiny-kontext", "tiny-sd15", "tiny-wan"])
def test_shipped_models_are_small_and_complete(name: str) -> None:
    folder = resolve_path(f"asset:{name}")
    assert sum(path.stat().st_size for path in folder.rglob("*")) < 10_000_000
    family(family_of(str(folder))).check(str(folder), None)
    assert "Training:" in (folder / "README.md").read_text(encoding="utf-8")
    assert sum(path.stat().st_size for path in folder.parent.rglob("*")) < 50_000_000


def test_some_clips_go_the_opposite_way() -> None:
    def ways(wrong: float) -> list[bool]:
        clips, _, prompts = clip_batch(range(40), 0, "x", wrong)
        pixels = ((clips + 1) * 127.5).round().byte().permute(0, 2, 3, 4, 1).numpy()
        records = {str(record["prompt"]): record for part in motion_records() for record in part}
        return [motion_verdict(clip, records[prompt]).correct for clip, prompt in zip(pixels, prompts, strict=True)]

    assert all(ways(0.0))
    assert not any(ways(1.0))
    assert 8 <= sum(ways(0.5)) <= 32


def test_labels_are_what_each_latent_frame_shows_last() -> None:
    clips, drawn, _ = clip_batch(range(4), 0, "x")
    pixels = ((clips + 1) * 127.5).round().byte().permute(0, 2, 3, 4, 1).numpy()
    for clip, labels in zip(pixels, drawn, strict=True):
        for frame, cells in zip(clip[::4], labels, strict=True):
            (found,) = detect_shapes(frame)
            label = 1 + 4 * SHAPES.index(found.label) + list(COLORS).index(color_of(frame, found))
            assert found.mask is not None
            covered = found.mask.reshape(8, 8, 8, 8).mean(axis=(1, 3))
            assert (cells[covered > 0.4] == label).all()
            assert (cells[covered < 0.1] == 0).all()


def test_some_edits_fail() -> None:
    found = {}
    for wrong in (0.0, 0.5, 1.0):
        config = KontextConfig(seed=0)
        rows = [edit_row(config, "x", number, wrong) for number in range(60)]
        found[wrong] = sum(
            edit_verdict(draw_scene(shown), draw_scene(source_scene(record)), record).correct for record, shown in rows
        )
    assert found[0.0] == 60
    assert found[1.0] == 0
    assert 14 <= found[0.5] <= 46
