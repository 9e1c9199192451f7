"""Models from the hub for rewards: one way to check, load, share and name them, and the features of CLIP models.

Rewards that ask for the same frozen weights get the same network, so CLIPScore and the aesthetic score, for example,
hold one CLIP between them. A reward that trains its network asks for a copy of its own.

Arguments of most functions here:

    model       a local folder, or an id on the hub
    revision    branch, tag or commit on the hub
    device      the device that it runs on
    owner       the caller's name for messages: "reward 'clip_score'"
    option      the option that names the model or file, for messages
    what        the kind of model, for messages: "CLIP"

Options of rewards are checked without a look at the hub or at a server, since most of what reads them needs neither.
Within `look_for_models` the same checks look: for a model on the hub in its cache, then on the hub; for a server at
its address. An incomplete model or a server that answers and then fails is found only when loaded or asked.

Training programs put their logs and settings into a checkpoint as objects of their own classes; torch's safe reader
refuses such a file whole. In `replace_foreign` every class and function that the file names, and that torch does not
know as harmless, is an empty class that accepts any arguments and does nothing: nothing is imported, nothing is called.
A class that inherits from dict or list cannot be replaced, because torch fills only its own: such a file is refused.
"""

from __future__ import annotations

import hashlib
import importlib.util
import pickle
import pickletools
import re
import socket
import urllib.request
import zipfile
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowrl.config.strict_yaml import read_mapping
from flowrl.prompts.tokenizer_checks import check_tokenizer
from flowrl.rewards.base import Model
from flowrl.runtime.extras import check_extra
from flowrl.runtime.failures import out_of_memory
from flowrl.runtime.files import safetensors_parameters
from flowrl.runtime.precision import network_autocast
from flowrl.runtime.private_names import IMPORT_MAPPING, NAME_MAPPING
from flowrl.runtime.shapes import Float, UInt8

_ALLOWED = {
    "collections.OrderedDict",
    "collections.Counter",
    "_codecs.encode",
    "builtins.bytearray",
    "builtins.set",
    "builtins.complex",
}
"""Names of Python's own library that torch's safe reader knows."""
_LEGACY = 4  # pickles of the format before torch 1.6: a mark, its version, the machine, the content


def blank(name: str) -> type:
    """An empty class: made with any arguments, given any state, it stays empty."""

    def new(cls: type, *_: Any, **__: Any) -> Any:
        return object.__new__(cls)

    def ignore(self: Any, *_: Any, **__: Any) -> None:
        return None

    return type(name.rpartition(".")[2], (), {"__new__": new, "__init__": ignore, "__setstate__": ignore})


def foreign_names(path: Path) -> list[str]:
    """Names in a file of torch that are not torch's own: "module.name" each."""
    names: set[str] = set()
    if zipfile.is_zipfile(path):
        try:
            with zipfile.ZipFile(path) as archive:
                for entry in archive.namelist():
                    if entry.endswith("/data.pkl"):
                        with archive.open(entry) as stream:
                            names |= _named(stream)
        except zipfile.BadZipFile as error:
            raise ValueError(f"{error}.") from error
    else:
        with path.open("rb") as stream:
            for _ in range(_LEGACY):
                names |= _named(stream)
    return sorted(name for name in names - _ALLOWED if name.partition(".")[0] != "torch")


def _named(stream: IO[bytes]) -> set[str]:
    """The names in the pickle that begins here, as torch reads those of Python 2; the stream stands after it."""
    found = set()
    for code, value, _ in pickletools.genops(stream):
        if code.name == "GLOBAL":
            module, _, name = str(value).partition(" ")
            module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
            found.add(f"{module}.{name}")
    return found


@contextmanager
def replace_foreign(path: Path) -> Iterator[None]:
    """While it is entered, torch's safe reader takes a file's foreign objects for empty ones."""
    # Of a `defaultdict`, torch sets items on a plain dict and on nothing that stands for one.
    stands: list[Any] = [
        ((lambda *_: {}) if name == "collections.defaultdict" else blank(name), name) for name in foreign_names(path)
    ]
    with torch.serialization.safe_globals(stands):
        yield


TIMEOUT = 5.0
"""Seconds that a hub or a server has to answer."""
_LOOKING: ContextVar[bool] = ContextVar("looking", default=False)


@contextmanager
def look_for_models() -> Iterator[None]:
    """Inside, checks of options look for what they name."""
    token = _LOOKING.set(True)
    try:
        yield
    finally:
        _LOOKING.reset(token)


