"""Cases: model folders as other programs leave them, against what stock diffusers makes of them or of the clean one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_folders import SETTINGS
from torch import Tensor
from unlisted_case import Case, Outcome, Silent, refused
from unlisted_model_folders import (
    PROMPT,
    T5,
    Change,
    Folder,
    Q,
    agree,
    at,
    both,
    cast,
    clean,
    cut,
    eight_bit,
    file_of,
    from_other,
    larger_words,
    linked,
    more,
    network,
    noise,
    other_words,
    pickled,
    pieces,
    renamed,
    scheduler,
    setting,
    stock_pipe,
    swapped,
    tensors,
    tied,
    whole,
    wider_t5,
    words,
)

from flowrl.pipelines import family

# ---- the cases -------------------------------------------------------------------------------------------------------

KEYS = (
    Folder("DDP's module. before all of the denoiser", renamed("transformer", "module.{}".format), "base",
           ("transformer", "module."), may=True),
    Folder("_orig_mod. before all of the denoiser", renamed("transformer", "_orig_mod.{}".format), "base",
           ("transformer", "_orig_mod."), may=True),
    Folder("_orig_mod. within each block", renamed("transformer", lambda k: k.replace("blocks.0.",
           "blocks.0._orig_mod.")),
           "base", ("transformer", "_orig_mod.|blocks.0"), may=True),
    Folder("_fsdp_wrapped_module. within", renamed("transformer", lambda k: k.replace(".attn.",
           "._fsdp_wrapped_module.attn.")),
           "base", ("transformer", "attn"), may=True),
    Folder("module. before T5", renamed(T5, "module.{}".format), "base", (T5, "module.|shared"), may=True),
    Folder("module. before CLIP", renamed("text_encoder", "module.{}".format), "base", ("text_encoder",), may=True),
    Folder("module. before the autoencoder", renamed("vae", "module.{}".format), "base", ("vae", "module."), may=True),
    Folder("EMA copies in the file", tensors("transformer", lambda t: t.update(
        {f"ema.{k}": v + 1 for k, v in list(t.items())})), words=("transformer", "ema.")),
    Folder("EMA copies with flat names, as LDM wrote them", tensors("transformer", lambda t: t.update(
        {f"model_ema.{k.replace('.', '')}": v + 1 for k, v in list(t.items())})), words=("transformer", "model_ema")),
    Folder("the optimizer's state in the file", more("transformer", f"exp_avg.{Q}.weight", torch.ones(32, 32)),
           words=("transformer", "exp_avg")),
    Folder("the autoencoder's discriminator", more("vae", "loss.discriminator.main.0.weight", torch.ones(4, 3, 4, 4)),
           "base", ("vae", "loss.discriminator"), may=True),
    Folder("a number of the autoencoder's loss", more("vae", "loss.logvar", torch.zeros(())), "base",
           ("vae", "loss.logvar"), may=True),
    Folder("an empty tensor among weights", more("transformer", "padding", torch.zeros(0)), "base",
           ("transformer", "padding"), may=True),
    Folder("scaled_fp8 of a file that is not scaled", more("transformer", "scaled_fp8",
           torch.zeros(2).to(torch.float8_e4m3fn)),
           "base", ("transformer", "scaled_fp8"), may=True),
    Folder("T5's words under the encoder's name alone", tensors(T5, lambda t: tied(t, alone=True)), "base"),
    Folder("T5's words twice", tensors(T5, tied), "base"),
    Folder("T5's words twice and different", tensors(T5, lambda t: tied(t, differing=True)), "stock", (T5,
           "embed_tokens|shared"),
           may=True),
    Folder("T5 without words", tensors(T5, lambda t: t.pop("shared.weight")), words=(T5, "shared|embed_tokens")),
    Folder("CLIP without its projection", tensors("text_encoder", lambda t: t.pop("text_projection.weight")),
           words=("text_encoder", "text_projection")),
    Folder("T5 without its last norm", tensors(T5, lambda t: t.pop("encoder.final_layer_norm.weight")),
           words=(T5, "final_layer_norm")),
    Folder("an adapter's weights under base_layer", renamed("transformer", lambda k: k.replace("to_q.",
           "to_q.base_layer.")),
           words=("transformer", "base_layer|to_q")),
    Folder("position_ids of CLIP in another order", more("text_encoder", "text_model.embeddings.position_ids",
           torch.arange(15, -1, -1)[None]), "stock", ("text_encoder", "position_ids"), may=True),
)  # fmt: skip
NUMBERS = (
    Folder("denoiser in float64", cast("transformer", torch.float64), "base"),
    Folder("autoencoder in float64", cast("vae", torch.float64), "base"),
    Folder("T5 in float64", cast(T5, torch.float64), "base"),
    Folder("all in bfloat16", both(*(cast(part, torch.bfloat16) for part in ("transformer", "vae", T5))), "stock"),
    Folder("autoencoder in float16, drawn in bfloat16", cast("vae", torch.float16), "stock", within=2e-2,
           options={"dtype": torch.bfloat16}),
    *(Folder(f"{part}: weights of {str(dtype)[6:]}", cast(part, dtype, only), words=(part,))
      for part, only in (("transformer", f"{Q}.weight"), (T5, "SelfAttention.q.weight"), ("vae",
           "encoder.conv_in.weight"))
      for dtype in (torch.int8, torch.uint8, torch.bool, torch.int32)),
    Folder("NaN in the denoiser", at("transformer", f"{Q}.weight", float("nan")), words=("transformer", Q)),
    Folder("infinity in the denoiser", at("transformer", f"{Q}.weight", float("inf")), words=("transformer", Q)),
    Folder("NaN in the autoencoder", at("vae", "decoder.conv_in.weight", float("nan")), words=("vae", "conv_in")),
    Folder("NaN in CLIP", at("text_encoder", "text_projection.weight", float("nan")), words=("text_encoder",
           "projection")),
    Folder("NaN in T5, in a word of no prompt", at(T5, "shared.weight", float("nan")), words=(T5,
           "shared|embed_tokens")),
    Folder("weights above float16's range, drawn in float16", at("transformer", f"{Q}.weight", 1e6),
           words=("transformer",),
           options={"dtype": torch.float16}),
)  # fmt: skip
SCALED = (
    Folder("fp8 e5m2 with a scale", eight_bit(form=torch.float8_e5m2), "base", within=0.1),
    Folder("fp8 with scales of float16 and shape [1]", eight_bit(shape=lambda s: s.half().reshape(1)), "base",
           within=0.05),
    Folder("fp8 with scales of bfloat16", eight_bit(shape=lambda s: s.bfloat16()), "base", within=0.05),
    Folder("fp8 with scales of shape [1, 1]", eight_bit(shape=lambda s: s.reshape(1, 1)), "base", within=0.05),
    Folder("fp8 with a scale for each row, [n]", eight_bit(name="weight_scale", rows=True, shape=lambda s: s[:, 0]),
           "base",
           within=0.05),
    Folder("fp8 in T5's words", eight_bit(T5, only="shared"), "base", within=0.05),
    Folder("fp8 in CLIP, drawn in bfloat16", eight_bit("text_encoder", only="mlp"), "base", within=0.1,
           options={"dtype": torch.bfloat16}),
    Folder("fp8 with scales for blocks", eight_bit(shape=lambda s: s.expand(2, 2).clone()), words=("transformer",
           "scale_weight")),
    Folder("fp8 with scales for halves of rows", eight_bit(rows=True, shape=lambda s: torch.cat([s, s], 1)),
           words=("transformer", "scale_weight")),
    Folder("fp8 with negative scales", eight_bit(times=-1), words=("transformer", "scale_weight")),
    Folder("fp8 with scales that are whole numbers", eight_bit(shape=lambda s: torch.ones((), dtype=torch.int32)),
           "stock", ("transformer", "scale_weight"), may=True),
    Folder("fp8 with a reciprocal scale", eight_bit(name="weight_scale_reciprocal"), words=("transformer",
           "reciprocal")),
    Folder("fp8 with scale_b, as others call it", eight_bit(name="scale"), words=("transformer", ".scale")),
    Folder("a scale of a bias", both(eight_bit(), more("transformer", f"{Q}.scale_bias", torch.ones(()))),
           words=("transformer", "scale")),
    Folder("scales of activations alone", both(cast("transformer", torch.float8_e4m3fn, f"{Q}.weight"),
           more("transformer", f"{Q}.input_scale", torch.ones(()))), "stock", ("transformer", "input_scale"), may=True),
    Folder("int8 with scales, as bitsandbytes has them", both(
        more("transformer", f"{Q}.SCB", torch.ones(32)), cast("transformer", torch.int8, f"{Q}.weight")),
           words=("transformer",)),
    Folder("int8 with weight_scale", both(
        more("transformer", f"{Q}.weight_scale", torch.ones(32)), cast("transformer", torch.int8, f"{Q}.weight")),
        words=("transformer",)),
)  # fmt: skip
FILES = (
    Folder("two pieces", pieces, "base"),
    Folder("an index that names the other piece", partial(pieces, change=lambda a, b, m: m.update(
        dict.fromkeys(a, m[next(iter(b))]))), "base", ("transformer",), may=True),
    Folder("an index that names a piece that is away", partial(pieces, change=lambda a, b, m: m.update(
        {Q: "diffusion_pytorch_model-00003-of-00003.safetensors"})), words=("transformer", "00003")),
    Folder("a key in both pieces, alike", partial(pieces, change=lambda a, b, m: b.update(dict(list(a.items())[:1]))),
           "base"),
    Folder("a key in both pieces, different", partial(pieces, change=lambda a, b, m: b.update(
        {k: t + 1 for k, t in list(a.items())[:1]})), "stock", ("transformer",), may=True),
    Folder("a key that the index names and no piece has", partial(pieces, change=lambda a, b, m: a.pop(next(iter(a)))),
           words=("transformer",)),
    Folder("a piece that is there twice under two names", both(pieces, lambda m: shutil.copy(
        next((m / "transformer").glob("*1-of-*")),
           m / "transformer" / "diffusion_pytorch_model-00001-of-00002 (1).safetensors")),
        "base"),
    Folder("pieces and an older whole file beside them", both(
        lambda m: shutil.copy(file_of(m, "transformer"), m / "old"), pieces,
        lambda m: shutil.move(m / "old", m / "transformer" / "diffusion_pytorch_model.safetensors")), "stock"),
    Folder("a pickle of the denoiser", pickled("transformer", "diffusion_pytorch_model.bin"), "base"),
    Folder("a pickle of T5", pickled(T5, "pytorch_model.bin"), "base"),
    Folder("a pickle with a trainer's state around it", pickled("transformer", "diffusion_pytorch_model.bin",
           wrap=lambda t: {"state_dict": t, "global_step": 3}), words=("transformer",)),
    Folder("a pickle beside safetensors, with other numbers", pickled("vae", "diffusion_pytorch_model.bin", keep=True,
           wrap=lambda t: {k: v + 1 for k, v in t.items()}), "base"),
    Folder("parts that are links", linked("vae", "tokenizer", "transformer"), "base"),
    Folder("files that are links", linked("transformer/diffusion_pytorch_model.safetensors", "vae/config.json",
           "model_index.json"), "base"),
    Folder("a link to nowhere", both(linked("vae/diffusion_pytorch_model.safetensors"),
           lambda m: (m.parent / "away-0").unlink()), words=("vae",)),
    Folder("a file with capitals in its name", lambda m: file_of(m,
           "vae").rename(m / "vae" / "Diffusion_Pytorch_Model.safetensors"),
           words=("vae",)),
    *(Folder(f"{part}: safetensors without notes", tensors(part, lambda t: None, notes=False), "base")
      for part in ("transformer", "text_encoder", "vae")),
    *(Folder(f"{part}: a pointer of git-lfs", whole(part,
           "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
             words=(part,)) for part in ("transformer", T5, "vae")),
    *(Folder(f"{part}: cut short", cut(part), words=(part,)) for part in ("transformer", "text_encoder", "vae")),
    Folder("an empty file of weights", whole("vae", b""), words=("vae",)),
    Folder("a page of HTML for weights", whole("transformer", "<!doctype html><title>401</title>"),
           words=("transformer",)),
    Folder("config.json of a pointer of git-lfs", whole("vae", "version https://git-lfs", "config.json"),
           words=("vae", "config.json")),
    Folder("config.json with a mark of byte order", lambda m: (m / "vae/config.json").write_bytes(
        b"\xef\xbb\xbf" + (m / "vae/config.json").read_bytes()), "base", ("vae", "config.json"), may=True),
)  # fmt: skip
CONFIGS = (
    Folder("fewer layers than weights", network(num_layers=1), words=("transformer", "blocks.0")),
    Folder("more layers than weights", network(num_layers=3), words=("transformer", "blocks.1")),
    Folder("two heads of half the size", network(num_attention_heads=2, attention_head_dim=16), words=("transformer",
           "norm")),
    Folder("other channels", network(in_channels=16), words=("transformer|denoiser", "16")),
    Folder("other patches", network(patch_size=2), words=("transformer",)),
    Folder("a second attention that has no weights", network(dual_attention_layers=[0]), words=("transformer",
           "attn2|norm1")),
    Folder("no norms of queries, which have weights", network(qk_norm=None), words=("transformer", "norm_q|norm_")),
    Folder("a key of a later diffusers", network(a_later_key=3), "base"),
    Folder("no _class_name in a part", network(_class_name="gone"), "base", ("transformer",), may=True),
    Folder("CLIP's heads", setting("text_encoder/config.json", num_attention_heads=2), "stock"),
    Folder("CLIP's activation", setting("text_encoder/config.json", hidden_act="gelu"), "stock"),
    Folder("CLIP's end of text, older number", setting("text_encoder/config.json", eos_token_id=2), "stock"),
    Folder("CLIP with fewer positions", setting("text_encoder/config.json", max_position_embeddings=8),
           words=("text_encoder", "position")),
    Folder("T5's buckets", setting(f"{T5}/config.json", relative_attention_max_distance=4), "stock"),
    Folder("T5 gated", setting(f"{T5}/config.json", feed_forward_proj="gated-gelu", is_gated_act=True,
           dense_act_fn="gelu_new"),
           words=(T5, "wi_")),
    Folder("T5 with one layer less", setting(f"{T5}/config.json", num_layers=0), words=(T5, "block.0")),
    Folder("the autoencoder's scale", setting("vae/config.json", scaling_factor=1.5), "stock"),
    Folder("the autoencoder's shift", setting("vae/config.json", shift_factor=0.3), "stock"),
    Folder("no scale of the autoencoder", setting("vae/config.json", scaling_factor="gone"), "stock"),
    Folder("no shift of the autoencoder", setting("vae/config.json", shift_factor="gone"), "base", ("vae",
           "shift_factor"), may=True),
    Folder("a scale of the autoencoder in quotes", setting("vae/config.json", scaling_factor="1.5"), words=("vae",
           "scaling_factor")),
    Folder("force_upcast off", setting("vae/config.json", force_upcast=False), "base"),
    Folder("the autoencoder's groups of norms", setting("vae/config.json", norm_num_groups=4), "stock"),
    Folder("an autoencoder of other channels", from_other("vae", "sd"), words=("vae|channels|latent",)),
    Folder("T5 of another width", wider_t5, words=(T5 + "|embed|width",)),
    Folder("CLIPs in each other's place", swapped("text_encoder", "text_encoder_2"), "stock"),
    Folder("the SD UNet in place of the denoiser", both(lambda m: shutil.rmtree(m / "transformer"),
           lambda m: shutil.copytree(clean("sd") / "unet", m / "transformer")), words=("transformer|denoiser",)),
    Folder("heads of a UNet", setting("unet/config.json", attention_head_dim=4), "stock", family="sd", within=1e-4),
    Folder("a UNet without its heads", setting("unet/config.json", attention_head_dim="gone"), "stock", ("unet",),
           may=True,
           family="sd", within=1e-4),
    Folder("a UNet's activation", setting("unet/config.json", act_fn="gelu"), "stock", family="sd", within=1e-4),
    Folder("a UNet that keeps half precision's upcast", setting("unet/config.json", upcast_attention=True), "stock",
           family="sd", within=1e-4),
)  # fmt: skip
TOKENS = (
    Folder("a tokenizer of a larger model", words("tokenizer", larger_words), words=("tokenizer",
           "text_encoder|entries|embed")),
    Folder("T5's tokenizer of a larger model", words("tokenizer_3", lambda s: s["model"]["vocab"].__setitem__(
        slice(3, 3), [[f"filler{i}", -9.0] for i in range(600)])), words=("tokenizer_3",)),
    Folder("CLIP's tokenizer in T5's place", other_words("tokenizer_3", "tokenizer"), words=("tokenizer_3",)),
    Folder("T5's tokenizer in CLIP's place", other_words("tokenizer", "tokenizer_3"), "stock", ("tokenizer",),
           may=True),
    Folder("added tokens lost", words("tokenizer", lambda s: s.update(added_tokens=[])), "stock", ("tokenizer",),
           may=True),
    Folder("no post-processor", words("tokenizer", lambda s: s.update(post_processor=None)), "stock", ("tokenizer",),
           may=True),
    Folder("no normaliser", words("tokenizer", lambda s: s.update(normalizer=None)), "stock", ("tokenizer",), may=True),
    Folder("another pad token", setting("tokenizer/tokenizer_config.json", pad_token="!"), "stock"),
    Folder("no pad token", setting("tokenizer/tokenizer_config.json", pad_token="gone"), "stock", ("tokenizer",
           "pad"), may=True),
    Folder("no length", setting("tokenizer/tokenizer_config.json", model_max_length="gone"), words=("tokenizer",
           "length|positions|tokens")),
    Folder("a length above the encoder's", setting("tokenizer/tokenizer_config.json", model_max_length=77),
           words=("tokenizer", "77")),
    Folder("a shorter length", setting("tokenizer/tokenizer_config.json", model_max_length=8), "stock", ("tokenizer",
           ), may=True),
    Folder("another class of tokenizer", setting("tokenizer/tokenizer_config.json", tokenizer_class="GPT2Tokenizer"),
           "stock",
           ("tokenizer",), may=True),
    Folder("a class of tokenizer that nobody has", setting("tokenizer/tokenizer_config.json",
           tokenizer_class="MyTokenizer"),
           "stock", ("tokenizer",), may=True),
    Folder("an added token beyond the embedding", words("tokenizer_3", lambda s: s["added_tokens"].append(
        {"id": 900, "content": "circle", "special": False, "normalized": False, "lstrip": False, "rstrip": False,
         "single_word": False})), words=("tokenizer_3",)),
    Folder("SD: a length above the encoder's", setting("tokenizer/tokenizer_config.json", model_max_length=77),
           words=("tokenizer", "77"), family="sd"),
)  # fmt: skip
NUMBER = {"num_train_timesteps": 500}
LEVELS = (
    *(Folder(f"flow scheduler: {changes}", scheduler(**changes), "stock", words_, may=bool(words_)) for changes,
           words_ in (
        ({"shift": 1.0}, ()), ({"shift": 6}, ()), (NUMBER, ()), ({"shift_terminal": 0.1}, ()),
        ({"use_dynamic_shifting": True}, ("scheduler", "use_dynamic_shifting|mu")),
        ({"use_karras_sigmas": True}, ("scheduler", "use_karras_sigmas")),
        ({"invert_sigmas": True}, ("scheduler", "invert_sigmas")),
        ({"time_shift_type": "linear"}, ("scheduler", "time_shift_type")),
        ({"shift": "3.0"}, ("scheduler", "shift")), ({"shift": 0}, ("scheduler|shift", "shift")),
        ({"shift": None}, ("scheduler|shift", "shift")), ({"shift": -1.0}, ("scheduler|shift", "shift")),
        ({"num_train_timesteps": 1000.5}, ("num_train_timesteps",)), ({"shift": float("nan")}, ("shift",)),
        ({"shift": "gone"}, ()))),
    Folder("flow scheduler: a stochastic one", scheduler(stochastic_sampling=True), words=("scheduler",
           "stochastic_sampling")),
    Folder("flow scheduler: x0 predicted", scheduler(prediction_type="sample"), "stock", ("prediction_type",),
           may=True),
    Folder("flow scheduler: Heun by the index", setting("model_index.json", scheduler=["diffusers",
           "FlowMatchHeunDiscreteScheduler"]),
           words=("scheduler", "FlowMatchHeun")),
    *(Folder(f"diffusion scheduler: {changes}", scheduler(**changes), "stock", words_, may=bool(words_), family="sd",
             within=1e-3) for changes, words_ in (
        ({"beta_schedule": "linear"}, ()), ({"beta_schedule": "squaredcos_cap_v2"}, ()), ({"beta_end": 0.02}, ()),
        ({"prediction_type": "v_prediction"}, ()), ({"prediction_type": "sample"}, ("prediction_type",)),
        ({"prediction_type": "flow_prediction"}, ("prediction_type",)),
        ({"timestep_spacing": "trailing"}, ()), ({"timestep_spacing": "linspace"}, ()), ({"steps_offset": 0}, ()),
        (NUMBER, ()), ({"trained_betas": [0.001 * (1 + i / 100) for i in range(1000)]}, ()),
        ({"rescale_betas_zero_snr": True, "prediction_type": "v_prediction"}, ("rescale_betas_zero_snr|scheduler",)),
        ({"clip_sample": True}, ("clip_sample",)), ({"beta_end": "0.012"}, ("beta_end",)))),
    *(Folder(f"{kind}: {changes}", both(scheduler(**changes), setting("model_index.json", scheduler=["diffusers",
           kind])),
             "stock", words_, may=bool(words_), family="sd", within=1e-3) for kind, changes, words_ in (
        ("DDIMScheduler", {"rescale_betas_zero_snr": True, "prediction_type": "v_prediction", "clip_sample": False,
                           "timestep_spacing": "trailing"}, ()),
        ("DDIMScheduler", {"thresholding": True, "clip_sample": False}, ("thresholding",)),
        ("DDIMScheduler", {}, ("clip_sample",)),
        ("DDPMScheduler", {"variance_type": "learned_range", "clip_sample": False}, ("variance_type|learned",)))),
)  # fmt: skip


# ---- two experts, single files ---------------------------------------------------------------------------------------


def wan_case(change: Change, *names: str) -> Callable[[Path], Outcome]:
    """A model of two experts that has to be refused."""

    def run(folder: Path) -> Outcome:
        model = Path(shutil.copytree(clean("wan"), folder / "model"))
        change(model)
        known: Any = family("wan")
        try:
            known.check(str(model), None)
            known.load(str(model), dtype=torch.float32, **SETTINGS["wan"])
        except ValueError as error:
            return refused(1, str(error), *names)
        raise Silent("taken without a word")

    return run


def boundary(folder: Path) -> Outcome:
    """The share of noise at which the second expert takes over is the index's."""
    model = Path(shutil.copytree(clean("wan"), folder / "model"))
    setting("model_index.json", boundary_ratio=0.45)(model)
    known: Any = family("wan")
    p = known.load(str(model), dtype=torch.float32, **SETTINGS["wan"])
    pipe, x = stock_pipe(model), noise(1, *p.latent_shape)
    cond = p.encode([PROMPT])
    with torch.no_grad():
        embeds, _ = pipe.encode_prompt(PROMPT, None, False, max_sequence_length=16)
        found, wanted = {}, {}
        for time, expert in ((460.0, pipe.transformer), (440.0, pipe.transformer_2)):
            found[str(time)] = p.network(x, torch.tensor([time]), cond)
            wanted[str(time)] = expert(x, torch.tensor([time]), embeds).sample
    return agree(found, wanted, 1e-4)


