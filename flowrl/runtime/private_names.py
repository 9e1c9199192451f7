"""Every private or undocumented name of other libraries that flowrl uses; no other file uses one.

Names that are imported stand in `NAMES` and are imported from here, when the importing file is, so that this file loads
none of them. Members of foreign objects stand in `MEMBERS` and are read and written by the functions below. Both are
tables of `private_names.json`, which says why each is needed. If a release no longer has one, the error names the
releases that do. A test looks each up in what is installed, and looks for private names elsewhere.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from flowrl.runtime.files import read_json
from flowrl.runtime.versions import TESTED, numbers, version_of

if TYPE_CHECKING:
    from argparse import ArgumentParser, _ActionsContainer

    from torch import Tensor, nn
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

    ActionsContainer = _ActionsContainer


@dataclass(frozen=True)
class Private:
    """A private name of another library, and what it is for."""

    path: str
    """"module:name", "module:name.member", "module:Class().member" or "module:function(parameter)"."""
    why: str
    """What flowrl does with it that no public name does."""
    since: str | None = None
    """The oldest release with it among those of `LOOKED_AT`; None is all of them."""

    @property
    def library(self) -> str:
        """The package to install."""
        return self.path.partition(":")[0].partition(".")[0]

    @property
    def member(self) -> str:
        """Its last part."""
        return self.path.rpartition(":")[2].rpartition(".")[2]


LOOKED_AT: Mapping[str, str] = {"diffusers": "0.36.0", "peft": "0.17.1", "torch": "2.11.0"}
"""The oldest release in which the names here were looked up; the newest is that of `flowrl.runtime.versions.TESTED`."""

_TABLES = read_json(Path(__file__).with_suffix(".json"))
NAMES: Mapping[str, Private] = {name: Private(**row) for name, row in _TABLES["names"].items()}
"""What can be imported from here, by the name that it has here."""

MEMBERS = tuple(Private(**row) for row in _TABLES["members"])
"""What the functions below read, write or replace."""

COMPILER = "torch._dynamo"
"""The module whose import takes seconds; a plan does without (`flowrl.planning.light_libraries`)."""
SIZES = "torch.fx.experimental.symbolic_shapes"
"""The module that torch asks what is known of sizes, which takes SymPy with it; likewise."""
NOTES: Mapping[str, str] = _TABLES["notes"]
"""What torch and diffusers say, by logger, wherever torchao is installed, of classes of it that nothing here uses."""
LIGHT_MODULES: Sequence[str] = _TABLES["light_modules"]
"""What a plan needs of torch and diffusers, each imported once while heavy packages are absent."""


def __getattr__(name: str) -> Any:
    """A name of `NAMES`, when it is imported from here."""
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found(NAMES[name])


def found(private: Private) -> Any:
    """What a private name stands for in the installed release; a parameter's default for "function(parameter)". Raises
    ValueError: it is gone; says which releases have it."""
    module, _, names = private.path.partition(":")
    names, _, parameter = names.partition("(") if names.endswith(")") else (names, "", "")
    parameter = parameter.rstrip(")")
    try:
        value: Any = importlib.import_module(module)
        for name in names.split(".") if names else ():
            member = name.removesuffix("()")
            kinds = getattr(value, "__mro__", ())
            declared = any(member in getattr(kind, "__annotations__", ()) for kind in kinds)  # of its instances
            value = getattr(value, member, None) if declared else getattr(value, member)
            value = value() if name.endswith("()") else value
        return inspect.signature(value).parameters[parameter].default if parameter else value  # type: ignore[arg-type]
    except (ImportError, AttributeError, KeyError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == private.library:
            raise
        raise ValueError(gone(private, version_of(private.library))) from error


def gone(private: Private, installed: str | None) -> str:
    """What is said of a name that the installed release does not have."""
    since = private.since or LOOKED_AT.get(private.library, "3.11")
    newest = TESTED[private.library][1] if private.library in TESTED else since
    had = f"{private.library} {since} to {newest} have it"
    if installed is not None and numbers(installed) < numbers(since):
        had += ", earlier ones do not"
    elif installed is not None and numbers(newest) < numbers(installed):
        had += f", so that it was moved after {newest}, by {installed} at the latest"
    return (
        f"{private.library} {installed or '(not installed)'} has no {private.path}, needed by flowrl ({private.why}): "
        f"{had}; install '{private.library}>={since},<={newest}'"
    )


# ---- diffusers -------------------------------------------------------------------------------------------------------


def set_backend(processor: Any, backend: Any) -> None:
    """Sets the kernel of one attention processor that `ReadsBackend`."""
    processor._attention_backend = backend


def set_parallel(processor: Any, parallel: Any) -> None:
    """Tells one attention processor that `ReadsParallel` that tokens are split."""
    processor._parallel_config = parallel


def share_mesh(settings: Any, mesh: Any) -> None:
    """Gives a `ContextParallelConfig` what its own `setup` finds in a mesh of the whole world."""
    settings._flattened_mesh = settings._ulysses_mesh = mesh


def mesh_of(parallel: Any) -> Any:
    """The mesh that was given to a `ParallelConfig`."""
    return parallel.context_parallel_config._ulysses_mesh


def share_attention(attend: Callable[..., Tensor]) -> None:
    """Puts a function in place of diffusers' attention of split tokens, for this process."""
    dispatch: Any = importlib.import_module("diffusers.models.attention_dispatch")
    dispatch._templated_context_parallel_attention = attend


