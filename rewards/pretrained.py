"""Models from the hub for rewards: one way to check, load and name them, and the features of CLIP models."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def check_model(model: str, *, owner: str, what: str) -> None:
    """Refuses a model that cannot be there, without loading it: a folder that does not exist, no transformers.

    Args:
        model: a local folder, or an id on the hub, which is not looked up here.
        owner: who wants it, for the message: "reward 'clip_score'".
        what: the kind of model: "CLIP".
    """
    if model.startswith((".", "/", "~")) and not Path(model).expanduser().is_dir():
        raise ValueError(f"{owner}: there is no folder {model!r}: give a folder with a {what} model or a hub id.")
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(f"{owner} needs the package transformers: pip install transformers.")


def expanded(model: str) -> str:
    """The model's name with a leading `~` expanded; transformers does not do that."""
    return str(Path(model).expanduser()) if model.startswith("~") else model


def load_network(
    kind: Any, model: str, *, device: torch.device, revision: str | None = None, owner: str, option: str, what: str
) -> Any:
    """A frozen network in float32 and evaluation mode, every weight of which comes from the checkpoint.

    Args:
        kind: the class of transformers.
        model: a local folder, or an id on the hub.
        device: where it runs.
        revision: branch, tag or commit on the hub.
        owner: who wants it, for messages.
        option: the option that names the model, for messages.
        what: the kind of model, for messages.

    Raises:
        ValueError: if it cannot be had, or parameters are missing, which transformers would fill with random numbers.
    """
    model = expanded(model)
    try:
        network, info = kind.from_pretrained(model, revision=revision, dtype=torch.float32, output_loading_info=True)
    except OSError as error:
        raise cannot_load(model, error, owner=owner, option=option, what=what) from error
    missing = sorted(set(info["missing_keys"]) & {name for name, _ in network.named_parameters()})
    if missing:
        raise ValueError(
            f"{owner}: {model!r} lacks {len(missing)} weights of a {what} model (first: {missing[0]}), which would be "
            f"random numbers: give {option}: a complete {what} checkpoint."
        )
    return network.to(device).eval().requires_grad_(False)


def cannot_load(model: str, error: OSError, *, owner: str, option: str, what: str) -> ValueError:
    """What to raise for an OSError: that of transformers for missing files, unknown ids and no connection alike."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ValueError(
        f"{owner} could not load the {what} model {model!r}: {reason} Give {option}: a folder that holds a complete "
        f"{what} checkpoint (config, weights, and the tokenizer and preprocessor if it has them), or a hub id while "
        f"the hub can be reached; fetch it beforehand with `hf download {model}`, or take a reward that needs no "
        f"weights."
    )


def load_clip(
    model: str, *, device: torch.device, revision: str | None = None, owner: str, option: str
) -> tuple[Any, Any]:
    """A CLIP model as `load_network` gives it, and its processor.

    Raises:
        ValueError: as `load_network`.
    """
    from transformers import CLIPModel, CLIPProcessor

    network = load_network(CLIPModel, model, device=device, revision=revision, owner=owner, option=option, what="CLIP")
    try:
        processor = CLIPProcessor.from_pretrained(expanded(model), revision=revision)
    except OSError as error:
        raise cannot_load(model, error, owner=owner, option=option, what="CLIP") from error
    return network, processor


def fingerprint(weights: Iterable[Tensor]) -> str:
    """A short hash of some weights: tells checkpoints apart where a folder or a branch name does not."""
    digest = hashlib.sha256()
    for weight in weights:
        digest.update(weight.detach().cpu().numpy().tobytes())
    return digest.hexdigest()[:12]


def clip_fingerprint(network: Any) -> str:
    """The fingerprint of a CLIP model's two projections."""
    return fingerprint(layer.weight for layer in (network.visual_projection, network.text_projection))


def clip_text(network: Any, tokenizer: Any, texts: list[str], device: torch.device) -> Float[Tensor, " b d"]:
    """Unit embeddings of texts, cut to what the model can read."""
    tokens = tokenizer(
        texts,
        padding=True,  # the text tower is causal and read at the end token, so how far it is padded does not matter
        truncation=True,
        max_length=network.config.text_config.max_position_embeddings,
        return_tensors="pt",
    ).to(device)
    return _unit(network.get_text_features(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]))


def clip_image(network: Any, pixels: Float[Tensor, " b 3 h w"]) -> Float[Tensor, " b d"]:
    """Unit embeddings of pictures that went through CLIP's preprocessing."""
    return _unit(network.get_image_features(pixel_values=pixels))


def _unit(output: Any) -> Float[Tensor, " b d"]:
    """The projected embedding at length 1; transformers 4 returns the tensor, 5 an output object that holds it."""
    features: Tensor = output if isinstance(output, Tensor) else output.pooler_output
    unit: Tensor = features / features.norm(dim=-1, keepdim=True)
    return unit