WAN = (
    ("a key of the second expert alone", more("transformer_2", "blocks.7.attn1.to_q.weight", torch.ones(2)),
           ("transformer_2", "blocks.7")),
    ("the second expert lacks a weight", tensors("transformer_2", lambda t: t.pop("blocks.1.attn1.to_q.weight")),
     ("transformer_2", "blocks.1")),
    ("the second expert's folder is away", lambda m: shutil.rmtree(m / "transformer_2"), ("transformer_2",)),
    ("the second expert has fewer layers", setting("transformer_2/config.json", num_layers=1), ("transformer_2",
           "blocks.1")),
    ("the second expert is the autoencoder", both(lambda m: shutil.rmtree(m / "transformer_2"),
           lambda m: shutil.copytree(
        m / "vae", m / "transformer_2")), ("transformer_2",)),
    ("the second expert is not a number", at("transformer_2", "blocks.0.attn1.to_q.weight", float("nan")),
           ("transformer_2",)),
    ("two experts without boundary", setting("model_index.json", boundary_ratio=None), ("boundary_ratio",)),
    ("a boundary beyond all noise", setting("model_index.json", boundary_ratio=900), ("boundary_ratio",)),
    ("latents_std of another autoencoder", setting("vae/config.json", latents_std=[1.0, 1.0]), ("vae", "latents_std")),
)  # fmt: skip


