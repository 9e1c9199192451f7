"""Stock classes that no family is written for, trained as they are; and what is refused, in words."""

from __future__ import annotations

import inspect
import json
from functools import cache, wraps
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from generic_proof import one_iteration, proof
from tiny_generic import TINY_GENERIC
from tiny_generic_later import LATER, save_tiny_generic
from torch import Tensor

from flowrl.generation.prompt_checks import sources_taken
from flowrl.pipelines import STOCK, ModelFamily, Pipeline, family, family_for, family_of
from flowrl.pipelines.generic.generic_family import FAMILY, PROMPTS, check_reproduces
from flowrl.pipelines.generic.generic_pipeline import GenericPipeline
from flowrl.pipelines.generic.stock_classes import check_guider
from flowrl.pipelines.generic.stock_sources import KEPT, StockSources
from flowrl.runtime.randomness import counter_normal

pytestmark = pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")  # stock Chroma's own
OWN = {"ChromaPipeline": "chroma", "Lumina2Pipeline": "lumina2", "SanaVideoPipeline": "sana_video"}
"""Families written by hand that have the class too: the generic route has to be asked for by its name."""
TRAINED = ("AuraFlowPipeline", "CogView3PlusPipeline", "SkyReelsV2Pipeline")
"""Trained from the command on in every run of the tests: a flow, a noise-predicting model, a video."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    room = tmp_path_factory.mktemp("stock")
    return cache(lambda name: save_tiny_generic(name, room / name))


@cache
def _loaded(name: str, folder: Path) -> Any:
    return family("generic").load(str(folder), dtype=torch.float32, **TINY_GENERIC[name][1])


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * (one in OWN)) for one in TINY_GENERIC])
def test_a_class_without_a_family_trains_and_its_lora_loads_in_stock(name: str, folders: Any, tmp_path: Path) -> None:
    folder = folders(name)
    assert family_of(str(folder)) == OWN.get(name, "generic")
    family("generic").check(str(folder), None, 2)
    assert proof(name, folder, tmp_path)["deviation"] < 1e-5


@pytest.mark.parametrize("name", TRAINED)
def test_one_training_iteration(name: str, folders: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Command to LoRA file; the first ratio is exactly 1. All others: tests/trials/generic_classes.py."""
    rows = one_iteration(name, folders(name), tmp_path / "room", route="generic" if name in OWN else None)
    capsys.readouterr()
    trained = next(row for row in rows if "ratio_first_deviation" in row)
    assert trained["ratio_first_deviation"] == 0
    assert trained["grad_norm"] > 0
    assert (tmp_path / "room" / "run" / "lora" / "pytorch_lora_weights.safetensors").is_file()


# ---- source images ---------------------------------------------------------------------------------------------------

SLOW_SHOWN = ("SanaImageToVideoPipeline", "SkyReelsV2ImageToVideoPipeline", "HunyuanVideo15ImageToVideoPipeline")
SHOWN = ("LTXImageToVideoPipeline", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_SHOWN))


@cache
def _shown(name: str, folder: Path) -> Any:
    return family("generic").load(str(folder), dtype=torch.float32, **LATER[name][1])


@pytest.fixture
def _short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """HunyuanVideo 1.5 writes down 1000 and 256 tokens of a prompt, and each call of its network reads all of them."""
    stock: Any = diffusers.HunyuanVideo15ImageToVideoPipeline.__init__

    @wraps(stock)
    def init(self: Any, *args: Any, **parts: Any) -> None:
        stock(self, *args, **parts)
        self.tokenizer_max_length, self.tokenizer_2_max_length = 64, 32

    monkeypatch.setattr(diffusers.HunyuanVideo15ImageToVideoPipeline, "__init__", init)


@pytest.mark.slow
@pytest.mark.usefixtures("_short_prompts")
@pytest.mark.parametrize("name", SHOWN)
def test_a_class_that_draws_from_an_image_trains_and_its_lora_loads_in_stock(
    name: str, folders: Any, tmp_path: Path
) -> None:
    family("generic").check(str(folders(name)), None, 2)
    assert proof(name, folders(name), tmp_path)["deviation"] < 1e-5


