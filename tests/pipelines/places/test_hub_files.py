"""Which family a model is of: what is asked of a hub on loopback, which holds no weight, and what is said."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_hub import COMMIT, FakeHub, Repository, serve_hub
from huggingface_hub import constants

from flowrl.cli import main
from flowrl.config.locations import at_revision, split_revision
from flowrl.generation.models import find_source
from flowrl.pipelines import PIPELINES, STOCK, family, family_name, family_of, known_family
from flowrl.pipelines.places.hub_files import did_you_mean, model_card
from flowrl.pipelines.places.known_checkpoints import checkpoints, precision_note, published
from flowrl.pipelines.weights.stock_loading import fetch
from flowrl.training.model_files import hub_commit

MEDIUM, XL = "stabilityai/stable-diffusion-3.5-medium", "stabilityai/stable-diffusion-xl-base-1.0"
TUNED = {
    "me/juggernaut": XL,
    "me/dreams": "stable-diffusion-v1-5/stable-diffusion-v1-5",
    "me/sd3-anime": MEDIUM,
    "me/flux-realism": "black-forest-labs/FLUX.1-dev",
    "me/wan-clips": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
}
"""Fine-tunes and what they were tuned from, whose configurations they have."""
WRONG = {
    MEDIUM: "flux",
    XL: "sd",
    "black-forest-labs/FLUX.1-dev": "sd3",
    "black-forest-labs/FLUX.1-Kontext-dev": "flux",
    "Qwen/Qwen-Image": "qwen_image_edit",
    "me/juggernaut": "sd",
    "me/dreams": "sdxl",
    "me/sd3-anime": "flux",
    "me/flux-realism": "kontext",
    "me/wan-clips": "hunyuan_video",
}


def tuned(model: str) -> Repository:
    """A fine-tune's repository: the small files that its base has, and names of weights that nobody may ask for."""
    known = published(model)
    assert known is not None
    made = family(known.family)
    part = made.denoisers[0]
    blocks = {"down_block_types": 4 * ["DownEncoderBlock2D"], "up_block_types": 4 * ["UpDecoderBlock2D"]}
    usual = {
        "_class_name": "AutoencoderKL",
        "block_out_channels": [128, 256, 512, 512],
        "layers_per_block": 2,
        **blocks,
    }
    factors = {} if made.videos else usual | {"latent_channels": 4 if known.family in ("sd", "sdxl") else 16}
    return Repository(
        small={"model_index.json": known.index, f"{part}/config.json": known.network, "vae/config.json": factors},
        others=(f"{part}/diffusion_pytorch_model.safetensors",), licence="openrail++", revisions=("main", "v2"),
    )  # fmt: skip


