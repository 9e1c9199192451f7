"""The policy: a network's LoRA weights, and named copies of them that the network can run under.

Slots of one network: `policy` is what is trained, `reference` the network with the LoRA switched off, and any other
slot (`ema`, `old`, ...) a copy of the LoRA tensors. Running under a slot swaps tensors in place or flips the adapters'
own switch, which costs microseconds per layer; the base weights are never touched or merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from flowrl.files import parse_json, read_json
from flowrl.pipelines.weights.trained_weights import changed, move_towards
from flowrl.placement import widest
from flowrl.private_names import switch_adapters
from flowrl.randomness import counter_normal

ADAPTER = "default"
_PARTS: tuple[str, ...] = ("transformer.", "unet.")  # before a layer's name in stock files
_MAGNITUDE = ".lora_magnitude_vector"
_PEFT_PARTS: tuple[str, ...] = ("base_model.model.",)
LORA_FILE, _PEFT_FILE = "pytorch_lora_weights.safetensors", "adapter_model.safetensors"


VARIANTS: dict[str, dict[str, bool]] = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}
"""What PEFT calls the kinds of LoRA.

    lora    W + alpha / r  B A
    rslora  W + alpha / sqrt(r)  B A                                    (Kalajdzievski 2023, arXiv 2312.03732)
    dora    m (W + alpha / r  B A) / ||W + alpha / r  B A||, row by row (Liu et al. 2024, arXiv 2402.09353)

