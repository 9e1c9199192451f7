"""Cases: LoRA files of other programs, and what each layer does with them, against `W + s B A`, peft and stock."""

from __future__ import annotations

import functools
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from tiny_folders import SETTINGS, save_tiny
from tiny_wan import save_tiny_wan
from torch import Tensor, nn
from unlisted_case import Case, Outcome, Silent, refused, right

from flowrl.pipelines import family, stock_of
from flowrl.pipelines.weights.lora import add_saved_lora

Tensors = dict[str, Tensor]
Q, K, OUT = (f"transformer_blocks.0.attn.{name}" for name in ("to_q", "to_k", "to_out.0"))
UNET = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
ON_UNET: Any = {"layers": (UNET, UNET.replace("to_q", "to_out.0")), "family": "sd"}
"""diffusers reads kohya's names of UNets; of SD3's own layers nobody has them."""
_ROOM = tempfile.TemporaryDirectory()
RANK = 4


@functools.cache
def model_of(name: str) -> Path:
    folder = Path(_ROOM.name) / name
    return save_tiny_wan(folder, "t2v-a14b") if name == "wan" else save_tiny(name, folder)


@functools.cache
def loaded(name: str) -> Any:
    known: Any = family(name)
    return known.load(str(model_of(name)), dtype=torch.float32, **SETTINGS.get(name, {}))


def fresh(name: str) -> nn.Module:
    """The family's denoiser as it is in its folder."""
    known, model = family(name), str(model_of(name))
    network = known.meta_denoiser(model)
    assert network is not None
    network = network.to_empty(device="cpu")
    network.load_state_dict(loaded(name).denoiser.state_dict())
    return network.requires_grad_(False)


