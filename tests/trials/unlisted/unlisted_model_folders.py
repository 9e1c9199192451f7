"""Model folders that are changed as other programs leave them, and what stock diffusers and flowrl make of each."""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors.torch import load_file, save_file
from tiny_folders import SETTINGS, save_tiny
from tiny_wan import save_tiny_wan
from torch import Tensor
from unlisted_case import Outcome, Silent, refused

from flowrl.pipelines import family

Tensors = dict[str, Tensor]
Change = Callable[[Path], object]
T5 = "text_encoder_3"
PROMPT = "a photo of a red circle"
Q = "transformer_blocks.0.attn.to_q"
_ROOM = tempfile.TemporaryDirectory()
diffusers.utils.logging.set_verbosity_error()
diffusers.utils.logging.disable_progress_bar()


@functools.cache
def clean(name: str) -> Path:
    """The folder of a family, written once."""
    folder = Path(_ROOM.name) / name
    return save_tiny_wan(folder, "t2v-a14b") if name == "wan" else save_tiny(name, folder)


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


# ---- what a folder says, as stock diffusers has it and as flowrl has it ----------------------------------------------


def stock_pipe(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return diffusers.DiffusionPipeline.from_pretrained(folder)


@torch.no_grad()
def stock_says(name: str, folder: Path) -> Tensors:
    pipe = stock_pipe(folder)
    scheduler, latent = pipe.scheduler, noise(1, *SHAPES[name])
    flow = scheduler.config.get("use_dynamic_shifting")  # as the stock pipeline does, of 8 x 8 tokens
    scheduler.set_timesteps(6, **({"mu": 0.5 + 0.65 * (64 - 256) / 3840} if flow else {}))
    vae = pipe.vae.config
    if name == "sd3":
        embeds, _, pooled, _ = pipe.encode_prompt(
            PROMPT, None, None, do_classifier_free_guidance=False, max_sequence_length=16
        )
        velocity = pipe.transformer(latent, embeds, pooled, torch.tensor([700.0])).sample
        sigmas = scheduler.sigmas.float()
    else:
        embeds = pipe.encode_prompt(PROMPT, "cpu", 1, False)[0]
        time = list(dict.fromkeys(scheduler.timesteps.tolist()))[2]
        a = scheduler.alphas_cumprod[int(time)].double()
        told = pipe.unet(latent, time, embeds).sample
        kind = scheduler.config.prediction_type
        if kind == "epsilon":
            eps, x0 = told, (latent - (1 - a).sqrt() * told) / a.sqrt()
        elif kind == "v_prediction":
            eps, x0 = a.sqrt() * told + (1 - a).sqrt() * latent, a.sqrt() * latent - (1 - a).sqrt() * told
        else:
            eps, x0 = (latent - a.sqrt() * told) / (1 - a).sqrt(), told
        velocity = (eps - x0).float()
        once = list(dict.fromkeys(scheduler.timesteps.tolist()))  # PNDM goes back to its second level
        a = scheduler.alphas_cumprod[torch.tensor(once).long()].double()
        sigmas = torch.cat([(1 - a).sqrt() / ((1 - a).sqrt() + a.sqrt()), torch.zeros(1)]).float()
    image = pipe.vae.decode(latent / vae.scaling_factor + (vae.shift_factor or 0)).sample
    return {"velocity": velocity, "image": (image / 2 + 0.5).clamp(0, 1), "sigmas": sigmas}


@torch.no_grad()
def flowrl_says(name: str, folder: Path, **options: Any) -> Tensors:
    known: Any = family(name)
    known.check(str(folder), None)
    p = known.load(str(folder), **{"dtype": torch.float32, **SETTINGS.get(name, {}), **options})
    latent, schedule = noise(1, *SHAPES[name]), p.schedule(6, "diffusers")
    cond = p.encode([PROMPT])
    if name == "sd3":
        velocity = p.network(latent, torch.tensor([700.0]), cond)
    else:
        sigma = schedule.sigma[2].double()
        velocity = p.network(latent * ((1 - sigma) ** 2 + sigma**2).sqrt().float(), schedule.timestep[2][None], cond)
    return {"velocity": velocity, "image": p.decode(latent), "sigmas": schedule.sigma.float()}


SHAPES = {"sd3": (8, 8, 8), "sd": (4, 8, 8)}


@functools.cache
def clean_says(name: str) -> Tensors:
    return stock_says(name, clean(name))


def agree(found: Tensors, wanted: Tensors, within: float) -> Outcome:
    worst, part = 0.0, ""
    for key, tensor in wanted.items():
        if found[key].shape != tensor.shape:
            raise Silent(f"{key} has shape {tuple(found[key].shape)} where {tuple(tensor.shape)} is right")
        away = float((found[key] - tensor).abs().max() / tensor.abs().max())
        if not away <= worst:
            worst, part = away if away == away else float("inf"), key
    if not worst <= within:
        raise Silent(f"{part} is {worst:.3g} of its largest value away from what is right")
    return "right", f"{part or 'all'} within {worst:.2g}"


@dataclass(frozen=True)
class Folder:
    """A folder that was changed, and what is right of it: "base" (as the clean one), "stock" (as stock has the changed
    one), or to refuse it in some words; `may` has both."""

    name: str
    change: Change
    right: str = "refused"
    words: tuple[str, ...] = ()
    may: bool = False
    family: str = "sd3"
    within: float = 2e-5
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, folder: Path) -> Outcome:
        model = Path(shutil.copytree(clean(self.family), folder / "model"))
        self.change(model)
        try:
            found = flowrl_says(self.family, model, **self.options)
        except ValueError as error:
            if self.right == "refused" or self.may:
                return refused(1, str(error), *self.words)
            raise Silent(f"refused, and it is right: {error}") from error
        if self.right == "refused":
            try:
                away = agree(found, clean_says(self.family), self.within)[1]
            except Silent as error:
                away = str(error)
            raise Silent(f"taken without a word ({away})")
        wanted = clean_says(self.family) if self.right == "base" else stock_says(self.family, model)
        return agree(found, wanted, self.within)