def split_plan(network: Any) -> Mapping[str, Any]:
    """Where a network's tokens are split and joined."""
    return network._cp_plan


def repeated_classes(network: Any) -> tuple[str, ...]:
    """Names of the classes of the blocks that a network repeats."""
    return tuple(network._repeated_blocks)


def can_checkpoint(network: Any) -> bool:
    """Whether a network can recompute its blocks."""
    return bool(network._supports_gradient_checkpointing)


def kept_in_float32(network: Any) -> tuple[str, ...]:
    """Names of the parts of a class of networks that stock keeps in float32."""
    return tuple(network._keep_in_fp32_modules or ())


def part_types(stock: Any) -> Mapping[str, tuple[Any, ...]]:
    """Classes that the parts of a stock pipeline may be of, by their names."""
    return stock._get_signature_types()


def sana_instruction(stock: str = "SanaPipeline") -> list[str]:
    """Lines that the call of a stock class of Sana puts before every prompt."""
    return list(found(next(entry for entry in MEMBERS if entry.path.startswith(f"diffusers:{stock}."))))


# ---- PEFT ------------------------------------------------------------------------------------------------------------


def register_layers(config: Any, layers: Mapping[type, type]) -> None:
    """Has PEFT put layers of one's own around those of a kind, and look for bitsandbytes' only where it is loaded."""
    config._register_custom_module(layers)
    model: Any = importlib.import_module("peft.tuners.lora.model")  # it would load it: more than a second
    model.is_bnb_available = model.is_bnb_4bit_available = lambda: "bitsandbytes.nn" in sys.modules


def adapter_names(layer: Any) -> set[str]:
    """Names of all adapters of a layer."""
    return set(layer._get_available_adapters())


def switch_adapters(layer: Any, *, off: bool) -> None:
    """Switches the adapters of a layer; PEFT's own flips requires_grad too and costs tens of milliseconds a network."""
    layer._disable_adapters = off


def choose_adapters(layer: Any, names: Iterable[str] | str) -> None:
    """Says which adapters of a layer are at work, as `active_adapter` gives it."""
    layer._active_adapter = names if isinstance(names, str) else list(names)


# ---- torch -----------------------------------------------------------------------------------------------------------


def own_tensors(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The dictionaries of a module's own parameters and of its own buffers, which may be written."""
    return module._parameters, module._buffers  # type: ignore[return-value]


def times_written(tensor: Tensor) -> int:
    """Grows with every operation in place on a tensor."""
    return tensor._version


def storage_key(tensor: Tensor) -> int:
    """Equal for tensors that share their memory, as long as one of them lives."""
    return int(tensor.untyped_storage()._cdata)


def operation_of(func: Any) -> Any:
    """The operation that an overload which torch dispatches belongs to."""
    return func._overloadpacket


def writes(func: Any) -> bool:
    """Whether an overload writes to one of its arguments."""
    return bool(func._schema.is_mutable)


def products_by_dtype() -> dict[str, bool]:
    """Whether the instructions of this CPU multiply the two dtypes of 16 bits."""
    import torch

    ops = torch.ops.mkldnn
    return {"bfloat16": ops._is_mkldnn_bf16_supported(), "float16": ops._is_mkldnn_fp16_supported()}


def rounding_options() -> dict[str, Any]:
    """Options of the compiler that have it round where eager code does."""
    return {"emulate_precision_casts": True}


def forget_disabled(function: Any) -> None:
    """Forgets what torch's operators keep of a compiler that was told to stay away."""
    delattr(function, "__dynamo_disable")


# ---- Python ----------------------------------------------------------------------------------------------------------


def flags_of(parser: ArgumentParser) -> list[str]:
    """All flags of a parser."""
    return list(parser._option_string_actions)


def names_of(parser: ArgumentParser) -> dict[str, str]:
    """Where a parser keeps each value -> its flag, or what stands for a value without one."""
    return {
        one.dest: one.option_strings[-1] if one.option_strings else str(one.metavar or one.dest)
        for one in parser._actions
    }


@runtime_checkable
class ReadsBackend(Protocol):
    """A processor that goes through diffusers' dispatcher, by a backend of its own."""

    _attention_backend: Any


@runtime_checkable
class ReadsParallel(Protocol):
    """A processor that says to its kernel whether tokens are split: not in attention to a prompt that all have."""

    _parallel_config: Any