@pytest.mark.slow
def test_one_training_iteration_from_images(folders: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "LTXImageToVideoPipeline"
    rows = one_iteration(name, folders(name), tmp_path / "room")
    capsys.readouterr()
    trained = next(row for row in rows if "ratio_first_deviation" in row)
    assert (trained["ratio_first_deviation"], trained["grad_norm"] > 0) == (0, True)


def test_each_row_is_drawn_from_its_own_image_and_its_first_frame_is_held_there(folders: Any) -> None:
    p = _shown("LTXImageToVideoPipeline", folders("LTXImageToVideoPipeline"))
    images = p.sources.examples(2, (40, 24))
    cond = p.encode([PROMPTS[0]] * 2, images)
    x = counter_normal((1, *p.latent_shape), "x").expand(2, -1, -1)
    sigma = torch.tensor(0.5)
    with torch.no_grad():
        together = p.guided(p.network, cond, None, 1.0)(x, sigma, 1000 * sigma)
        alone = p.guided(p.network, cond[1], None, 1.0)(x[1:], sigma, 1000 * sigma)
        shown = p.sources.argument(p.sources.of[int(cond.tensors["text_on_host"][1])], None)
        first = p.pipe.vae.encode(p.pipe.video_processor.preprocess(shown, 64, 32)[:, :, None])
    torch.testing.assert_close(together[1:], alone, atol=1e-5, rtol=1e-4)
    assert (together[0] - together[1]).abs().amax(1).min() > 1e-3  # of what is held, and of what is drawn
    mean, std = (one[:, None, None] for one in (p.pipe.vae.latents_mean, p.pipe.vae.latents_std))
    held = (first.latent_dist.mode()[0, :, 0] - mean) / std
    reached = x[1, :2] - 0.5 * together[1, :2]
    torch.testing.assert_close(reached, held.flatten(1).T, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"has 0 source images, .*num_sources=1 takes 1"):
        p.encode(["a cube"])
    assert p.keeps(PROMPTS[:1], images[:1])
    assert not p.keeps(PROMPTS[:1], p.sources.examples(1, (8, 8)))


def test_what_a_scheduler_steps_is_found_in_latents() -> None:
    """Numbers of a permuted part, above 256 and above 65536 of them; those beside it lead to the source's."""
    sources = StockSources(1)
    chosen = torch.tensor([70_000, 3, 300, 69_999])
    sources.find_stepped((2, 40_000), lambda latents: latents.flatten(1)[:, chosen])
    assert sources.stepped is not None
    assert sources.stepped.tolist() == chosen.tolist()
    sources.stepped = torch.tensor([2, 0])
    x, made = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[7.0, 8.0, 9.0]])
    assert sources.hold(x, lambda: made).tolist() == [[1.0, 8.0, 3.0]]
    assert sources.pick(x, torch.zeros(1, 2)).tolist() == [[3.0, 1.0]]
    led = sources.lead(torch.tensor([[30.0, 10.0]]), x, lambda: made, 0.5)
    assert led.tolist() == [[10.0, (2.0 - 8.0) / 0.5, 30.0]]
    with pytest.raises(ValueError, match="no part of its latents"):
        sources.find_stepped((4,), lambda latents: latents.flatten(1)[:, [0, 0]])
    sources.find_stepped((4,), lambda latents: latents)
    assert sources.stepped is None