# ---- ways to change a folder -----------------------------------------------------------------------------------------


def file_of(model: Path, part: str) -> Path:
    [path] = (model / part).glob("*.safetensors")
    return path


def tensors(part: str, how: Callable[[Tensors], object], *, notes: bool = True) -> Change:
    """Changes the tensors of a part."""

    def change(model: Path) -> None:
        path = file_of(model, part)
        own = load_file(path)
        found = how(own)
        own = found if isinstance(found, dict) else own
        save_file({k: t.contiguous() for k, t in own.items()}, path, metadata={"format": "pt"} if notes else None)

    return change


def more(part: str, key: str, tensor: Tensor | Callable[[Tensors], Tensor]) -> Change:
    return tensors(part, lambda t: t.update({key: tensor(t) if callable(tensor) else tensor}))


def renamed(part: str, how: Callable[[str], str]) -> Change:
    return tensors(part, lambda own: {how(key): tensor for key, tensor in own.items()})


def setting(path: str, **changes: Any) -> Change:
    """Changes a JSON file; "gone" removes a key."""

    def change(model: Path) -> None:
        whole = json.loads((model / path).read_text()) | changes
        (model / path).write_text(json.dumps({key: value for key, value in whole.items() if value != "gone"}))

    return change


def network(**changes: Any) -> Change:
    return setting("transformer/config.json", **changes)


def scheduler(**changes: Any) -> Change:
    return setting("scheduler/scheduler_config.json", **changes)


def both(*changes: Change) -> Change:
    return lambda model: [change(model) for change in changes]


def cast(part: str, dtype: torch.dtype, only: str = "") -> Change:
    return tensors(part, lambda own: {k: t.to(dtype) if only in k else t for k, t in own.items()})