def look_for_model(model: str, *, start: str, option: str, what: str) -> None:
    """Refuses a model that is neither here, nor in the hub's cache, nor on a hub that answers."""
    if not _LOOKING.get() or Path(model).expanduser().exists():
        return
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
    from huggingface_hub.file_download import repo_folder_name

    kept = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=model, repo_type="model") / "snapshots"
    if any(kept.glob("*/*")):
        return
    if constants.is_offline_mode():
        why = "HF_HUB_OFFLINE is set"
    else:
        try:
            HfApi(endpoint=constants.ENDPOINT).model_info(model, timeout=TIMEOUT)
            return
        except GatedRepoError:
            why = "its licence is to be accepted on the hub, with HF_TOKEN set"
        except (RepositoryNotFoundError, HFValidationError):
            why = "the hub has no such model, or HF_TOKEN does not let you see it"
        except Exception:  # the transport raises errors of every kind
            why = f"{constants.ENDPOINT} does not answer"
    raise ValueError(
        f"{start}the {what} model {model!r} is not on this machine, and {why}: give {option}: a folder that holds it, "
        f"or fetch it beforehand with `hf download {model}`."
    )


def look_for_servers(servers: Sequence[str], *, option: str) -> None:
    """Refuses servers none of which takes a connection; one behind a proxy is not asked."""
    if not _LOOKING.get():
        return
    for server in servers:
        parts = urlsplit(server)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        if parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host):
            return
        with suppress(OSError), socket.create_connection((host, port), timeout=TIMEOUT):
            return
    raise ValueError(
        f"no server listens at {', '.join(servers)}: start it, or correct the address, option {option}; nothing was "
        "drawn yet."
    )


WEIGHT_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")

# Weak: a network is freed with the last reward that uses it.
_SHARED: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()


def check_model(model: str, *, what: str, owner: str = "", option: str = "model") -> None:
    """Refuses a model that cannot be there, without loading it: a folder that does not exist, no transformers."""
    start = f"{owner}: " if owner else ""
    if model.startswith((".", "/", "~")) and not Path(model).expanduser().is_dir():
        raise ValueError(
            f"{start}there is no folder {model!r}: give {option}: a folder with a {what} model or a hub id."
        )
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(f"{start}the package transformers is missing: pip install transformers.")
    check_extra("torchvision", f"{start}a {what} model")
    look_for_model(model, start=start, option=option, what=what)


def expand_home(model: str) -> str:
    """The model's name with a leading `~` expanded; transformers does not do that."""
    return str(Path(model).expanduser()) if model.startswith("~") else model


def shared_network(key: Hashable, make: Callable[[], Any]) -> Any:
    """The network under a key of this process: made at the first call, the same object while anything holds it. Leave
    it as it is: frozen, in evaluation mode, on its device."""
    network = _SHARED.get(key)
    if network is None:
        network = make()
        _SHARED[key] = network
    return network


def load_network(
    kind: Any,
    model: str,
    *,
    device: torch.device,
    revision: str | None = None,
    owner: str,
    option: str = "model",
    what: str,
    shared: bool = True,
    dtype: torch.dtype = torch.float32,
    unread: Sequence[str] = (),
) -> Any:
    """A frozen network in evaluation mode, every weight of which that enters an output comes from the checkpoint.

    Args:
        model, device, revision, owner, option, what: see the module.
        shared: one copy for all callers with the same class, model, revision, device and dtype; False gives a fresh
            copy, which the caller may change and train.
        dtype: of the weights; scorers take float32.
        unread: names of parameters of the class, `*` for any text, that no output depends on: a checkpoint may lack
            them, such as one of an older release whose class did not have them.

    Raises:
        ValueError: it cannot be loaded, or parameters are missing, which transformers would fill with random numbers.
    """
    model = expand_home(model)

    def load() -> Any:
        try:
            network, info = kind.from_pretrained(model, revision=revision, dtype=dtype, output_loading_info=True)
        except Exception as error:  # damaged and foreign files make the libraries raise errors of every kind
            if out_of_memory(error):
                raise
            raise cannot_load(model, error, owner=owner, option=option, what=what) from error
        lacking = set(info["missing_keys"]) & {name for name, _ in network.named_parameters()}
        missing = sorted(name for name in lacking if not any(fnmatchcase(name, pattern) for pattern in unread))
        if missing:
            raise ValueError(
                f"{owner}: {model!r} lacks {len(missing)} weights of a {what} model (first: {missing[0]}), which would "
                f"be random numbers: give {option}: a complete {what} checkpoint."
            )
        # Names in a checkpoint that go with one of the network's weights, such as its scale.
        weights = {name for name, _ in network.named_parameters() if name.endswith(".weight")}
        left = {key: f"{key.rpartition('.')[0]}.weight" for key in info["unexpected_keys"]}
        read = {key: own for key, own in left.items() if own not in left}  # otherwise of a tower that is left out
        if odd := sorted(key for key, own in read.items() if any(own.endswith(name) for name in weights)):
            raise ValueError(
                f"{owner}: {model!r} holds {len(odd)} weights beside those of a {what} model that are not read (first: "
                f"{odd[0]}), such as scales of weights in few bits: give {option}: a checkpoint in 16 or 32 bits."
            )
        return network.to(device).eval().requires_grad_(False)

    return shared_network((kind, model, revision, str(device), dtype), load) if shared else load()


