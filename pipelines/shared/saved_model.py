"""A network trained as a whole, as a folder that stock diffusers opens: `DiffusionPipeline.from_pretrained(folder)`.

The trained parts are written with diffusers' own `save_pretrained`, in the dtype they computed in. What is frozen (text
encoders, autoencoder, tokenizers, scheduler) is taken from the model's own files: copied where all of it is small, else
linked, so that a run takes no room for it.
"""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from flowrl.config.train import TrainConfig
from flowrl.pipelines.arithmetic.compiling import experts_of
from flowrl.pipelines.places.hub_files import INDEX
from flowrl.pipelines.places.model_folders import SMALL, stock_folder, take_frozen
from flowrl.pipelines.places.single_files import is_single_file
from flowrl.pipelines.shared.contract import ModelFamily, Pipeline
from flowrl.pipelines.weights.full_weights import FullWeights, trained_names
from flowrl.pipelines.weights.loading_choices import Split
from flowrl.pipelines.weights.parallelize import put_together
from flowrl.runtime.files import sync, sync_tree


def check_full(config: TrainConfig, known: ModelFamily, location: str) -> None:
    """Refuses models and layers whose own weights cannot be trained, before a model loads."""
    if is_single_file(location):
        raise ValueError(
            f"policy.train=full ships a folder with all parts of its model, and {location} is a single file: write it "
            "as a folder first (from_single_file and save_pretrained in stock diffusers), or train a LoRA "
            "(policy.train=lora)"
        )
    targets = config.policy.target_modules
    known.check(location, None)
    for expert in experts_of(None if targets is None else known.meta_denoiser(location)):
        trained_names(expert, targets)


def save_model(folder: Path, pipeline: Pipeline, split: Split | None = None) -> None:
    """Replaces the model in a folder by the one that the network holds now, in one step. Where a process is killed
    between the two renames of that step, `put_back` has what was there before. Of networks that are split all processes
    of one copy come here: the first writes, and has a whole one on its host at a time."""
    if split is not None and split.mesh.get_local_rank() > 0:
        for network in pipeline.experts.values():
            put_together(network)
        return
    staged, aside = _staged(folder), _aside(folder)
    for half in (staged, aside):
        shutil.rmtree(half, ignore_errors=True)
    staged.mkdir(parents=True)
    source = folder if (folder / INDEX).is_file() else stock_folder(pipeline.model)
    take_frozen(source, staged, set(pipeline.experts), small=0 if source == folder else SMALL)
    for name, network in pipeline.experts.items():
        whole: Any = network if split is None else put_together(network)
        whole.save_pretrained(staged / name)
        for path in (staged / name).iterdir():
            path.chmod(staged.stat().st_mode & 0o666)  # safetensors keeps a file to its owner, whatever the umask
    sync_tree(staged)
    if folder.exists():
        folder.replace(aside)
    staged.replace(folder)
    sync(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def put_back(folder: Path) -> None:
    """Completes what a killed `save_model` had begun; no process may be at work in the folder."""
    if _aside(folder).exists() and not folder.exists():
        _aside(folder).replace(folder)
    for half in (_staged(folder), _aside(folder)):
        shutil.rmtree(half, ignore_errors=True)


def load_saved(pipeline: Pipeline, folder: Path) -> FullWeights:
    """The network of a pipeline as a policy with the weights of a folder; its slot "reference" is what it was before.
    Raises ValueError: the folder has no model, or another one."""
    policy, found = FullWeights(pipeline.denoiser), dict[str, Tensor]()
    policy.keep_reference()
    for name in pipeline.experts:
        prefix = f"{name}." if len(pipeline.experts) > 1 else ""
        for path in sorted((folder / name).glob("*.safetensors")):
            found |= {f"{prefix}{key}": tensor for key, tensor in load_file(path).items()}
    if not found:
        again = shlex.quote(str(folder.parent))
        raise ValueError(f"there is no model in {folder}: finish the run with 'flowrl train resume={again}'")
    buffers = found.keys() - policy.parameters.keys()
    policy.load({name: tensor for name, tensor in found.items() if name not in buffers})
    return policy


def _staged(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.writing")


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.aside")