def eight_bit(
    part: str = "transformer", *, form: torch.dtype = torch.float8_e4m3fn, name: str = "scale_weight",
    shape: Callable[[Tensor], Tensor] = lambda scale: scale, rows: bool = False, only: str = "attn", times: float = 1,
) -> Change:  # fmt: skip
    """Weights divided by a scale that stays beside them; the change of the numbers is that of eight bits."""

    def how(own: Tensors) -> None:
        for key in [key for key in own if only in key and key.endswith(".weight") and own[key].ndim == 2]:
            weight = own[key].float()
            scale = (weight.abs().amax(1, keepdim=True) if rows else weight.abs().max()) / 448
            own[key] = (weight / scale).to(form)
            own[f"{key.removesuffix('.weight')}.{name}"] = shape(scale * times)

    return tensors(part, how)


def at(part: str, key: str, value: float) -> Change:
    """One number of one weight."""

    def how(own: Tensors) -> None:
        own[key].view(-1)[3] = value

    return tensors(part, how)


def pieces(model: Path, *, change: Callable[[Tensors, Tensors, dict[str, str]], object] = lambda a, b, m: None) -> None:
    """The denoiser's file in two, with an index."""
    path = file_of(model, "transformer")
    own = load_file(path)
    path.unlink()
    keys, names = sorted(own), [f"diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    half = [{k: own[k].contiguous() for k in keys[i::2]} for i in (0, 1)]
    places = {k: names[i] for i in (0, 1) for k in half[i]}
    change(half[0], half[1], places)
    for name, one in zip(names, half, strict=True):
        save_file(one, path.with_name(name), metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (path.parent / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))


def pickled(part: str, name: str, *, keep: bool = False, wrap: Callable[[Tensors], Any] = lambda t: t) -> Change:
    def change(model: Path) -> None:
        path = file_of(model, part)
        torch.save(wrap(load_file(path)), path.with_name(name))
        if not keep:
            path.unlink()

    return change


def linked(*places: str) -> Change:
    """Files and folders that are links to where they were, as the hub's cache and people who save room have them."""

    def change(model: Path) -> None:
        for number, place in enumerate(places):
            away = model.parent / f"away-{number}"
            shutil.move(model / place, away)
            os.symlink(away, model / place)

    return change


def whole(part: str, text: str | bytes, name: str = "") -> Change:
    """Overwrites a file."""

    def change(model: Path) -> None:
        path = model / part / name if name else file_of(model, part)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())

    return change


def cut(part: str) -> Change:
    return lambda model: os.truncate(file_of(model, part), file_of(model, part).stat().st_size - 64)


def words(part: str, how: Callable[[dict[str, Any]], object]) -> Change:
    """Changes a tokenizer.json."""

    def change(model: Path) -> None:
        path = model / part / "tokenizer.json"
        said = json.loads(path.read_text())
        how(said)
        path.write_text(json.dumps(said))

    return change


def larger_words(said: dict[str, Any]) -> None:
    """A tokenizer of which every entry got 600 others before it, as one of a larger model has."""
    vocab = said["model"]["vocab"]
    said["model"]["vocab"] = {key: place + 600 for key, place in vocab.items()} | {f"filler{i}": i for i in range(600)}
    for one in said["added_tokens"]:
        one["id"] += 600


def other_words(part: str, other: str) -> Change:
    """The tokenizer of another part in its place."""

    def change(model: Path) -> None:
        shutil.rmtree(model / part)
        shutil.copytree(model / other, model / part)

    return change


def swapped(first: str, second: str) -> Change:
    def change(model: Path) -> None:
        (model / first).rename(model / "x")
        (model / second).rename(model / first)
        (model / "x").rename(model / second)

    return change


def from_other(part: str, other: str) -> Change:
    def change(model: Path) -> None:
        shutil.rmtree(model / part)
        shutil.copytree(clean(other) / part, model / part)

    return change


def tied(own: Tensors, *, differing: bool = False, alone: bool = False) -> None:
    own["encoder.embed_tokens.weight"] = own["shared.weight"].clone() + float(differing)
    if alone:
        del own["shared.weight"]


def wider_t5(model: Path) -> None:
    import transformers

    said = json.loads((model / T5 / "config.json").read_text())
    config = transformers.T5Config(**{**said, "d_model": 64})
    transformers.T5EncoderModel(config).save_pretrained(model / T5)