def pair(network: nn.Module, layer: str, rank: int = RANK, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A and B of a layer."""
    module: Any = network.get_submodule(layer)
    generator = torch.Generator().manual_seed(seed + len(layer))
    return torch.randn(rank, module.in_features, generator=generator), torch.randn(
        module.out_features, rank, generator=generator
    )


@torch.no_grad()
def added(network: nn.Module, layer: str, base: nn.Module) -> Tensor:
    """What a layer does beyond the base's, `[out, in]`."""
    module: Any = network.get_submodule(layer)
    plain: Any = base.get_submodule(layer)
    one = torch.eye(plain.in_features)
    return (module(one) - plain(one)).T


@dataclass(frozen=True)
class File:
    """A file of tensors: `write` gives them of pairs by layer; `wanted` is what each layer has to get, or None
    where the file has to be refused in some words."""

    name: str
    write: Callable[[dict[str, tuple[Tensor, Tensor]]], Tensors]
    wanted: float | Callable[[dict[str, tuple[Tensor, Tensor]]], Tensors] | None = None
    words: tuple[str, ...] = ()
    may: bool = False
    """Whether to refuse is right too."""
    layers: tuple[str, ...] = (Q, OUT)
    rank: int = RANK
    family: str = "sd3"
    notes: dict[str, str] = field(default_factory=dict)
    card: Any = None
    within: float = 2e-5
    file: str = "style.safetensors"

    def run(self, folder: Path) -> Outcome:
        base = loaded(self.family).denoiser
        pairs = {layer: pair(base, layer, self.rank) for layer in self.layers}
        own = {key: tensor.clone().contiguous() for key, tensor in self.write(pairs).items()}
        place = folder / self.file
        if place.suffix == ".safetensors":
            save_file(own, place, metadata=self.notes or None)
        else:
            torch.save(own, place)
        if self.card is not None:
            (folder / "adapter_config.json").write_text(json.dumps(self.card))
        network = fresh(self.family)
        try:
            add_saved_lora(network, place, stock_of(self.family, str(model_of(self.family))))
        except ValueError as error:
            if self.wanted is None or self.may:
                return refused(1, str(error), *self.words)
            raise Silent(f"refused, and it is right: {error}") from error
        if self.wanted is None:
            raise Silent("taken without a word")
        scale = self.wanted
        wanted = scale(pairs) if callable(scale) else {k: scale * b @ a for k, (a, b) in pairs.items()}
        worst = 0.0
        for layer, change in wanted.items():
            worst = max(
                worst, float((added(network, layer, base) - change).abs().max() / change.abs().max().clamp(min=1e-9))
            )
        lora = {n.partition(".lora_")[0] for n, _ in network.named_parameters() if ".lora_" in n}
        if lora - wanted.keys():
            raise Silent(f"also changes {sorted(lora - wanted.keys())[:3]}")
        return right(worst, 0, within=self.within, what="largest difference, of the largest value,")


# ---- ways to write one -----------------------------------------------------------------------------------------------

Pairs = dict[str, tuple[Tensor, Tensor]]


def peft(pairs: Pairs, prefix: str = "transformer.", end: str = ".weight") -> Tensors:
    return {f"{prefix}{k}.lora_{s}{end}": t for k, both in pairs.items() for s, t in zip("AB", both, strict=True)}


def kohya(pairs: Pairs, prefix: str = "lora_unet_", **more: Any) -> Tensors:
    found: Tensors = {}
    for layer, (a, b) in pairs.items():
        stem = prefix + layer.replace(".", "_")
        found |= {f"{stem}.lora_down.weight": a, f"{stem}.lora_up.weight": b}
        found |= {f"{stem}.{key}": value(a, b) if callable(value) else value for key, value in more.items()}
    return found


def also(write: Callable[[Pairs], Tensors], **more: Tensor) -> Callable[[Pairs], Tensors]:
    """More tensors; two underscores in a name stand for a dot."""
    return lambda pairs: write(pairs) | {k.replace("__", "."): t for k, t in more.items()}


def alpha(value: Any) -> Callable[[Pairs], Tensors]:
    return lambda pairs: kohya(pairs, alpha=value)


def cast(dtype: torch.dtype) -> Callable[[Pairs], Tensors]:
    return lambda pairs: {k: t.to(dtype) for k, t in peft(pairs).items()}


def rounded(dtype: torch.dtype) -> Callable[[Pairs], Tensors]:
    return lambda pairs: {k: b.to(dtype).float() @ a.to(dtype).float() for k, (a, b) in pairs.items()}


def put(value: float) -> Callable[[Pairs], Tensors]:
    def write(pairs: Pairs) -> Tensors:
        found = peft(pairs)
        found[f"transformer.{Q}.lora_A.weight"].view(-1)[0] = value
        return found

    return write


def turned(pairs: Pairs) -> Tensors:
    """A and B in each other's place."""
    return {
        k.replace("lora_A", "x").replace("lora_B", "lora_A").replace("x", "lora_B"): t for k, t in peft(pairs).items()
    }


def transposed(pairs: Pairs) -> Tensors:
    return {k: t.T for k, t in peft(pairs).items()}


def halves(pairs: Pairs, *drop: str) -> Tensors:
    return {k: t for k, t in peft(pairs).items() if not k.endswith(drop)}


def two_alphas(pairs: Pairs) -> Tensors:
    found = kohya(pairs)
    return found | {
        f"lora_unet_{k.replace('.', '_')}.alpha": torch.tensor(float(2 + 6 * n)) for n, k in enumerate(pairs)
    }


def two_alphas_do(pairs: Pairs) -> Tensors:
    return {k: (2 + 6 * n) / RANK * b @ a for n, (k, (a, b)) in enumerate(pairs.items())}


def magnitudes_of_one(pairs: Pairs) -> Tensors:
    """What a DoRA adds whose magnitudes are 1: rows of W + B A of length 1, less W."""
    found: Tensors = {}
    for layer, (a, b) in pairs.items():
        base: Any = loaded("sd3").denoiser.get_submodule(layer)
        whole = base.weight + b @ a
        found[layer] = whole / whole.norm(dim=1, keepdim=True) - base.weight
    return found


def noted(**stated: Any) -> dict[str, str]:
    return {"lora_adapter_metadata": json.dumps({f"transformer.{key}": value for key, value in stated.items()})}


def fused(pairs: Pairs) -> Tensors:
    """SD3 as the original code fuses q, k and v (kohya, ComfyUI)."""
    a, b = pairs[Q]
    return {"lora_unet_joint_blocks_0_x_block_attn_qkv.lora_down.weight": a,
            "lora_unet_joint_blocks_0_x_block_attn_qkv.lora_up.weight": torch.cat([b, 2 * b, 3 * b])}  # fmt: skip


def flux_fused(pairs: Pairs) -> Tensors:
    """FLUX's q, k and v as sd-scripts train them, with one A."""
    [(a, b)], stem = pairs.values(), "lora_unet_double_blocks_0_img_attn_qkv"
    whole = torch.cat([b, 2 * b, 3 * b])
    return {f"{stem}.lora_down.weight": a, f"{stem}.lora_up.weight": whole, f"{stem}.alpha": torch.tensor(2.0)}


def flux_fused_does(pairs: Pairs) -> Tensors:
    [(a, b)] = pairs.values()
    return {f"transformer_blocks.0.attn.to_{one}": 0.5 * n * b @ a for n, one in enumerate("qkv", 1)}


CARD = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "target_modules": ["to_q", "to_out.0"]}
PEFT_FILE = "adapter_model.safetensors"
Plain = Callable[[Pairs], Tensors]