def test_the_answers_of_the_last_sources_are_kept() -> None:
    sources, called = StockSources(1), []

    class Network(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            called.append(float(x))
            return x + 1

    network = Network()
    for name in ("a", "a", "b", *(str(k) for k in range(KEPT)), "a"):
        with sources.remembering(name, 1, {"image_encoder": network}, torch.device("cpu")):
            assert [float(network(torch.tensor(value))) for value in (1.0, 5.0)] == [2.0, 6.0]
    assert len(called) == 2 * (KEPT + 3)
    assert len(sources.kept) == KEPT


def test_a_plan_counts_what_stock_calls_with_an_image(folders: Any) -> None:
    name = "LTXImageToVideoPipeline"
    options = {key: value for key, value in LATER[name][1].items() if key != "device"}
    found = FAMILY.recorder(str(folders(name)), options).recorded("a red fox")
    assert found.call["hidden_states"].shape == (1, 4, 8)
    assert found.call["timestep"].shape == (1, 4)  # of each token, since the first frame's is 0
    assert found.size == (64, 32, 9)


def test_how_many_images_a_stock_class_draws_from(folders: Any) -> None:
    held = str(folders("LTXImageToVideoPipeline"))
    assert sources_taken(family_for("generic", held), held, {}) == (1, 1)
    assert sources_taken(family_for("generic", held), held, {"num_sources": 2}) == (2, 2)
    plain = str(folders("AuraFlowPipeline"))
    assert sources_taken(family_for("generic", plain), plain, {}) == (0, 0)
    with pytest.raises(ValueError, match=r"num_sources is 1, and AuraFlowPipeline takes no image"):
        family("generic").load(plain, dtype=torch.float32, num_sources=1)
    with pytest.raises(ValueError, match="num_sources must be at least 0, got -1"):
        family("generic").load(plain, dtype=torch.float32, num_sources=-1)


# ---- rows, prompts, sizes --------------------------------------------------------------------------------------------


def test_rows_of_several_levels_and_lengths_are_what_each_is_alone(folders: Any) -> None:
    p = _loaded("PixArtSigmaPipeline", folders("PixArtSigmaPipeline"))
    cond, negative = p.encode([*PROMPTS, PROMPTS[0]]), p.encode([""])
    x = counter_normal((3, *p.latent_shape), "x")
    levels = torch.tensor([900.0, 400.0, 400.0])
    with torch.no_grad():
        together = p.guided(p.network, cond, negative, 3.0)(x, levels, levels)
        for row in range(3):
            velocity = p.guided(p.network, cond[row], negative, 3.0)
            alone = velocity(x[row : row + 1], levels[row : row + 1], levels[row : row + 1])
            torch.testing.assert_close(together[row : row + 1], alone, atol=1e-5, rtol=1e-4)


def test_freed_encoders_leave_what_was_encoded(folders: Any) -> None:
    p: Any = family("generic").load(
        str(folders("AuraFlowPipeline")), dtype=torch.float32, **TINY_GENERIC["AuraFlowPipeline"][1]
    )
    cond = p.encode(["a red fox"])
    p.free_text_encoders()
    assert p.pipe.text_encoder is None
    larger = p.resized(32, 16)
    assert larger.image_shape == (3, 32, 16)
    found = larger.network(torch.zeros(1, *larger.latent_shape), torch.tensor([500.0]), cond)
    assert found.isfinite().all()
    with pytest.raises(ValueError, match="was not encoded before"):
        larger.encode(["a cube"])


def test_images_carry_gradient(folders: Any) -> None:
    p = _loaded("AuraFlowPipeline", folders("AuraFlowPipeline"))
    latents = counter_normal((2, *p.latent_shape), "z").requires_grad_()
    images = p.decode(latents, gradient=True)
    (gradient,) = torch.autograd.grad(images.sum(), latents)
    assert images.shape == (2, *p.image_shape)
    assert gradient.abs().sum() > 0


def test_it_has_all_that_recipes_and_commands_ask_for(folders: Any) -> None:
    p = _loaded("AuraFlowPipeline", folders("AuraFlowPipeline"))
    for asked, made in ((Pipeline, p), (ModelFamily, family("generic"))):
        names = {name for name in (*vars(asked), *asked.__annotations__) if not name.startswith("_")}
        assert [name for name in names if not hasattr(made, name)] == []
    assert p.sound_rate is None


@pytest.mark.filterwarnings("ignore:`LoraLoaderMixin` is deprecated:FutureWarning")  # stock PRX's own
def test_a_class_that_guides_one_prompt_at_a_time(tmp_path: Path) -> None:
    folder = save_tiny_generic("PRXPipeline", tmp_path)
    p: Any = family("generic").load(str(folder), dtype=torch.float32, **LATER["PRXPipeline"][1])
    assert p.alone
    assert p.lora_targets == ("to_out.0", "img_qkv_proj", "txt_kv_proj")
    assert check_reproduces(p) < 1e-5


# ---- refusals --------------------------------------------------------------------------------------------------------


def _index(folder: Path, name: str, **parts: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": name, **parts}), encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("NoSuchPipeline", "nor has diffusers .* a pipeline of this name"),
        ("LTX2Pipeline", "two schedulers"),
        ("WanModularPipeline", "nor has diffusers .* a pipeline of this name"),
        ("DDPMPipeline", "has no prompt"),
        ("StableDiffusion3Img2ImgPipeline", "begins at a given image"),
        ("AutoencoderKL", "nor has diffusers .* a pipeline"),
        ("StableVideoDiffusionPipeline", "has no prompt"),
    ],
)
def test_classes_are_refused_in_words(name: str, said: str, tmp_path: Path) -> None:
    folder = _index(tmp_path, name)
    with pytest.raises(ValueError, match=said):
        family("generic").check(folder, None)
    if name not in STOCK:
        with pytest.raises(ValueError, match=said):
            family_of(folder)


