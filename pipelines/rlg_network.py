"""Base and tuned networks for reinforcement learning guidance: one set of weights whose LoRA adapters go on and off.

Two calls, each under its adapters, give the base and the tuned output of one latent. One call of both sets
of rows, with the LoRA masked or left out for the base's, was measured too and is not faster: see `docs/rlg.md`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from peft import LoraConfig
from torch import Tensor, nn

from flowrl.pipelines.arithmetic.lora_linear import add_lora
from flowrl.pipelines.weights.lora import VARIANTS, Policy, portable_name, refuse_other_network
from flowrl.pipelines.weights.lora_files import read_lora
from flowrl.pipelines.weights.lora_names import Stock
from flowrl.pipelines.weights.trained_weights import check_same
from flowrl.runtime.private_names import BaseTunerLayer, adapter_names, choose_adapters, switch_adapters
from flowrl.samplers.guidance import Network
from flowrl.trajectory import Conditioning


def adapter_layers(network: nn.Module) -> list[BaseTunerLayer]:
    """The layers of a network that carry adapters."""
    return [module for module in network.modules() if isinstance(module, BaseTunerLayer)]


def adapters_of(layers: Sequence[BaseTunerLayer]) -> list[str]:
    """Names of all adapters that these layers carry, in alphabetical order."""
    return sorted({name for layer in layers for name in adapter_names(layer)})


def active_adapters(layers: Sequence[BaseTunerLayer]) -> list[str]:
    """Names of the active adapters, in order."""
    return list(dict.fromkeys(n for layer in layers if not layer.disable_adapters for n in layer.active_adapters))


@contextmanager
def acting(layers: Sequence[BaseTunerLayer], names: Sequence[str]) -> Iterator[None]:
    """Inside, exactly these adapters are active, each with its own weight; none means the network without adapters.
    Costs microseconds per layer: PEFT's own switches also flip requires_grad of every tensor; this does not."""
    before = [(layer.active_adapter, layer.disable_adapters) for layer in layers]
    try:
        for layer in layers:
            switch_adapters(layer, off=not names)
            if names:
                choose_adapters(layer, names)
        yield
    finally:
        for layer, (active, off) in zip(layers, before, strict=True):
            choose_adapters(layer, active)
            switch_adapters(layer, off=off)


def add_adapter(network: nn.Module, place: Path, name: str, stock: Stock | None = None) -> None:
    """Adds the LoRA of a file, a folder or a run under a name, beside those the network has; for sampling alone.
    Adapters may differ in rank, alpha, variant and layers. Weights are float32, whatever the base's dtype. A name has
    no dot and is not yet in use. Raises ValueError: the name is in use, or no LoRA binds to this network."""
    if "." in name or name in adapters_of(adapter_layers(network)):
        raise ValueError(f"an adapter's name must be new and without a dot, got {name!r}")
    lora = read_lora(place, stock)
    refuse_other_network(network, lora)
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.layers, **VARIANTS[lora.variant])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`", UserWarning)  # several adapters are meant
        add_lora(network, config, name)
    own = {
        portable_name(key.replace(f".{name}.", ".")): parameter
        for key, parameter in network.named_parameters()
        if "lora_" in key and f".{name}." in key
    }
    check_same(own, lora.tensors, what=f"the LoRA in {place}")
    for key, parameter in own.items():
        parameter.requires_grad_(False)
        parameter.data = lora.tensors[key].to(parameter.device).float()


def adapter_network(network: Network, layers: Sequence[BaseTunerLayer], names: Sequence[str]) -> Network:
    """A network that runs with exactly these adapters."""
    return _within(network, lambda: acting(layers, names))


def slot_network(network: Network, policy: Policy, slot: str) -> Network:
    """A network that runs under a weight slot of its policy ("reference", "policy", "ema", ...). Raises ValueError at
    the first call, if there is no such slot."""
    return _within(network, lambda: policy.under(slot))


def _within(network: Network, state: Callable[[], AbstractContextManager[None]]) -> Network:
    def under(x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        with state():
            return network(x, timestep, cond)

    return under