def first_line(error: Exception) -> str:
    """An error's message in one line, or its kind if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def cannot_load(model: str, error: Exception, *, owner: str, option: str, what: str) -> ValueError:
    """The error to raise for one of transformers: for missing files, unknown ids, no connection and damaged weights."""
    return ValueError(
        f"{owner} could not load the {what} model {model!r}: {first_line(error)} Give {option}: a folder that holds a "
        f"complete {what} checkpoint (config, weights, and the tokenizer and preprocessor if it has them), or a hub "
        f"id while the hub can be reached; fetch it beforehand with `hf download {model}`, or take a reward that needs "
        f"no weights."
    )


def load_clip(
    model: str, *, device: torch.device, revision: str | None = None, owner: str, option: str = "model"
) -> tuple[Any, Any]:
    """A CLIP model and its processor, as `load_network` and `load_processor` give them."""
    from transformers import CLIPModel, CLIPProcessor

    network = load_network(CLIPModel, model, device=device, revision=revision, owner=owner, option=option, what="CLIP")
    return network, load_processor(CLIPProcessor, model, revision=revision, owner=owner, option=option, what="CLIP")


def load_processor(
    kind: Any, model: str, *, revision: str | None = None, owner: str, option: str = "model", what: str
) -> Any:
    """The processor of a network, an object of the class `kind`: a tokenizer, an image processor, or both."""
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    try:
        found = kind.from_pretrained(expand_home(model), revision=revision)
    except Exception as error:
        raise cannot_load(model, error, owner=owner, option=option, what=what) from error
    words = vars(found).get("tokenizer") if isinstance(found, ProcessorMixin) else found
    if isinstance(words, PreTrainedTokenizerBase):
        advice = f"give {option}: a folder that holds all files of a {what} model's tokenizer, or a hub id"
        check_tokenizer(words, f"{owner}: {model}", advice)
    return found


def check_file(source: str, *, option: str, owner: str = "") -> None:
    """Refuses a source of `fetch_file` that names a missing file or folder on this machine. Looks up no hub."""
    local = source.startswith((".", "/", "~")) or source.endswith(WEIGHT_SUFFIXES)
    if local and not Path(source).expanduser().exists():
        start = f"{owner}, " if owner else ""
        raise ValueError(f"{start}option {option}: there is no file or folder {source!r}: give one, or a hub id.")
    look_for_model(source, start=f"{owner}: " if owner else "", option=option, what="reward")


def fetch_file(source: str, name: str | None, *, revision: str | None = None, owner: str, option: str) -> Path:
    """The path of one file, or of a whole folder.

    Args:
        source: the file itself, a folder that holds it, or the id of a hub repository that does.
        name: the file's name in a folder or a repository; a file given as such may have any. None: all of the folder.
        revision, owner, option: see the module.
    """
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HFValidationError

    check_file(source, owner=owner, option=option)
    path = Path(source).expanduser()
    if path.is_dir() if name is None else path.is_file():
        return path
    if name is not None and path.is_dir():
        if not (path / name).is_file():
            raise ValueError(f"{owner}, option {option}: the folder {source!r} holds no file {name}.")
        return path / name
    try:
        if name is None:
            return Path(snapshot_download(source, revision=revision))
        return Path(hf_hub_download(source, name, revision=revision))
    except (OSError, HFValidationError) as error:
        raise ValueError(
            f"{owner} could not fetch {name or 'the files'} from {source!r}: {first_line(error)} Give {option}: a file "
            f"or folder on this machine, or a hub id while the hub can be reached; fetch it with "
            f"`hf download {source}{f' {name}' if name else ''}`."
        ) from error


def read_weights(path: Path, *, owner: str, others: bool = False) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name, on the host, without running code from it: safetensors, or a file of torch
    with nothing else, perhaps under the key `state_dict` or `model`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with replace_foreign(path) if others else nullcontext():
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = first_line(error)
        if named := re.search(r"GLOBAL ([\w.]+)", str(error)):
            reason = f"it asks to run {named[1]}, and no code of a file is run."
        elif filled := re.search(r"Can only (?:SETITEM|append|extend).*<class '(?:\w+\.)*(\w+)'>", str(error)):
            reason = f"it holds a dictionary or list of the class {filled[1]}, and no code of a file is run."
        elif "weights_only" in str(error):  # without the safe reader's advice to read the file unsafely
            reason = "it holds objects that the safe reader does not take."
        raise ValueError(
            f"{owner} could not read {path.name}: {reason} Fetch it again, or give one that holds nothing but tensors."
        ) from error
    if isinstance(content, Mapping):
        content = next(
            (content[key] for key in ("state_dict", "model") if isinstance(content.get(key), Mapping)), content
        )
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(
            f"{owner}: {path.name} is not a checkpoint: it must hold tensors by name, or state_dict: them."
        )
    return dict(content)


def check_shapes(
    weights: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]], *, owner: str, give: str
) -> None:
    """Refuses weights of other names or shapes than those of a network; `give` says what to give instead."""
    given = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if wrong := sorted(name for name in wanted.keys() | given.keys() if wanted.get(name) != given.get(name)):
        first = wrong[0]
        raise ValueError(
            f"{owner}: {len(wrong)} of the checkpoint's weights do not fit ({first}: wanted {wanted.get(first)}, got "
            f"{given.get(first)}): give {give}."
        )


def fingerprint(weights: Iterable[Tensor]) -> str:
    """A short hash of some weights: tells checkpoints apart if a folder or a branch name does not."""
    digest = hashlib.sha256()
    for weight in weights:
        digest.update(weight.detach().cpu().float().numpy().tobytes())  # numpy has no bfloat16
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
    with network_autocast(device):
        output = network.get_text_features(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
    return _embedding(output)


def clip_image(network: Any, pixels: Float[Tensor, " b 3 h w"]) -> Float[Tensor, " b d"]:
    """Unit embeddings of images that went through CLIP's preprocessing."""
    with network_autocast(pixels.device):
        output = network.get_image_features(pixel_values=pixels)
    return _embedding(output)


