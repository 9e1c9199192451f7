"""The policy: a network's LoRA weights, and named copies that the network can run under.

Slots of one network: `policy` is what is trained, `reference` the network with the LoRA switched off, and any other
slot (`ema`, `old`, ...) a copy of the LoRA tensors. Running under a slot swaps tensors in place or flips the adapters'
own switch, which costs microseconds per layer; the base weights are never touched or merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.pipelines.weights.lora_files import Lora, read_lora
from flowrl.pipelines.weights.lora_names import Stock
from flowrl.pipelines.weights.trained_weights import TrainedWeights, check_same
from flowrl.runtime.placement import gathered
from flowrl.runtime.private_names import switch_adapters
from flowrl.runtime.randomness import counter_normal

ADAPTER = "default"

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


def endings_of(names: Iterable[str]) -> str:
    """Endings of module names, without block numbers, for a message."""
    endings = {".".join(part for part in name.split(".")[-3:] if not part.isdigit()) for name in names}
    return ", ".join(sorted(endings)[:24])


def check_targets(network: nn.Module, targets: Sequence[str], rank: int | None = None) -> None:
    """Refuses LoRA targets that bind to nothing in any copy of a network, and a rank that no layer among them has.

    Targets are name endings, as PEFT takes them: "attn.to_q" fits every module whose name ends in ".attn.to_q". Raises
    ValueError: a target matches no linear layer; names the closest that exist. Or the rank is above the width of every
    layer that would get it, where more of it says nothing more.
    """
    linear = {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear)}
    widest = 0
    for target in targets:
        bound = [module for name, module in linear.items() if f".{name}".endswith(f".{target}")]
        widest = max([widest, *(min(module.in_features, module.out_features) for module in bound)])
        if not bound:
            raise ValueError(
                f"LoRA target {target!r} matches no linear layer of {type(network).__name__}, so nothing would be "
                f"trained there. Layers end in: {endings_of(linear)}"
            )
    if rank is not None and targets and rank > widest:
        raise ValueError(
            f"policy.lora_rank is {rank}, and the widest layer that it is added to has width {widest}: lower it"
        )


class Policy(TrainedWeights):
    """LoRA weights of one network, in float32 whatever the base's dtype; every process holds the whole. `scale` is 1,
    which weights of a LoRA that has not diverged stay near; the largest magnitude at the start of a DoRA."""

    saved = "the saved LoRA"

    def __init__(
        self, network: nn.Module, *, rank: int, alpha: float, targets: Sequence[str], seed: int, variant: str = "lora"
    ) -> None:
        """Adds a LoRA: A is Gaussian with standard deviation 1/rank, drawn from (seed, tensor name), and B zero."""
        from peft import LoraConfig  # takes seconds, which plans and checks avoid

        from flowrl.pipelines.arithmetic.lora_linear import add_lora
        from flowrl.runtime.private_names import LoraLayer

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
            magnitude.data.copy_(torch.linalg.norm(gathered(layer.get_base_layer().weight).float(), dim=1))
            self.scale = max(self.scale, float(magnitude.detach().max()))
        self.slots: dict[str, dict[str, Tensor]] = {}

    def add_lora(self, slot: str, lora: Lora) -> None:
        """Keeps another LoRA under a name in this policy's shapes, with zeros for ranks and layers that it lacks and B
        times its scale over the policy's: the network computes what it would with that LoRA alone. Raises ValueError:
        as `refuse_unheld`; or it is another network's, or not finite."""
        refuse_unheld(lora, rank=self.config["r"], targets=self.config["target_modules"], variant=self.variant)
        refuse_other_network(self.network, lora)
        refuse_not_finite(lora.tensors, f"the LoRA in {lora.place}", "take an earlier one")
        factor = lora.scale / self._layers[0].scaling[ADAPTER]
        self.slots[slot] = {name: torch.zeros_like(parameter.data) for name, parameter in self.parameters.items()}
        for name, held in self.slots[slot].items():
            if (own := lora.tensors.get(portable_name(name))) is not None:
                held[: own.shape[0], : own.shape[1]] = own.float() * (factor if "lora_B" in name else 1)

    def change(self, old: str, new: str) -> None:
        """Slots swap with the policy; the reference is the network with the LoRA off."""
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

    def initialise_from(self, lora: Lora) -> None:
        """Continues from a LoRA that was read. Raises ValueError: it binds to other layers, its variant, rank or alpha
        differ, or it is not finite."""
        from peft import get_peft_model_state_dict

        refuse_other_variant(lora, self.variant)
        refuse_not_finite(lora.tensors, f"the LoRA in {lora.place}", "take an earlier one")
        own = get_peft_model_state_dict(self.network, adapter_name=ADAPTER)
        check_same(own, lora.tensors, what=f"the LoRA in {lora.place}")
        if lora.alpha != self.config["lora_alpha"]:
            raise ValueError(
                f"the LoRA in {lora.place} has alpha {lora.alpha:g}, policy.lora_alpha is {self.config['lora_alpha']}: "
                f"the same weights would act {self.config['lora_alpha'] / lora.alpha:g} times as strongly; set "
                f"policy.lora_alpha={lora.alpha:g}"
            )
        portable = {portable_name(name): parameter for name, parameter in self.parameters.items()}
        for name, parameter in portable.items():
            parameter.data.copy_(lora.tensors[name])