REPOSITORIES = {
    **{name: tuned(model) for name, model in TUNED.items()},
    "me/secret": Repository(gated=True),
    "me/adapter": Repository(others=("pytorch_lora_weights.safetensors",)),
    "me/one-file": Repository(others=("dreams_v8.safetensors",)),
    "me/words": Repository(small={"config.json": {}}),
    "me/absent": Repository(small={"model_index.json": {"_class_name": "NoSuchPipeline"}}),
    "me/video": Repository(small={"model_index.json": {"_class_name": "StableVideoDiffusionPipeline"}}),
    "me/aura": Repository(small={"model_index.json": {"_class_name": "AuraFlowPipeline", "vae": [None, None]}}),
    "me/inpaint": Repository(small={"model_index.json": {"_class_name": "StableDiffusionInpaintPipeline"}}),
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with serve_hub(monkeypatch, tmp_path / "hub", REPOSITORIES) as served:
        yield served
        assert all(name.endswith(".json") for name in served.files())


@pytest.mark.parametrize("model", WRONG)
def test_a_wrong_family_is_refused_and_the_right_one_named(
    model: str, hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    own = (published(TUNED.get(model, model)) or published(MEDIUM)).family  # type: ignore[union-attr]
    with pytest.raises(
        ValueError, match=f"{re.escape(model)} is of the family {own}, got pipeline.name={WRONG[model]}"
    ):
        family_name(WRONG[model], model)
    assert main(["plan", "sd35m_grpo_geneval", f"pipeline.model={model}", f"pipeline.name={WRONG[model]}"]) == 1
    said = capsys.readouterr().err
    assert f"leave pipeline.name out, or set pipeline.model to one of {WRONG[model]}, such as " in said
    assert "Traceback" not in said
    assert hub.files() == (set() if model in checkpoints() else {f"{model} model_index.json"})


@pytest.mark.parametrize("model", TUNED)
def test_a_fine_tune_is_known_by_its_configuration(model: str, hub: FakeHub) -> None:
    base = TUNED[model]
    own = family_of(model)
    assert own == family_name(None, model) == family_name(own, model) == published(base).family  # type: ignore[union-attr]
    made = family(own)
    made.check(model, made.lora_targets, 8)
    assert made.planned_size(model, {}) == made.planned_size(base, {})
    assert made.rows(model, 4.0) == made.rows(base, 4.0)
    assert made.block_kinds(model) == made.block_kinds(base)
    with pytest.raises(ValueError, match="nothing_like_it"):
        made.check(model, ["nothing_like_it"])
    asked = len(hub.asked)
    assert family_of(model) == own  # once in a process
    assert len(hub.asked) == asked
    card = model_card(model)
    assert card is not None
    assert (card.licence, card.gated) == ("openrail++", False)


@pytest.mark.parametrize("name", [None, "sdxl"])
@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("stabilityai/stable-diffusion-3.5-medum", f"the hub has no model .*did you mean {MEDIUM} or "),
        ("me/nothing", r"the hub has no model me/nothing, or it is private and HF_TOKEN does not let you see it: corr"),
        ("FLUX.1-devv", r"the hub has no model FLUX.1-devv, .*did you mean black-forest-labs/FLUX.1-dev"),
        ("me/secret", r"me/secret is gated: accept its licence at https://huggingface.co/me/secret and set HF_TOKEN"),
        ("me/adapter", r"no diffusers pipeline: it has no model_index.json, but a LoRA: set policy.init_lora"),
        ("me/one-file", r"files of weights: download dreams_v8.safetensors and set pipeline.model to its path"),
        ("me/words", r"me/words on the hub is no diffusers pipeline: .* diffusers' layout"),
        (
            "me/inpaint",
            r"me/inpaint is a StableDiffusionInpaintPipeline, which no family loads .* fills what a mask",
        ),
        ("me/absent", r"me/absent is a NoSuchPipeline, and no family loads that, nor has diffusers .* docs/generic.md"),
        ("me/video", r"me/video is a StableVideoDiffusionPipeline, .* has no prompt"),
        ("me/dreams@v7", r"me/dreams on the hub has no revision v7: set pipeline.revision to a branch, tag or commit"),
        ("an id/with words", r"neither a folder or file here nor a hub id \(OWNER/NAME\)"),
        ("./nowhere", r"there is no ./nowhere: correct pipeline.model"),
    ],
)
def test_what_cannot_be_loaded_says_so_before_anything_is_fetched(
    model: str, words: str, name: str | None, hub: FakeHub
) -> None:
    with pytest.raises(ValueError, match=words):
        family_name(name, model)
    assert {one.split(" ")[-1] for one in hub.files()} <= {"model_index.json"}


def test_a_class_without_a_family_is_generic_and_what_it_lacks_is_refused_by_its_index(hub: FakeHub) -> None:
    assert family_of("me/aura") == family_name(None, "me/aura") == "generic"
    with pytest.raises(ValueError, match=r"of the family generic, got pipeline\.name=sdxl: leave"):
        family_name("sdxl", "me/aura")
    with pytest.raises(ValueError, match="no part named transformer or unet"):
        family("generic").check("me/aura", None)
    assert family_name("generic", "me/inpaint") == "generic"  # called so, it is refused by the next check
    with pytest.raises(ValueError, match="fills what a mask leaves out"):
        family("generic").check("me/inpaint", None)
    source = find_source("me/aura")
    assert (source.family, source.num_steps, source.guidance_scale) == ("generic", 50, 3.5)
    family("generic").check(MEDIUM, None)  # a published one can be called so