def single(name: str, make: Callable[[Path], object], *names: str) -> Case:
    def run(folder: Path) -> Outcome:
        from flowrl.pipelines import family_name

        make(folder / "model.safetensors")
        try:
            family_name(None, str(folder / "model.safetensors"))
            family("sd").load(str(folder / "model.safetensors"), dtype=torch.float32)
        except ValueError as error:
            return refused(1, str(error), *names)
        raise Silent("taken without a word")

    return Case(f"single file: {name}", run)


def holding(**own: Tensor) -> Callable[[Path], object]:
    return lambda path: save_file({key.replace("__", "."): tensor for key, tensor in own.items()}, path)


def cases() -> Iterator[Case]:
    """Every case of this file."""
    for room, folders in (("keys", KEYS), ("numbers", NUMBERS), ("scaled", SCALED), ("files", FILES), ("configs",
           CONFIGS),
                          ("tokens", TOKENS), ("levels", LEVELS)):  # fmt: skip
        for one in folders:
            yield Case(f"model {room}: {one.name}"[:110], one.run)
    for name, change, names in WAN:
        yield Case(f"model experts: {name}", wan_case(change, *names))
    yield Case("model experts: another boundary", boundary)
    yield single("nothing in it", lambda path: save_file({}, path), "model.safetensors")
    yield single("a LoRA", holding(lora_unet_a__lora_down__weight=torch.ones(2, 2),
           lora_unet_a__lora_up__weight=torch.ones(2, 2)),
                 "LoRA", "policy.init_lora")  # fmt: skip
    yield single("an autoencoder alone", holding(decoder__conv_in__weight=torch.ones(2, 2)), "model.safetensors")
    yield single("a textual inversion", holding(emb_params=torch.ones(2, 2)), "model.safetensors")
    yield single(
        "cut short", lambda path: path.write_bytes(b"\x40\x00\x00\x00\x00\x00\x00\x00{"), "model.safetensors", "damaged"
    )