def refuse_other_variant(lora: Lora, variant: str) -> None:
    """Refuses a LoRA that acts differently from the policy's."""
    if lora.variant != variant:
        raise ValueError(
            f"policy.lora_variant is {variant}, and the LoRA in {lora.place} is a {lora.variant}, which acts otherwise "
            f"with the same weights: set policy.lora_variant={lora.variant}"
        )


def refuse_unheld(lora: Lora, *, rank: int, targets: Sequence[str], variant: str) -> None:
    """Refuses a LoRA for which the shapes of a policy's LoRA have no room; the last three are the policy's. Raises
    ValueError: one of the two is a DoRA; its rank is larger; or it is on layers that the policy has none on."""
    what, why = f"the LoRA in {lora.place}", "it is held in the shapes of the policy's LoRA"
    if "dora" in (lora.variant, variant):
        raise ValueError(
            f"{what} is a {lora.variant}, policy.lora_variant is {variant}, and {why}, which have no place for trained "
            "magnitudes: take lora or rslora for both"
        )
    if lora.rank > rank:
        raise ValueError(
            f"{what} has rank {lora.rank}, policy.lora_rank is {rank}, and {why}: set policy.lora_rank={lora.rank}"
        )
    if outside := [layer for layer in lora.layers if not any(f".{layer}".endswith(f".{end}") for end in targets)]:
        raise ValueError(
            f"{what} changes {len(outside)} layers that the policy has no LoRA on ({endings_of(outside)}), and {why}: "
            "name them in policy.target_modules too"
        )


def refuse_other_network(network: nn.Module, lora: Lora) -> None:
    """Refuses a LoRA of another network: of another family, another size, or on layers that are not linear. Any copy of
    the network will do, also one on the meta device, also one of few blocks of which the LoRA has all."""
    from flowrl.runtime.private_names import LoraLayer

    layers = dict(network.named_modules())
    name, all_of_it = type(network).__name__, f"{len(lora.layers)} layers"
    if isinstance(network, nn.ModuleDict):
        name = f"a model of {len(network)} networks ({', '.join(network)})"
    if absent := [layer for layer in lora.layers if layer not in layers]:
        raise ValueError(
            f"the LoRA in {lora.place} is of another model: {len(absent)} of its {all_of_it} are not in {name} (first: "
            f"{absent[0]}); give one that was trained on pipeline.model, or this one in diffusers' form if it is in "
            "another"
        )
    for layer in lora.layers:
        module = layers[layer]
        module = module.get_base_layer() if isinstance(module, LoraLayer) else module
        if not isinstance(module, nn.Linear):
            raise ValueError(
                f"the LoRA in {lora.place} is on {layer}, a {type(module).__name__}: only linear layers are trained"
            )
        wanted = (module.out_features, module.in_features)
        found = (lora.tensors[f"{layer}.lora_B.weight"].shape[0], lora.tensors[f"{layer}.lora_A.weight"].shape[1])
        if found != wanted:
            raise ValueError(
                f"the LoRA in {lora.place} is of another model: {layer} has shape {wanted} in {name}, and the LoRA "
                f"changes one of {found}; give one that was trained on pipeline.model"
            )


def refuse_not_finite(tensors: Mapping[str, Tensor], what: str, advice: str) -> None:
    """Refuses unusable weights. Raises ValueError: a tensor holds NaN or infinity."""
    if broken := next((name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())), None):
        raise ValueError(
            f"{what} holds NaN or infinity ({broken}): the run that wrote it had diverged, or the file is damaged; "
            f"{advice}"
        )


def add_saved_lora(network: nn.Module, place: Path, stock: Stock | None = None) -> Policy:
    """Adds the LoRA of a file, a folder or a run to a network, with the rank, alpha and layers it was saved with.
    Raises ValueError: no LoRA there, or it does not bind to this network."""
    lora = read_lora(place, stock)
    refuse_other_network(network, lora)
    policy = Policy(network, rank=lora.rank, alpha=lora.alpha, targets=lora.layers, seed=0, variant=lora.variant)
    policy.initialise_from(lora)
    return policy


def lora_ready_for_diffusers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Trained tensors renamed to PEFT's portable names, on the CPU, as `save_lora_weights` expects them."""
    return {portable_name(name): tensor.detach().float().cpu().contiguous() for name, tensor in tensors.items()}


def portable_name(name: str) -> str:
    """PEFT's portable name of a trained tensor: without the adapter's; of a magnitude without "weight" too."""
    name = name.replace(f".{ADAPTER}.", ".")
    return name.removesuffix(".weight") if ".lora_magnitude_vector" in name else name