The norms are constants of the backward pass, as that paper has it, and m starts as the norms of W.
"""

JOINT_ATTENTION = (
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
    "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
)  # fmt: skip
"""LoRA targets: the projections of attention over image and text."""

SELF_AND_CROSS_ATTENTION = tuple(
    f"{part}.{layer}" for part in ("attn1", "attn2") for layer in ("to_q", "to_k", "to_v", "to_out.0")
)
"""LoRA targets: the projections of self-attention and of attention to the text."""


def check_targets(network: nn.Module, targets: Sequence[str], rank: int | None = None) -> None:
    """Refuses LoRA targets that bind to nothing, and a rank that no layer among them has.

    Args:
        network: any copy of the network, also one on the meta device.
        targets: name endings, as PEFT takes them: "attn.to_q" fits every module whose name ends in ".attn.to_q".
        rank: of the LoRA.

    Raises:
        ValueError: a target matches no linear layer; names the closest that exist. Or the rank is above the width of
            every layer that would get it, where more of it says nothing more.
    """
    linear = {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear)}
    widest = 0
    for target in targets:
        bound = [module for name, module in linear.items() if name == target or name.endswith("." + target)]
        widest = max([widest, *(min(module.in_features, module.out_features) for module in bound)])
        if not bound:
            endings = sorted({".".join(p for p in name.split(".")[-3:] if not p.isdigit()) for name in linear})
            raise ValueError(
                f"LoRA target {target!r} matches no linear layer of {type(network).__name__}, so nothing would be "
                f"trained there. Layers end in: {', '.join(endings[:24])}"
            )
    if rank is not None and targets and rank > widest:
        raise ValueError(
            f"policy.lora_rank is {rank}, and the widest layer that it is added to has width {widest}: lower it"
        )


class Policy:
    """LoRA weights of one network, in float32 whatever the base's dtype.

    Attributes:
        network: the network that the LoRA was added to.
        parameters: trainable tensors by name, in a fixed order.
        config: rank, alpha and targets.
        slots: copies of the tensors by slot name.
        scale: 1, which weights of a LoRA that has not diverged stay near; the largest magnitude at the start of a DoRA.
    """

    scale = 1.0

    def __init__(
        self, network: nn.Module, *, rank: int, alpha: float, targets: Sequence[str], seed: int, variant: str = "lora"
    ) -> None:
        """Adds a LoRA: A Gaussian with standard deviation 1/rank, drawn from (seed, tensor name), and B zero.

        `variant` is one of `VARIANTS`.
        """
        from peft import LoraConfig  # seconds, which what only plans or checks does without

        from flowrl.pipelines.arithmetic.lora_linear import add_lora
        from flowrl.private_names import LoraLayer

        check_targets(network, targets)
        self.network = network
        self.config: dict[str, Any] = {"r": rank, "lora_alpha": alpha, "target_modules": list(targets)}
        self.config |= VARIANTS[variant]
        self.variant = variant
        network.requires_grad_(False)
        lora = LoraConfig(init_lora_weights="gaussian", **self.config)
        add_lora(network, lora, ADAPTER)
        self._layers = [module for module in network.modules() if isinstance(module, LoraLayer)]
        self.parameters: dict[str, nn.Parameter] = {}
        for name, parameter in network.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()
                parameter.requires_grad_(True)
                self.parameters[name] = parameter
        for name, parameter in self.parameters.items():
            if "lora_A" in name:
                parameter.data.copy_(counter_normal(parameter.shape, seed, "lora", name) / rank)
            elif "lora_B" in name:
                parameter.data.zero_()
        for layer in self._layers if variant == "dora" else ():  # PEFT rounds them to the base's dtype
            magnitude = layer.lora_magnitude_vector[ADAPTER].weight
            magnitude.data.copy_(torch.linalg.norm(layer.get_base_layer().weight.float(), dim=1))
            self.scale = max(self.scale, float(magnitude.detach().max()))
        self.slots: dict[str, dict[str, Tensor]] = {}
        self.running = "policy"

    @property
    def trained(self) -> list[Tensor]:
        """What gradients are taken of: the parameters themselves."""
        return list(self.parameters.values())

    def sum_dtype(self, device: torch.device) -> torch.dtype:
        """The dtype of gradient sums: the widest, since a LoRA has few weights."""
        return widest(device)

    def settle(self) -> None:
        """Nothing is left to do after the parameters have changed: the network computes with them."""

    def keep_reference(self) -> None:
        """Nothing has to be kept: the reference is the network without the LoRA."""

    def tensors(self) -> dict[str, Tensor]:
        """Detached copies of the trained tensors by name."""
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies tensors into the trained ones.

        Raises:
            ValueError: names or shapes differ.
        """
        check_same(self.parameters, tensors)
        for name, parameter in self.parameters.items():
            parameter.data.copy_(tensors[name])

    def add_slot(self, slot: str) -> None:
        """Keeps a copy of the policy under a name."""
        self.slots[slot] = self.tensors()

    def blend(self, slot: str, decay: float) -> None:
        """Moves a slot towards the policy: `slot <- decay * slot + (1 - decay) * policy`."""
        move_towards(self.slots[slot], self.parameters, decay)

    @contextmanager
    def under(self, slot: str) -> Iterator[None]:
        """Runs the network under a slot: "policy", "reference" (LoRA off) or one that was added; may be nested.

        Do not enter or leave it between a forward pass and its backward pass.

        Raises:
            ValueError: there is no such slot.
        """
        with changed(self, slot):
            yield

    def change(self, old: str, new: str) -> None:
        """Leaves one slot and enters another; between the two the network holds the policy."""
        self.running = new
        for slot, entered in ((old, False), (new, True)) if old != new else ():
            if slot == "reference":
                for layer in self._layers:
                    switch_adapters(layer, off=entered)
            elif slot != "policy":
                kept = self.slots[slot]
                for name, parameter in self.parameters.items():
                    parameter.data, kept[name] = kept[name], parameter.data

    def peft_tensors(self) -> dict[str, Tensor]:
        """The weights the network holds now, under PEFT's portable names."""
        from peft import get_peft_model_state_dict

        state = get_peft_model_state_dict(self.network, adapter_name=ADAPTER)
        return {name: tensor.detach().float().cpu().contiguous() for name, tensor in state.items()}

    def initialise_from(self, folder: Path) -> None:
        """Continues from a LoRA on disk, in diffusers' or PEFT's (flow_grpo's) layout.

        Raises:
            ValueError: no LoRA there, it binds to other layers, its rank or alpha differ, or it is not finite.
        """
        from peft import get_peft_model_state_dict

        tensors, alpha = read_lora(folder)
        refuse_other_variant(folder, self.variant)
        refuse_not_finite(tensors, f"the LoRA in {folder}", "take an earlier one")
        own = get_peft_model_state_dict(self.network, adapter_name=ADAPTER)
        check_same(own, tensors, what=f"the LoRA in {folder}")
        if alpha != self.config["lora_alpha"]:
            raise ValueError(
                f"the LoRA in {folder} has alpha {alpha}, policy.lora_alpha is {self.config['lora_alpha']}: the same "
                f"weights would act {self.config['lora_alpha'] / alpha:g} times as strongly; set "
                f"policy.lora_alpha={alpha}"
            )
        portable = {portable_name(name): parameter for name, parameter in self.parameters.items()}
        for name, parameter in portable.items():
            parameter.data.copy_(tensors[name])


