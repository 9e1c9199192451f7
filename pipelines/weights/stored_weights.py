"""The weight files of one part of a model folder, and what keys mean that no network reads.

A key that nothing reads is either left over, and the network computes what the file was made for all the same, or it
changes what other weights mean. Left over are, beside what the libraries themselves let pass:

    whole towers and heads      which the class of the part does without: a head over the vocabulary, the vision tower
                                of a model whose text encoder is used; none of their weights is read
    tables                      that the network computes itself, and that the file holds with the same numbers
    scales of eight-bit floats  once the weights were multiplied by them, here

All else is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

_LEFT_OUT = (
    "lm_head", "logit_scale", "logit_bias", "text_projection", "visual_projection", "text_model", "vision_model",
    "visual", "vision_tower", "multi_modal_projector", "decoder", "mtp",
)  # fmt: skip
"""Towers and heads of larger models, parts of which published folders hold as text or image encoders."""
_SCALES = ("scale_weight", "weight_scale")
_INPUT_SCALES = ("scale_input", "input_scale")
"""Scales of activations, which only products in eight bits need."""
_MARK, _FORM = "scaled_fp8", "comfy_quant"
_FORMS = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
"""Names of eight-bit floats in a file's header, and those that say the form of a layer."""
_WHOLE = re.compile(r"^[IU]\d|^BOOL|int|bool")
"""Of dtypes that are no floats, in the words of both kinds of files."""
_FORM_KEYS = {"format", "full_precision_matrix_mult"}


class Stored:
    """Files of weights, of which headers are read, and single tensors."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Reads the names of all tensors."""
        self.place: dict[str, Path] = {}
        self.forms: dict[str, str] = {}
        for path in files:
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt") as file:
                    forms = {key: str(file.get_slice(key).get_dtype()) for key in file.keys()}
            else:
                tensors = torch.load(path, map_location="meta", weights_only=True)
                forms = {key: str(tensor.dtype) for key, tensor in tensors.items()}
            self.forms |= forms
            self.place |= dict.fromkeys(forms, path)

    def tensor(self, key: str) -> Tensor:
        """A tensor as stored."""
        path = self.place[key]
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                found: Tensor = file.get_tensor(key)
                return found
        return torch.load(path, map_location="cpu", weights_only=True)[key]  # type: ignore[no-any-return]

    def form(self, key: str) -> str:
        """The dtype of a tensor from its header; empty for pickles."""
        return self.forms[key] if self.place[key].suffix == ".safetensors" else ""

    def whole_numbers(self, network: nn.Module) -> dict[str, str]:
        """Keys of weights that are stored as whole numbers or truth values, and how: what they mean is not in them."""
        return {
            key: form
            for key, form in self.forms.items()
            if _WHOLE.search(form) and (weight := _parameter(network, key)) is not None and weight.is_floating_point()
        }

    def left_over(self, unread: Collection[str], network: nn.Module, *, towers: bool) -> set[str]:
        """Those of some keys, which the network did not read, without which it computes what the file was made for;
        with `towers` a file may be of a larger model, of which the network is a part."""
        branches = {_branch(key) for key in self.place.keys() - set(unread)}
        computed = {name: one for name, one in network.named_buffers() if name not in network.state_dict()}
        return {
            key
            for key in unread
            if (towers and _branch(key) not in branches and _branch(key).removeprefix("model.") in _LEFT_OUT)
            or self._same(key, computed)
        }

    def _same(self, key: str, computed: Mapping[str, Tensor]) -> bool:
        """Whether a key is of a table that the network computes itself, to the same numbers."""
        name = next((name for name in computed if name == key or key.endswith(f".{name}")), None)
        if name is None or key not in self.place:
            return False
        found, wanted = self.tensor(key), computed[name].detach().cpu()
        if found.numel() != wanted.numel():
            return False
        found, wanted = found.double().flatten(), wanted.double().flatten()
        return bool((found - wanted).abs().max() <= 1e-2 * wanted.abs().max())  # stored in a half precision, perhaps

    def unscale(self, unread: Collection[str], network: nn.Module) -> set[str]:
        """Multiplies weights that are stored as eight-bit floats by the scales that lie beside them.

            weight = round_to_dtype(float32(stored) * scale)

        A scale is a number, or one number for every row of the weight. The loaded network's weights have the stored
        values, which every dtype of a network holds exactly. Returns the keys, of those that it did not read, that this
        did away with; none where any of them is in another form.
        """
        layers = {key.rpartition(".")[0] for key in unread if key.rpartition(".")[2] in _SCALES}
        named = (*_SCALES, *_INPUT_SCALES, _FORM)
        scaled = [self._scaled(layer, unread, network) for layer in sorted(layers)]
        if not layers or None in scaled:
            return set()
        for weight, exact in [found for found in scaled if found is not None]:
            weight.data.copy_(exact)
        done = {f"{layer}.{name}" for layer in layers for name in named} | {_MARK}
        return {key for key in unread if key in done or key.rpartition(".")[2] == _MARK}

    def _scaled(self, layer: str, unread: Collection[str], network: nn.Module) -> tuple[nn.Parameter, Tensor] | None:
        """A layer's weight and its exact values; None where it is not known how they come about."""
        key, scales = f"{layer}.weight", [f"{layer}.{name}" for name in _SCALES if f"{layer}.{name}" in unread]
        form = self.form(key) if key in self.place and key not in unread else ""
        if len(scales) != 1 or form not in _FORMS or not self._plain(layer, _FORMS[form], unread):
            return None
        weight, stored, scale = _parameter(network, key), self.tensor(key).float(), self.tensor(scales[0]).float()
        rows = len(stored)
        if scale.numel() not in (1, rows) or (scale.ndim > 1 and scale.shape[0] != scale.numel()):
            return None
        if weight is None or not torch.equal(weight.detach().float(), stored) or not bool((scale > 0).all()):
            return None
        if not bool(scale.isfinite().all()):
            return None
        return weight, stored * scale.reshape(-1, *(1,) * (stored.ndim - 1))

    def _plain(self, layer: str, form: str, unread: Collection[str]) -> bool:
        """Whether what a layer says of its own form, if anything, is that of its weight, and nothing more."""
        key = f"{layer}.{_FORM}"
        if key not in unread:
            return True
        try:
            said = json.loads(bytes(self.tensor(key).to(torch.uint8).tolist()))
        except (ValueError, UnicodeDecodeError):
            return False
        return isinstance(said, dict) and said.get("format") == form and said.keys() <= _FORM_KEYS


def _branch(key: str) -> str:
    """The tower or head that a key is of: its first name, or the one behind the wrapper `model`."""
    return ".".join(key.split(".")[: 2 if key.startswith("model.") else 1])


def _parameter(network: nn.Module, key: str) -> nn.Parameter | None:
    """The parameter that a file's key was read into: libraries add or take off names in front."""
    own = dict(network.named_parameters())
    found = [name for name in own if name == key or key.endswith(f".{name}") or name.endswith(f".{key}")]
    return own[max(found, key=len)] if found else None
