"""Listed trials of bad input: models, LoRAs and runs that something is wrong with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from bad_input_draws import Trial, written
from bad_input_folder import TRAIN
from safetensors.torch import load_file, save_file

RESUME = ["train", "resume=run", "num_iterations=3"]


def model_trials() -> Iterator[Trial]:
    """Models that lack something, or are others."""

    def without(part: str, folder: Path) -> None:
        shutil.rmtree(folder / "model" / part)

    def edited(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
        def prepare(folder: Path) -> None:
            path = folder / "model" / name
            data = json.loads(path.read_text())
            change(data)
            path.write_text(json.dumps(data))

        return prepare

    def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
        def prepare(folder: Path) -> None:
            path = next((folder / "model" / "transformer").glob("*.safetensors"))
            tensors = load_file(path)
            change(tensors)
            save_file(tensors, path)

        return prepare

    def pickled(folder: Path) -> None:
        path = next((folder / "model" / "transformer").glob("*.safetensors"))
        path.unlink()
        torch.save({"evil": Path}, path.with_name("diffusion_pytorch_model.bin"))

    parts = ("transformer", "vae", "scheduler", "text_encoder", "tokenizer")
    changed: dict[str, Callable[[Path], None]] = {f"without {part}": partial(without, part) for part in parts}
    changed |= {
        "of another class": edited("model_index.json", lambda d: d.update(_class_name="FluxPipeline")),
        "of no class": edited("model_index.json", lambda d: d.pop("_class_name")),
        "of an unknown class": edited("model_index.json", lambda d: d.update(_class_name="NoPipeline")),
        "with odd heads": edited("transformer/config.json", lambda d: d.update(num_attention_heads="many")),
        "with other width": edited("transformer/config.json", lambda d: d.update(attention_head_dim=7)),
        "with a lost tensor": weights(lambda t: t.pop(sorted(t)[0])),
        "with a tensor of another shape": weights(lambda t: t.update({sorted(t)[0]: torch.zeros(3)})),
        "with weights that are not numbers": weights(lambda t: [v.fill_(float("nan")) for v in t.values()]),
        "with pickled weights": pickled,
    }
    for name, prepare in changed.items():
        yield Trial(name=f"model {name}", words=[*TRAIN, "out=new"], prepare=prepare, changes=("new",))
    for given in (
        "absent/absent-model",
        "./absent",
        "images",
        "prompts.txt",
        "asset:tiny-sd4",
        "asset:../x",
        "a b c",
        "/",
    ):
        yield Trial(name=f"model at {given}", words=[*TRAIN, f"pipeline.model={given}"])
    for model, config in (
        ("black-forest-labs/FLUX.1-dev", "sd35m_grpo_geneval"),
        ("Qwen/Qwen-Image", "flux_grpo_pickscore"),
        ("stabilityai/stable-diffusion-3.5-medium", "flux_grpo_pickscore"),
    ):
        words = ["plan", config, f"pipeline.model={model}", "pipeline.name=sana"]
        yield Trial(name=f"plan of {model} as another family", words=words, says=("family|sana",))
    for pair in (
        "pipeline.name=nothing",
        "pipeline.device=tpu",
        "pipeline.device=cuda",
        "pipeline.device=cuda:x",
        "pipeline.num_frames=9",
        "pipeline.fps=8",
        "pipeline.height=63",
        "pipeline.options={vae_tiling: 1}",
        "policy.target_modules=[attn.to_z]",
        "policy.target_modules=[]",
        "pipeline.dtype=int8",
    ):
        yield Trial(
            name=f"model with {pair}",
            words=[*TRAIN, pair],
            says=(pair.split("=")[0].split(".")[1] + "|" + pair.split("=")[1].strip("[]{}").split(":")[0],),
        )


def adapter_trials() -> Iterator[Trial]:
    """LoRAs that do not fit."""

    def lora(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
        def prepare(folder: Path) -> None:
            shutil.copytree(folder / "run" / "lora", folder / "lora")
            path = next((folder / "lora").glob("*.safetensors"))
            tensors = load_file(path)
            change(tensors)
            save_file(tensors, path)

        return prepare

    def renamed(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            tensors[key.replace("transformer_blocks", "other_blocks")] = tensors.pop(key)

    changed = {
        "of no tensors": lora(lambda t: t.clear()),
        "of another model": lora(renamed),
        "of nan": lora(lambda t: [v.fill_(float("nan")) for v in t.values()]),
        "of another shape": lora(lambda t: t.update({k: torch.zeros(3, 3) for k in t})),
        "that lacks half": lora(lambda t: [t.pop(k) for k in list(t) if "lora_A" in k or "down" in k]),
    }
    for name, prepare in changed.items():
        yield Trial(
            name=f"start from a LoRA {name}",
            words=[*TRAIN, "policy.init_lora=lora", "out=new"],
            prepare=prepare,
            changes=("new",),
        )
        yield Trial(
            name=f"sample a LoRA {name}",
            prepare=prepare,
            changes=("samples",),
            expect="refused",
            words=["sample", "model", "--lora=lora", "--prompt=a red circle", "--steps=1"],
        )
    for given in ("absent", "images", "prompts.txt", "images/0.png", "asset:absent"):
        yield Trial(
            name=f"start from a LoRA at {given}",
            words=[*TRAIN, f"policy.init_lora={given}", "out=new"],
            changes=("new",),
        )


def resume_trials() -> Iterator[Trial]:
    """Runs that are continued under other inputs."""

    def config(**changed: Any) -> Callable[[Path], None]:
        def prepare(folder: Path) -> None:
            path = folder / "run" / "config.yaml"
            data = yaml.safe_load(path.read_text())
            for key, value in changed.items():
                if isinstance(data[key], dict):
                    data[key] |= value
                else:
                    data[key] = value
            path.write_text(yaml.safe_dump(data))

        return prepare

    def foreign(folder: Path) -> None:
        shutil.copytree(folder / "other" / "checkpoints" / "000001", folder / "run" / "checkpoints" / "000003")

    changed: dict[str, Callable[[Path], None]] = {
        "other prompts": written("prompts.txt", "a red circle\ntwo blue squares\na green triangle\nsomething else\n"),
        "another reward": written(
            "brightness.py", "def brightness(images, prompts, metadata):\n    return images[:, 0].mean((1, 2))\n"
        ),
        "other evaluation prompts": written("eval.jsonl", '{"prompt": "other"}\n{"prompt": "words"}\n'),
        "another seed": config(seed=5),
        "another learning rate": config(optim={"lr": 0.5}),
        "another group size": config(group_size=8),
        "another guidance": config(sampler={"guidance_scale": 3.0}),
    }
    yield Trial(
        name="resume with a checkpoint of another run", words=RESUME, prepare=foreign, expect="works",
        says=("damaged-1",),
        changes=("run",),
    )  # fmt: skip
    for name, prepare in changed.items():
        yield Trial(name=f"resume with {name}", words=RESUME, prepare=prepare, changes=("run/.lock",))
    for given in (
        "resume=absent",
        "resume=images",
        "resume=prompts.txt",
        "resume=",
        "resume=run seed=1",
        "resume=run out=x",
        "resume=run num_iterations=0",
        "resume=run num_iterations=x",
    ):
        yield Trial(
            name=f"train {given}",
            words=["train", *given.split()],
            expect="either" if given == "resume=" else "refused",
            changes=("runs", "run/.lock"),
        )
    yield Trial(
        name="resume a finished run",
        words=["train", "resume=run"],
        expect="works",
        says=("finished",),
        changes=("run/.lock",),
    )
    yield Trial(name="resume beside a configuration", words=["train", "tiny.yaml", "resume=run"])