def lora_shape(folder: Path) -> tuple[int, float, list[str]]:
    """Rank, alpha and layers of the LoRA in a folder.

    Raises:
        ValueError: as `read_lora`; or its layers have different ranks.
    """
    tensors, alpha = read_lora(folder)
    ranks = {tensor.shape[0] for name, tensor in tensors.items() if "lora_A" in name}
    if len(ranks) != 1:
        raise ValueError(f"the LoRA in {folder} has ranks {sorted(ranks)}: only plain LoRA, one rank, is read")
    return ranks.pop(), alpha, sorted({name.split(".lora_")[0] for name in tensors})


def read_lora(folder: Path) -> tuple[dict[str, Tensor], float]:
    """Tensors by PEFT's portable names (`transformer_blocks.0.attn.to_q.lora_A.weight`) and alpha.

    A diffusers file without alpha has alpha = rank, as stock diffusers reads it. Instead of the folder its file may be
    named.

    Raises:
        ValueError: the folder holds neither layout, or a LoRA that is not simply `alpha / rank * B A`.
    """
    folder = folder.parent if folder.name in (LORA_FILE, _PEFT_FILE) else folder
    return (_read_experts if (folder / "transformer_2" / LORA_FILE).exists() else _read_one)(folder)


def lora_variant(folder: Path) -> str:
    """Which of `VARIANTS` the LoRA in a folder is.

    Raises:
        ValueError: as `read_lora`.
    """
    folder = folder.parent if folder.name in (LORA_FILE, _PEFT_FILE) else folder
    path, _, stated = _stated(folder)
    with _safetensors(path), safe_open(path, framework="pt") as file:
        magnitudes = any(_MAGNITUDE in name for name in file.keys())
    return "dora" if magnitudes or stated.get("use_dora") else "rslora" if stated.get("use_rslora") else "lora"


def refuse_other_variant(folder: Path, variant: str) -> None:
    """Refuses a LoRA that acts in another way than the policy's.

    Raises:
        ValueError: as `read_lora`; or names both variants and the key.
    """
    if (found := lora_variant(folder)) != variant:
        raise ValueError(
            f"policy.lora_variant is {variant}, and the LoRA in {folder} is a {found}, which acts otherwise with the "
            f"same weights: set policy.lora_variant={found}"
        )


def _stated(folder: Path) -> tuple[Path, Sequence[str], dict[str, Any]]:
    """The file of a LoRA, what may stand before its layers' names, and what it states of itself."""
    if (folder / LORA_FILE).exists():
        path, prefixes = folder / LORA_FILE, _PARTS
        with _safetensors(path), safe_open(path, framework="pt") as file:
            notes = file.metadata() or {}
        stated = parse_json(notes.get("lora_adapter_metadata", "{}"), f"the metadata of {path}")
        if not isinstance(stated, dict):
            raise ValueError(f"the metadata of {path} is no object: save the LoRA again")
        stated = {_without(prefixes, key): value for key, value in stated.items()}
    elif (folder / _PEFT_FILE).exists():
        path, prefixes = folder / _PEFT_FILE, _PEFT_PARTS
        config = folder / "adapter_config.json"
        if not config.exists():
            raise ValueError(f"{path} needs the adapter_config.json it was saved with: only that one states its alpha")
        stated = read_json(config, "save the LoRA again", finite=False)
    else:
        raise ValueError(f"no LoRA in {folder}: looked for {LORA_FILE} (diffusers) and {_PEFT_FILE} (PEFT, flow_grpo)")
    return path, prefixes, stated