@pytest.mark.parametrize(
    ("kind", "config"), [("AdaptiveProjectedMixGuidance", {}), ("ClassifierFreeGuidance", {"stop": 0.5})]
)
def test_guiders_that_go_by_the_step_are_refused(kind: str, config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"guided by {kind}, which goes by the number of the step"):
        check_guider("APipeline", kind, config)
    check_guider("APipeline", "ClassifierFreeGuidance", {"guidance_scale": 6.0, "start": 0.0, "stop": 1.0})
    if not config:
        parts = {"transformer": ["diffusers", "HunyuanImageTransformer2DModel"], "guider": ["diffusers", kind]}
        with pytest.raises(ValueError, match=kind):
            family("generic").check(_index(tmp_path, "HunyuanImagePipeline", **parts), None)


def test_a_size_that_stock_changes_is_refused(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    p = _loaded("AuraFlowPipeline", folders("AuraFlowPipeline"))
    monkeypatch.setattr(GenericPipeline, "_decoded", lambda self, latents: torch.zeros(1, 3, 64, 64))
    with pytest.raises(ValueError, match="draws 64 x 64 where 32 x 16 pixels are asked for"):
        p.resized(32, 16)


def test_what_reads_the_step_is_refused(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class whose own call of two steps is another one than two calls of one step."""
    stock: Any = inspect.unwrap(diffusers.AuraFlowPipeline.prepare_latents)
    seen: list[int] = []

    def drifting(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(1)
        made: Tensor = stock(self, *args, **kwargs)
        return made + 0.01 * len(seen)

    monkeypatch.setattr(diffusers.AuraFlowPipeline, "prepare_latents", drifting)
    with pytest.raises(ValueError, match="two steps of its own call"):
        family("generic").load(
            str(folders("AuraFlowPipeline")), dtype=torch.float32, **TINY_GENERIC["AuraFlowPipeline"][1]
        )


def test_settings_that_it_lacks_are_refused(folders: Any) -> None:
    folder = str(folders("AuraFlowPipeline"))
    with pytest.raises(ValueError, match="num_frames is set"):
        family("generic").load(folder, dtype=torch.float32, num_frames=5)
    with pytest.raises(ValueError, match=r"pipeline\.attention"):
        family("generic").load(folder, dtype=torch.float32, attention="cudnn")
    p = _loaded("AuraFlowPipeline", folders("AuraFlowPipeline"))
    with pytest.raises(ValueError, match="train_negative"):
        p.guided(p.network, p.encode(["a"]), p.encode([""]), 2.0, False)
    with pytest.raises(ValueError, match="shift must be positive"):
        p.schedule(3, "diffusers", -1.0)
    with pytest.raises(ValueError, match="only decodes"):
        p.encode_images(torch.zeros(1, *p.image_shape))