def prefixed(prefix: str) -> Plain:
    return lambda pairs: peft(pairs, prefix)


def ended(end: str) -> Plain:
    return lambda pairs: peft(pairs, end=end)


def unet(pairs: Pairs) -> Tensors:
    return kohya(pairs, alpha=torch.tensor(2.0))


CONV = "down_blocks.0.resnets.0.conv1"
PROJ = "down_blocks.0.attentions.0.proj_in"


def conv(side: int, layer: str, wide: tuple[int, int]) -> Plain:
    def write(pairs: Pairs) -> Tensors:
        stem = f"lora_unet_{layer.replace('.', '_')}"
        return kohya(pairs) | {f"{stem}.lora_down.weight": torch.ones(RANK, wide[0], side, side),
                               f"{stem}.lora_up.weight": torch.ones(wide[1], RANK, 1, 1)}  # fmt: skip

    return write


def folded(pairs: Pairs) -> Tensors:
    """Linear layers as convolutions of 1 x 1, as sd-scripts wrote those of Stable Diffusion 1."""
    return {k: t[:, :, None, None] if t.ndim == 2 else t for k, t in kohya(pairs).items()}


FILES = (
    # what names look like
    File("DDP's module. before all", prefixed("module.transformer."), 1.0),
    File("module. within PEFT's prefix", prefixed("module.base_model.model."), 1.0),
    File("_orig_mod. within", lambda p: {k.replace(".attn", "._orig_mod.attn"): t for k, t in peft(p).items()}, 1.0),
    File("_fsdp_wrapped_module. within", lambda p: {k.replace(".attn", "._fsdp_wrapped_module.attn"): t for k,
           t in peft(p).items()},
         1.0, ("_fsdp_wrapped_module",), may=True),
    File("_checkpoint_wrapped_module. within", lambda p: {k.replace(".attn", "._checkpoint_wrapped_module.attn"): t
         for k, t in peft(p).items()}, 1.0, ("_checkpoint_wrapped_module",), may=True),
    File("accelerate's model. before all", prefixed("model.transformer."), 1.0, ("model.transformer",), may=True),
    File("pipe.transformer. before all", prefixed("pipe.transformer."), 1.0, ("pipe.transformer",), may=True),
    File("dit. before all", prefixed("dit."), 1.0, ("dit.",), may=True),
    File("base_model.model.transformer.", prefixed("base_model.model.transformer."), 1.0),
    File("an adapter's name", ended(".default.weight"), 1.0),
    File("an adapter's name of two words with a dot", ended(".my.style.weight"), 1.0, ("my",), may=True),
    File("an adapter's name without weight", ended(".default"), 1.0, ("default|no LoRA",), may=True),
    File("an adapter that is called weight", ended(".weight.weight"), 1.0, ("weight",), may=True),
    File("two adapters", lambda p: peft(p, end=".a.weight") | peft(p, end=".b.weight"), None, ("2 adapters", "a, b")),
    File("an adapter beside plain names", lambda p: peft(p) | {k: t + 1 for k, t in peft(p, end=".b.weight").items()},
           None, ("b",)),
    File("transformer. beside bare names, different", lambda p: peft(p) | {k: t + 1 for k, t in peft(p, "").items()},
           None,
         ("twice|two|same",)),
    File("capitals", lambda p: {k.replace("lora_A", "lora_a").replace("lora_B", "lora_b"): t for k,
           t in peft(p).items()}, 1.0,
         ("lora_a|no LoRA",), may=True),
    File("lora.A and lora.B", lambda p: {k.replace("lora_", "lora."): t for k, t in peft(p).items()}, 1.0, ("lora",),
           may=True),
    File("the policy's slots of ema beside", lambda p: peft(p) | {f"ema.{k}": t + 1 for k, t in peft(p).items()},
           None, ("ema",)),
    File("names that start with unet. on a transformer", prefixed("unet."), 1.0, ("unet",), may=True),
    # numbers
    *(File(f"all in {str(kind)[6:]}", cast(kind), rounded(kind)) for kind in (
        torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)),
    *(File(f"all in {str(kind)[6:]}", cast(kind), None, ("whole numbers|int8|bool|uint8",)) for kind in (
        torch.int8, torch.bool, torch.uint8)),
    File("fp8 with scales beside", also(cast(torch.float8_e4m3fn),
           **{f"transformer.{Q}.lora_A.scale_weight".replace(".", "__"):
         torch.tensor(0.5)}), None, ("scale_weight|nobody knows",)),
    File("complex numbers", cast(torch.complex64), None, ("complex",)),
    *(File(f"{value} in A", put(value), None, ("NaN or infinity",)) for value in (float("nan"), float("inf"),
           float("-inf"))),
    File("NaN in the alpha", alpha(torch.tensor(float("nan"))), None, ("alpha",), **ON_UNET),
    # strengths
    File("alpha a whole number", alpha(torch.tensor(2)), 0.5, **ON_UNET),
    File("alpha of shape [1]", alpha(torch.tensor([2.0])), 0.5, **ON_UNET),
    File("alpha of shape [1, 1]", alpha(torch.tensor([[2.0]])), 0.5, **ON_UNET),
    File("alpha of float16", alpha(torch.tensor(2.5).half()), 0.625, **ON_UNET),
    File("alpha of bfloat16", alpha(torch.tensor(3.0).bfloat16()), 0.75, **ON_UNET),
    File("alpha of several numbers", alpha(torch.ones(RANK)), None, ("alpha",), **ON_UNET),
    File("alpha without numbers", alpha(torch.ones(0)), None, ("alpha",), **ON_UNET),
    File("alpha above the rank", alpha(torch.tensor(64.0)), 16.0, **ON_UNET),
    File("alpha 0", alpha(torch.tensor(0.0)), None, ("alpha",), **ON_UNET),
    File("alpha below 0", alpha(torch.tensor(-4.0)), None, ("alpha",), **ON_UNET),
    File("alphas of layers", two_alphas, two_alphas_do, **ON_UNET),
    File("alpha of a layer that is not there", also(kohya, lora_unet_nothing__alpha=torch.tensor(3.0)), None,
           ("nothing",), **ON_UNET),
    File("alpha beside PEFT's names", lambda p: peft(p) | {f"transformer.{k}.alpha": torch.tensor(2.0) for k in p},
           0.5),
    File("kohya's notes of alpha", peft, 1.0, notes={"ss_network_alpha": "2", "ss_network_dim": "4"}, may=True,
         words=("ss_network_alpha",)),
    File("kohya's notes beside kohya's names", alpha(torch.tensor(2.0)), 0.5, notes={"ss_network_alpha": "2"},
           **ON_UNET),
    File("diffusers' notes", peft, 1.5, notes=noted(r=RANK, lora_alpha=6)),
    File("diffusers' notes, rsLoRA", peft, 3.0, notes=noted(r=RANK, lora_alpha=6, use_rslora=True)),
    File("diffusers' notes with an alpha in quotes", peft, None, ("lora_alpha",), notes=noted(r=RANK, lora_alpha="6")),
    File("diffusers' notes with another rank", peft, 1.5, ("rank",), may=True, notes=noted(r=8, lora_alpha=6)),
    File("diffusers' notes, rank_pattern", peft, 1.5, notes=noted(r=16, lora_alpha=6, rank_pattern={"to_q": RANK,
           "to_out.0": RANK})),
    File("diffusers' notes, alpha_pattern", peft, lambda p: {k: (12 if k == Q else 6) / RANK * b @ a for k, (a,
           b) in p.items()},
         notes=noted(r=RANK, lora_alpha=6, alpha_pattern={"to_q": 12})),
    File("notes that are no JSON", peft, None, ("metadata",), notes={"lora_adapter_metadata": "{"}),
    File("notes of a list", peft, None, ("metadata",), notes={"lora_adapter_metadata": "[1]"}),
    File("notes of a text encoder too", peft, 1.5, notes={"lora_adapter_metadata": json.dumps(
        {"transformer.r": RANK, "transformer.lora_alpha": 6, "text_encoder.lora_alpha": 99})}),
    # cards
    File("PEFT's card", prefixed("base_model.model."), 1.5, card=CARD, file=PEFT_FILE),
    File("PEFT's card, alpha a fraction", prefixed("base_model.model."), 0.375, card=CARD | {"lora_alpha": 1.5},
           file=PEFT_FILE),
    File("PEFT's card, alpha in quotes", prefixed("base_model.model."), None, ("lora_alpha",),
           card=CARD | {"lora_alpha": "6"},
         file=PEFT_FILE),
    File("PEFT's card, alpha null", prefixed("base_model.model."), None, ("lora_alpha",),
           card=CARD | {"lora_alpha": None},
         file=PEFT_FILE),
    File("PEFT's card, use_dora without magnitudes", prefixed("base_model.model."), None, ("magnitude",), card=CARD |
         {"use_dora": True}, file=PEFT_FILE),
    File("PEFT's card of a list", prefixed("base_model.model."), None, ("adapter_config.json",), card=[CARD],
         file=PEFT_FILE),
    File("PEFT's card, rsLoRA in quotes", prefixed("base_model.model."), None, ("use_rslora",),
           card=CARD | {"use_rslora": "false"},
         file=PEFT_FILE),
    File("PEFT's card, alpha_pattern of a text", prefixed("base_model.model."), None, ("alpha_pattern",), card=CARD |
         {"alpha_pattern": "to_q"}, file=PEFT_FILE),
    File("PEFT's card, alpha_pattern with text", prefixed("base_model.model."), None, ("alpha",), card=CARD |
         {"alpha_pattern": {"to_q": "12"}}, file=PEFT_FILE),
    # matrices
    File("rank 0", peft, None, ("rank|empty|no lora",), rank=0),
    File("rank 1", peft, 1.0, rank=1),
    File("rank above the layer's width", peft, 1.0, rank=48, words=("rank",), may=True),
    File("half a pair: no B", lambda p: halves(p, f"{Q}.lora_B.weight"), None, ("lora_B", Q)),
    File("half a pair: no A", lambda p: halves(p, f"{Q}.lora_A.weight"), None, ("lora_A", Q)),
    File("A without any B", lambda p: halves(p, "lora_B.weight"), None, ("lora_B",)),
    File("B without any A", lambda p: halves(p, "lora_A.weight"), None, ("lora_A",)),
    File("A and B in each other's place", turned, None, ("rank|shape|changes one|do not fit",)),
    File("A and B of different ranks", lambda p: peft(p) | {f"transformer.{Q}.lora_A.weight": torch.ones(3, 32)},
           None, ("rank", Q)),
    File("A and B transposed", transposed, None, ("shape|changes one|rank|do not fit",)),
    File("A of one dimension", lambda p: peft(p) | {f"transformer.{Q}.lora_A.weight": torch.ones(32)}, None, (Q,)),
    File("no tensor at all", lambda p: {}, None, ("holds no LoRA|no tensor|0 tensors",)),
    File("a layer that is no linear one", lambda p: peft(p) | peft({"pos_embed.proj": (torch.ones(RANK, 8),
           torch.ones(32, RANK))}),
         None, ("pos_embed.proj",)),
    File("a block that the model has not", lambda p: {k.replace("blocks.0", "blocks.9"): t for k,
           t in peft(p).items()}, None,
         ("blocks.9", "another model")),
    File("a wider model's", lambda p: {k: torch.cat([t, t], int("lora_A" in k)) for k, t in peft(p).items()}, None,
         ("another model", "shape")),
    # beside it
    File("DoRA as kohya spells it", lambda p: kohya(p, dora_scale=lambda a, b: torch.ones(len(b), 1)), None, ("DoRA",
           ), **ON_UNET),
    File("DoRA as diffusers' scripts spelt it", lambda p: peft(p) | {f"transformer.{k}.lora_magnitude_vector.weight":
         torch.ones(len(b)) for k, (_, b) in p.items()}, lambda p: magnitudes_of_one(p)),
    File("magnitudes of one layer alone",
           lambda p: peft(p) | {f"transformer.{Q}.lora_magnitude_vector": torch.ones(32)}, None,
         ("magnitude",)),
    File("whole weights (LyCORIS full)", also(kohya, lora_unet_transformer_blocks_0_ff_net_2__diff=torch.ones(32,
           128)), None, ("diff",)),
    File("a LoKr alone", lambda p: {f"lycoris_{Q.replace('.', '_')}.lokr_w1": torch.ones(2, 2),
           f"lycoris_{Q.replace('.', '_')}.lokr_w2":
         torch.ones(16, 16)}, None, ("LoKr",)),
    File("a LoHa with alpha", lambda p: {f"lora_unet_{Q.replace('.', '_')}.{k}": torch.ones(4, 4) for k in (
        "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "alpha")}, None, ("LoHa",)),
    File("a text encoder alone",
           lambda p: {f"text_encoder.text_model.encoder.layers.0.self_attn.q_proj.lora_{s}.weight": torch.ones(4, 4)
         for s in "AB"}, None, ("text encoder",)),
    File("kohya's text encoder alone",
           lambda p: {f"lora_te_text_model_encoder_layers_0_self_attn_q_proj.lora_{s}.weight":
         torch.ones(4, 4) for s in ("down", "up")}, None, ("text encoder",)),
    File("T5's part (lora_te3_)",
           lambda p: kohya(p) | {f"lora_te3_encoder_block_0_layer_0_SelfAttention_q.lora_{s}.weight":
         torch.ones(4, 4) for s in ("down", "up")}, None, ("text encoder",)),
    File("a trained bias", also(peft, **{f"transformer.{Q}.bias".replace(".", "__"): torch.ones(32)}), None, ("bias",)),
    File("a new norm", also(peft, transformer__norm_out__weight=torch.ones(32)), None, ("norm_out",)),
    File("a step counter", also(peft, global_step=torch.tensor(10)), 1.0, ("global_step",), may=True),
    File("a pickle by its own name", peft, 1.0, file="style.pt"),
    # other models
    File("fused q, k and v of SD3", fused, lambda p: {k: n * p[Q][1] @ p[Q][0] for n, k in enumerate(
        (Q, K, Q.replace("to_q", "to_v")), 1)}, ("joint_blocks",), may=True, layers=(Q,)),
    File("UNet: kohya", unet, 0.5, layers=(UNET,), family="sd"),
    File("UNet: PEFT with unet.", prefixed("unet."), 1.0, layers=(UNET,), family="sd"),
    File("UNet: linear layers as 1 x 1", folded, 1.0, ("convolution",), may=True, layers=(UNET,), family="sd"),
    File("UNet: a convolution of 3 x 3", conv(3, CONV, (16, 16)), None, ("convolution",), layers=(UNET,), family="sd"),
    File("UNet: a convolution of 1 x 1", conv(1, PROJ, (16, 16)), None, ("convolution",), layers=(UNET,), family="sd"),
    File("UNet: of a transformer", lambda p: peft({Q: (torch.ones(4, 32), torch.ones(32, 4))}), None,
           ("another model",),
         layers=(UNET,), family="sd"),
    File("UNet: noise offset beside", also(unet, lora_unet_time_embed_0__diff=torch.ones(2, 2)), None, ("diff",),
           layers=(UNET,),
         family="sd"),
    File("FLUX: BFL's double blocks by PEFT's endings", lambda p: {f"double_blocks.0.img_attn.proj.lora_{s}.weight": t
         for s, t in zip("AB", p["transformer_blocks.0.attn.to_out.0"], strict=True)}, 1.0, ("double_blocks",),
           may=True,
         layers=("transformer_blocks.0.attn.to_out.0",), family="flux"),
    File("FLUX: base_model.model.double_blocks",
           lambda p: {f"base_model.model.double_blocks.0.img_attn.proj.lora_{s}.weight": t
         for s, t in zip("AB", p["transformer_blocks.0.attn.to_out.0"], strict=True)}, 1.0, ("double_blocks",),
           may=True,
         layers=("transformer_blocks.0.attn.to_out.0",), family="flux"),
    File("FLUX: fused q, k and v with alpha", flux_fused, flux_fused_does, layers=("transformer_blocks.0.attn.to_q",),
         family="flux"),
    File("Wan: one of two experts", lambda p: peft({k.removeprefix("transformer."): t for k, t in p.items()}), 1.0,
         ("transformer_2|expert",), may=True, layers=("transformer.blocks.0.attn1.to_q",), family="wan"),
    File("Wan: transformer_2. in the same file", lambda p: {f"{k}.lora_{s}.weight": t for k, both in p.items()
         for s, t in zip("AB", both, strict=True)}, 1.0, ("transformer_2",), may=True,
         layers=("transformer.blocks.0.attn1.to_q", "transformer_2.blocks.0.attn1.to_q"), family="wan"),
)  # fmt: skip


def dora(folder: Path) -> Outcome:
    """PEFT's rsLoRA with DoRA on a base of bfloat16's numbers, against PEFT's own output."""
    base = loaded("sd3").denoiser
    torch.manual_seed(0)
    wrapped: Any = get_peft_model(fresh("sd3"), LoraConfig(  # type: ignore[arg-type]
        r=RANK, lora_alpha=6, target_modules=[Q, OUT], use_dora=True, use_rslora=True,
           init_lora_weights=False))  # fmt: skip
    for name, parameter in wrapped.named_parameters():
        if "magnitude" in name:
            parameter.data *= torch.linspace(0.5, 2, parameter.numel())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped.save_pretrained(str(folder / "style"))
    network = fresh("sd3")
    add_saved_lora(network, folder / "style")
    worst = 0.0
    for layer in (Q, OUT):
        other = added(wrapped.base_model.model, layer, base)
        worst = max(worst, float((added(network, layer, base) - other).abs().max() / other.abs().max()))
    return right(worst, 0, within=2e-5, what="largest difference")


def by_stock(folder: Path) -> Outcome:
    """What diffusers saves of a pipeline with two adapters merged by weights, and reads."""
    pipe: Any = diffusers.DiffusionPipeline.from_pretrained(model_of("sd3"))
    base = loaded("sd3").denoiser
    torch.manual_seed(1)
    pipe.transformer.add_adapter(
        LoraConfig(r=RANK, lora_alpha=6, target_modules=["to_q", "to_v"], init_lora_weights=False), "a"
    )
    from diffusers.utils import convert_state_dict_to_diffusers
    from peft import get_peft_model_state_dict

    own = convert_state_dict_to_diffusers(get_peft_model_state_dict(pipe.transformer, adapter_name="a"))
    card = pipe.transformer.peft_config["a"].to_dict()
    type(pipe).save_lora_weights(folder, transformer_lora_layers=own, transformer_lora_adapter_metadata=card)
    network = fresh("sd3")
    add_saved_lora(network, folder)
    other = added(pipe.transformer, Q, base)
    return right(
        float((added(network, Q, base) - other).abs().max() / other.abs().max()), 0, within=2e-5, what="difference"
    )


def cases() -> Iterator[Case]:
    """Every case of this file."""
    for one in FILES:
        yield Case(f"lora: {one.name} ({one.family})", one.run)
    yield Case("lora: PEFT's rsLoRA with DoRA", dora)
    yield Case("lora: what diffusers saves", by_stock)