def _read_one(folder: Path) -> tuple[dict[str, Tensor], float]:
    """The LoRA of one network; see `read_lora`."""
    path, prefixes, stated = _stated(folder)
    refused = [key for key in ("alpha_pattern", "rank_pattern") if stated.get(key)]
    refused += ["use_rslora with use_dora"] if stated.get("use_rslora") and stated.get("use_dora") else []
    if refused:
        raise ValueError(
            f"the LoRA in {folder} uses {', '.join(refused)}: only a LoRA, rsLoRA or DoRA of one rank and alpha is read"
        )
    with _safetensors(path):
        tensors = {portable_name(_without(prefixes, name)): tensor for name, tensor in load_file(path).items()}
    rank = next((tensor.shape[0] for name, tensor in tensors.items() if "lora_A" in name and tensor.ndim > 1), 0)
    if not rank:
        raise ValueError(f"{path} holds no LoRA: none of its {len(tensors)} tensors is a matrix named lora_A")
    alpha = stated.get("lora_alpha", rank)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < float("inf"):
        raise ValueError(f"the LoRA in {folder} states lora_alpha {alpha!r}: it must be a number above 0")
    return tensors, alpha


@contextmanager
def _safetensors(path: Path) -> Iterator[None]:
    """Says which file it was that could not be read."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}): it is damaged or cut short, get or save it again"
        ) from error


def _without(prefixes: Sequence[str], name: str) -> str:
    """A name without the one of these prefixes that it starts with."""
    return next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), name)


def _read_experts(folder: Path) -> tuple[dict[str, Tensor], float]:
    """The LoRA of a model of two experts: the second one's file lies in a folder of its own, under equal names.

    Raises:
        ValueError: the two differ in alpha or variant.
    """
    both, alphas, variants = dict[str, Tensor](), set[float](), set[str]()
    for expert, place in (("transformer", folder), ("transformer_2", folder / "transformer_2")):
        tensors, alpha = _read_one(place)
        both |= {f"{expert}.{name}": tensor for name, tensor in tensors.items()}
        alphas.add(alpha)
        variants.add(lora_variant(place))
    if len(alphas) > 1:
        raise ValueError(f"the LoRAs of the two experts in {folder} have alphas {sorted(alphas)}: only one is read")
    if len(variants) > 1:
        raise ValueError(
            f"the LoRAs of the two experts in {folder} are {' and '.join(sorted(variants))}: train them alike"
        )
    return both, alphas.pop()


def check_same(wanted: Mapping[str, Tensor], given: Mapping[str, Tensor], what: str = "the saved LoRA") -> None:
    """Refuses tensors of other names or shapes than those wanted.

    Raises:
        ValueError: says what differs, and what to set.
    """
    missing, extra = sorted(wanted.keys() - given.keys()), sorted(given.keys() - wanted.keys())
    if missing or extra:
        raise ValueError(
            f"{what} does not fit this policy: {len(missing)} tensors missing (first: {missing[:1]}), {len(extra)} "
            f"unknown (first: {extra[:1]}). Set policy.target_modules to the layers that it was trained on"
        )
    for name, tensor in wanted.items():
        if tensor.shape != given[name].shape:
            narrow = min(tensor.shape) != min(given[name].shape)
            raise ValueError(
                f"{what} has shape {tuple(given[name].shape)} at {name}, this policy {tuple(tensor.shape)}: "
                f"{'set policy.lora_rank to its rank' if narrow else 'it was trained on another model'}"
            )


def refuse_not_finite(tensors: Mapping[str, Tensor], what: str, advice: str) -> None:
    """Refuses weights that draw nothing.

    Raises:
        ValueError: a tensor holds NaN or infinity.
    """
    if broken := next((name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())), None):
        raise ValueError(
            f"{what} holds NaN or infinity ({broken}): the run that wrote it had diverged, or the file is damaged; "
            f"{advice}"
        )


def add_saved_lora(network: nn.Module, folder: Path) -> Policy:
    """Adds the LoRA of a folder to a network, with the rank, alpha and layers it was saved with.

    Raises:
        ValueError: no LoRA there, or it does not bind to this network.
    """
    rank, alpha, targets = lora_shape(folder)
    policy = Policy(network, rank=rank, alpha=alpha, targets=targets, seed=0, variant=lora_variant(folder))
    policy.initialise_from(folder)
    return policy


def lora_ready_for_diffusers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Trained tensors renamed to PEFT's portable names, on the CPU, as `save_lora_weights` expects them."""
    return {portable_name(name): tensor.detach().float().cpu().contiguous() for name, tensor in tensors.items()}


def portable_name(name: str) -> str:
    """PEFT's portable name of a trained tensor: without the adapter's; of a magnitude without "weight" too."""
    name = name.replace(f".{ADAPTER}.", ".")
    return name.removesuffix(".weight") if _MAGNITUDE in name else name