def test_offline_the_cache_is_looked_at_first_and_then_the_name_counts(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    assert family_of("me/juggernaut") == "sdxl"
    assert hub_commit("me/juggernaut") == COMMIT
    hub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("flowrl.pipelines.places.hub_files._ANSWERS", {})
    assert family_of("me/juggernaut") == "sdxl"
    assert known_family("me/dreams") is None
    assert family_name("sd", "me/dreams") == "sd"
    with pytest.raises(ValueError, match=r"not in the hub's cache.*HF_HUB_OFFLINE is set: set pipeline\.name"):
        family_of("me/dreams")
    assert hub.asked == []


def test_a_hub_that_does_not_answer_is_asked_once(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{revision}/{filename}")
    for model in ("me/dreams", "me/juggernaut"):
        with pytest.raises(ValueError, match=r"http://127.0.0.1:9 does not answer: set pipeline.name"):
            family_of(model)
    assert model_card("me/dreams") is None


def test_a_path_that_reads_like_an_id_is_answered_with_the_nearest_beside_it(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "runs" / "first-1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"no run or folder runs/frist-1 here \(did you mean runs/first-1\?\), "):
        family_of("runs/frist-1")
    with pytest.raises(ValueError, match=r"no run or folder zzz here, and no model of that id is known: give a run"):
        family_of("zzz")
    monkeypatch.chdir(tmp_path / "runs" / "first-1")  # not where the runs are
    with pytest.raises(ValueError, match=r"no run or folder runs/first-1 here, and no model of that id is known"):
        family_of("runs/first-1")


def test_a_revision_travels_with_the_model(hub: FakeHub, tmp_path: Path) -> None:
    assert family_of("me/juggernaut@v2") == "sdxl"
    assert "HEAD /me/juggernaut/resolve/v2/model_index.json" in hub.asked
    assert hub_commit("me/juggernaut@v2") == COMMIT
    assert published(f"{XL}@v9") is published(XL)
    assert split_revision("me/juggernaut@v2") == ("me/juggernaut", "v2")
    assert split_revision(at_revision(XL, None)) == (XL, None)
    for place in (str(tmp_path), "./absent", "asset:tiny-sd3"):
        with pytest.raises(ValueError, match=r"pipeline.revision \(v2\) is for models on the hub"):
            at_revision(place, "v2")


def test_sample_takes_a_fine_tune_by_its_id(hub: FakeHub) -> None:
    source = find_source("me/juggernaut")
    assert (source.family, source.model, source.guidance_scale) == (
        "sdxl",
        "me/juggernaut",
        find_source(XL).guidance_scale,
    )
    with pytest.raises(ValueError, match="the hub has no model me/nothing"):
        find_source("me/nothing")


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code = main(["plan", "--long", "sd35m_grpo_clip_24gb", "pipeline.height=64", "pipeline.width=64", *words])
    out, err = capsys.readouterr()
    assert code == 0, err
    return " ".join(out.split())


def test_plan_counts_a_fine_tune_and_offline_as_its_familys_first(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    known = published(MEDIUM)
    assert known is not None
    few = {**known.network, "num_layers": 2, "dual_attention_layers": []}
    small = {**REPOSITORIES["me/sd3-anime"].small, "transformer/config.json": few}
    hub.repositories["me/sd3-anime"] = replace(REPOSITORIES["me/sd3-anime"], small=small)
    for name, text in small.items():
        (tmp_path / "folder" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / name).write_text(json.dumps(text))
    own = shown(capsys, "pipeline.model=me/sd3-anime", "pipeline.name=null")
    folder = shown(capsys, f"pipeline.model={tmp_path / 'folder'}")
    evaluation = re.compile(r"one evaluation [^;]+")
    assert evaluation.findall(own) == evaluation.findall(folder) != []
    assert f"its denoiser as its configuration says, its other parts as {MEDIUM}" in own
    assert "licence openrail++; not gated" in own
    assert {name.split(" ")[1] for name in hub.files()} <= {
        "model_index.json", "transformer/config.json", "vae/config.json", "scheduler/scheduler_config.json",
        "tokenizer/tokenizer_config.json",
    }  # fmt: skip
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    first = next(model for model, one in checkpoints().items() if one.family == "sd3")
    monkeypatch.setitem(checkpoints(), first, replace(known, network=few))
    offline = shown(capsys, "pipeline.model=me/never-seen", "pipeline.name=sd3")
    assert f"nothing is known of it here: counted as {first}, the family's first" in offline
    assert "licence not known: see huggingface.co/me/never-seen" in offline
    assert evaluation.findall(offline) == evaluation.findall(own)


def test_a_checkpoint_made_for_float16_says_so() -> None:
    half, brain = (f"Efficient-Large-Model/Sana_1600M_1024px_{name}diffusers" for name in ("", "BF16_"))
    note = precision_note(half, "bfloat16")
    assert note is not None
    assert "published for float16 or float32" in note
    assert precision_note(half, "float16") is precision_note(half, "float32") is None
    assert precision_note(brain, "bfloat16") is None


def test_near_misses_are_suggested() -> None:
    assert did_you_mean("Qwen/Qwen-Imge").startswith(" (did you mean Qwen/Qwen-Image")
    for short, meant in (
        ("sd3.5m", "stable-diffusion-3.5-medium"),
        ("wan2.2", "Wan2.2-"),
        ("kontext", "1-Kontext-dev"),
        ("hv15", "HunyuanVideo-1.5"),
        ("zit", "Z-Image-Turbo"),
    ):
        assert meant in did_you_mean(short)
    for other in ("someone/something-else-entirely", "me/my-model", "sd", "sad"):
        assert did_you_mean(other) == ""
    assert set(STOCK.values()) == set(PIPELINES)
    assert replace(REPOSITORIES["me/secret"], gated=False) == Repository()


def test_what_the_hub_cannot_give_suggests_what_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"not fully cached locally\): .* \(did you mean stabil") as caught:
        fetch("stabilityai/sd35m", None)
    assert "stacktrace" not in str(caught.value)
    assert did_you_mean("stabilityai/stable-diffusion-3.5-medium") == ""