def clip_of_pixels(
    network: Any, processor: Any, images: Sequence[UInt8[np.ndarray, " h w 3"]]
) -> Float[Tensor, " b d"]:
    """Unit embeddings in float32 of 8-bit images, which may differ in size, by the checkpoint's own processor."""
    device = network.logit_scale.device
    return clip_image(network, process_images(processor.image_processor, images).to(device))


def process_images(processor: Any, images: Iterable[UInt8[np.ndarray, " h w 3"]]) -> Float[Tensor, " b 3 h w"]:
    """8-bit images, which may differ in size, as an image processor of transformers prepares them."""
    return processor([Image.fromarray(image) for image in images], return_tensors="pt")["pixel_values"]


def unit(features: Float[Tensor, " b d"]) -> Float[Tensor, " b d"]:
    """Vectors at length 1."""
    return features / features.norm(dim=-1, keepdim=True)


def _embedding(output: Any) -> Float[Tensor, " b d"]:
    """The projected embedding at length 1; transformers 4 returns the tensor, 5 an output object that holds it."""
    return unit((output if isinstance(output, Tensor) else output.pooler_output).float())


_PARAMETERS: dict[str, int] = read_mapping(Path(__file__).with_name("model_sizes.yaml"))


def model_of(name: str, bytes_per_weight: int = 4) -> Model:
    """A model that a reward holds, with the number of its weights if that is known without a download."""
    folder = Path(name).expanduser()
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    known = sum(map(safetensors_parameters, files)) if files else _PARAMETERS.get(name)
    return Model(name, bytes_per_weight, known)


class OneModel:
    """What options that name one `model`, held in float32, have in common; each states its fields itself."""

    __slots__ = ()
    model: str

    @property
    def models(self) -> tuple[Model, ...]:
        """That model."""
        return (model_of(self.model),)
