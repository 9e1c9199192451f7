"""Estimates the bytes that a process holds in training, from counted tensors; it measures nothing.

All slow counts happen once (`Facts`). Memory is a pure function of these and of `MemorySettings`, so that thousands of
settings can be tried for a card (`flowrl.planning.fits`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flowrl.pipelines.shared.prompt_embeddings import CACHED_BYTES, EMBEDDING_CACHE
from flowrl.planning.network import DenoiserWeights, Network
from flowrl.planning.published_models import Parts
from flowrl.recipes.counting import RolloutRecord
from flowrl.rendering.markup import plural
from flowrl.runtime.placement import PINNED

GIB = 2**30
CARDS = {24: 23.6, 40: 39.4, 48: 44.9, 80: 79.1, 141: 139.8}
"""Nominal size of a card -> GiB that its driver reports; for 48 GB with error correction, which takes a sixteenth."""
OVERHEAD = 2 * GIB
"""The reserve: a process's CUDA context (some 0.5 GiB), workspaces, and blocks that the allocator cannot use."""
NODE = 8
"""Cards of a machine, at most as a rule."""
LIBRARIES = 4 * GIB
"""Host memory of Python, torch, the libraries of models, and CUDA."""
SLOT = 4
"""Bytes of a trained parameter in one more slot of weights."""
SAVED_STATE = 12
"""Bytes of a trained parameter in a checkpoint, without slots: weight and Adam's moments."""
_MOMENTS = {"adamw": 8.0, "paged_adamw": 8.0, "adamw_8bit": 2 + 8 / 256, "paged_adamw_8bit": 2 + 8 / 256}
"""Bytes of both moments of a parameter; in 8 bits with a float32 scale for every 256 of them."""
_RESTORED = {"none": 0, "int8": 10, "fp8": 10, "int8_bnb": 10, "nf4": 2}
"""Bytes per weight while a product restores it: codes and product in float32, then 16 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Counts of a run that do not depend on its memory settings."""

    network: Network
    """One evaluation of the denoiser."""
    eval_working: int
    """Peak bytes of a network evaluation at the size of evaluation images."""
    rows: int
    """Network rows of a trained image whose graphs exist at once."""
    passes: tuple[int, int]
    """Network rows of a drawn image, in training and in an evaluation."""
    keeps: int
    """Images whose graphs are all kept (`keep_graphs`); 0 if only those of a micro-batch are."""
    decode: tuple[int, int] | None
    """Peak bytes of decoding one image, whole and in tiles; None if unknown."""
    eval_decode: tuple[int, int] | None
    """The same at the evaluations' size."""
    image: int
    """Bytes of a decoded image."""
    parts: Parts
    """Of the model besides the denoiser."""
    rewards: tuple[tuple[str, int, int], ...]
    """Models of the rewards, `(model, parameters, bytes per weight)`."""
    unknown: tuple[str, ...]
    """What is held too, but of unknown size."""
    dtype: tuple[str, int]
    """Of the denoiser, and its bytes."""
    full: bool
    """Whether the denoiser's own weights are trained."""
    slots: int
    """Copies of the trained weights."""
    reference: bool
    """Whether the weights before training are kept besides the trained ones."""
    evaluates: bool
    """Whether there are evaluations."""
    at_once: bool = False
    """Whether denoiser and text encoders are loaded together, also where the latter are freed then."""
    latent: int = 0
    """Bytes of a latent."""
    record: RolloutRecord = field(default_factory=RolloutRecord)
    """The recipe's record of its latents."""
    scored: int = 0
    """Largest number of finished latents to score at once, if not every batch is scored when drawn."""
    prompt: int = 0
    """Number of elements of a prompt's embedding."""
    prompts: int | None = None
    """Of the run; None where their number is not known."""
    cached: bool = False
    """Whether a folder instead of host memory keeps the embeddings."""
    gradients: tuple[int, int] = (0, 0)
    """Of what is trained that are kept for each image: on the host, and on the device while it is drawn."""
    images: int = 0
    """Of an iteration, of all processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySettings:
    """The settings that memory depends on, and no others; see the keys of the configuration."""

    processes: int = 1
    micro_batch_size: int
    rollout_batch_size: int
    eval_batch_size: int
    gradient_checkpointing: bool = False
    quantize: str = "none"
    offload: tuple[str, ...] = ()
    free_text_encoders: bool = False
    vae_slice: int = 8
    vae_tiling: bool = False
    optimizer: str = "adamw"
    optim_offload: bool = False
    shard: int = 1
    context: int = 1
    rollouts: int = 0
    worker_shard: int = 1
    staleness: int = 0

    @property
    def ranks(self) -> int:
        """Number of processes that draw on their own; those that share an image's tokens draw it together."""
        return max(1, self.processes // self.context)


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Memory of one process."""

    held: Mapping[str, int]
    """Bytes by kind, held during the whole run."""
    unknown: tuple[str, ...] = ()
    """What is held too, but of unknown size."""
    image: int
    """Activations of one image of a micro-batch, and its gradients if they are kept."""
    image_checkpointed: int
    """The same with gradient checkpointing."""
    configured: int
    """Activations of the configured micro-batch."""
    micro_batch_size: int
    gradients: int = 0
    """Gradients of its images, which `configured` includes."""
    update: int = 0
    """Other bytes of an update, which do not depend on the micro-batch."""
    stages: Mapping[str, int]
    """Additional bytes in the other parts of an iteration."""
    start: int = 0
    """All bytes before text encoders are freed; 0 if they are not freed."""
    worker: int | None = None
    """Peak bytes of a process that only draws; None if the learner draws."""
    sent: int = 0
    """Bytes of weights that such a process takes in an iteration, and once more for an evaluation."""
    host: Mapping[str, int]
    """Bytes of host memory by kind, held during the whole run."""
    host_start: int = 0
    """Bytes that pass through the host while the model loads or is sent."""
    host_rest: int = 0
    """The same of a process that another gives its part of the denoiser."""

    @property
    def host_peak(self) -> int:
        """Peak of host memory over the run, with libraries."""
        return max(sum(self.host.values()), self.host_start) + LIBRARIES

    def machine(self, chosen: MemorySettings) -> int:
        """Host memory of a machine with at most `NODE` processes, of which one in each copy reads the denoiser."""
        here = min(chosen.processes, NODE)
        reading = math.ceil(here / chosen.shard)
        others = (here - reading) * (max(sum(self.host.values()), self.host_rest) + LIBRARIES)
        return reading * self.host_peak + others

    @property
    def fixed(self) -> int:
        """Bytes that are always held, with the reserve."""
        return sum(self.held.values()) + OVERHEAD

    @property
    def peak(self) -> int:
        """Peak over all parts of the run."""
        return max(self.fixed + max([self.configured + self.update, *self.stages.values()]), self.start + OVERHEAD)


def memory_of(facts: Facts, chosen: MemorySettings) -> Memory:
    """The memory of a process with these settings."""
    network, split, width = facts.network, chosen.context, facts.dtype[1]
    weights, parts = network.weights, _are_masters(facts, chosen)
    outside = width * (weights.parameters - weights.blocks)
    coded = base_bytes(weights, chosen.quantize, width) - outside  # codes and scales are gathered as such
    units: dict[str, Any] = {"outside": outside // weights.experts, "experts": weights.experts}
    units["block"] = math.ceil(coded * weights.largest_block / max(1, weights.blocks))
    gathered = sum(gathered_weights(**units, number=chosen.shard, rounded=parts & (width < 4)).values())
    reduced = parts * sum(summed_gradients(**units, number=chosen.shard, width=width).values())
    restored = _RESTORED[chosen.quantize] * max((o * i for o, i in weights.matrices), default=0)
    working = gathered + restored
    denoiser = _denoiser(facts, chosen)
    held = denoiser | _trained(facts, chosen)
    encoders = sum(count * facts.dtype[1] for name, count in facts.parts.items() if name != "vae")
    vae = {"autoencoder, float32": 4 * facts.parts["vae"]} if "vae" in facts.parts else {}
    rewards = {f"reward's {model.rpartition('/')[2]}": count * size for model, count, size in facts.rewards}
    stages: dict[str, int] = {}
    away = 0  # what comes back from the host for a while
    if encoders and not chosen.free_text_encoders:
        if "text_encoders" in chosen.offload:
            stages["encoding"] = encoders
        else:
            held[f"text encoders, {facts.dtype[0]}"] = encoders
    for names, kind in ((vae, "vae"), (rewards, "rewards")):
        if kind in chosen.offload:
            away += sum(names.values())
        else:
            held |= names
    draws = working + _drawn(facts, chosen)
    rollout = _rollout(facts, chosen, draws * (not chosen.rollouts), away)
    stages |= rollout
    evaluated = facts.evaluates * chosen.eval_batch_size * facts.passes[1] * facts.eval_working // split
    if facts.evaluates:
        size = chosen.eval_batch_size
        own = max(evaluated * (not chosen.rollouts), _decoded(facts.eval_decode, chosen, size))
        stages[f"evaluating {plural(size, 'image')}"] = working + own + 2 * size * facts.image + away
    gradients = 4 * network.trained * facts.gradients[1]  # they are there, and graphs, while images are drawn
    host = _host(facts, chosen, (encoders, sum(vae.values()), sum(rewards.values())))
    each = {
        checkpointed: (saved + network.beside) * facts.rows // split + gradients
        for checkpointed, saved in ((False, network.saved), (True, network.saved_checkpointed))
    }
    graphs = facts.keeps or chosen.micro_batch_size
    memory = Memory(
        held=held,
        unknown=facts.unknown,
        image=each[False],
        image_checkpointed=each[True],
        configured=each[chosen.gradient_checkpointing] * graphs,
        micro_batch_size=chosen.micro_batch_size,
        gradients=gradients * chosen.micro_batch_size,
        update=(max(rollout.values()) if gradients else working) + reduced,
        stages=stages,
        start=chosen.free_text_encoders * (encoders + sum(vae.values()) + sum(denoiser.values()) * facts.at_once),
        host=host,
        # The first process of a copy reads the model, and has it whole once more to ship it.
        host_start=max(weights.parameters * facts.dtype[1] + parts * sum(host.values()), encoders),
        host_rest=encoders,
    )
    if not chosen.rollouts:
        return memory
    # It holds the model, or its part without masters, and its text encoders are dropped once it has loaded.
    number = chosen.worker_shard
    drawing = sum(_denoiser(facts, replace(chosen, shard=1)).values()) // number + sum(vae.values())
    draws = sum(gathered_weights(**units, number=number).values()) + restored + max(_drawn(facts, chosen), evaluated)
    peak = drawing + max(encoders, draws + 4 * network.trained * (not facts.full)) + OVERHEAD
    return replace(memory, worker=peak, sent=sent_bytes(facts))


def gathered_weights(*, outside: int, block: int, experts: int, number: int, rounded: bool = False) -> dict[str, int]:
    """Bytes by kind that FSDP2 holds on a GPU in a call, besides one of `number` parts; of one part that is all, none.

    `outside` and `block` are bytes of what a network has outside its blocks, and of its largest block, as gathered. A
    buffer receives them, and weights are made of it. It stays until the next block's is full, which the backward pass
    fills ahead. Buffers belong to a stream of their own, of each of `experts`, and streams do not reuse each other's
    memory. Masters are `rounded` before: once more a part of a block.
    """
    buffers = block + max(block, outside) + rounded * math.ceil(block / number)
    return {"outside": outside, "block": block, "buffers": experts * buffers} if number > 1 else {}


def summed_gradients(*, outside: int, block: int, experts: int, number: int, width: int) -> dict[str, int]:
    """Bytes by kind that gradients of split weights of `width` bytes take beside `gathered_weights`.

    A block's float32 sum is under way while the block before computes its gradients. Those of what lies outside come
    after the blocks', and are summed last. Parts of sums belong to a third stream of each expert.
    """
    total = 4 * block // width
    moments = (block + total, outside - block + total, 4 * outside // width - block)
    return {"gradients": max(moments), "parts": experts * math.ceil(4 * max(outside, block) / width / number)}


def sent_bytes(facts: Facts) -> int:
    """The weights that workers take, as the network computes with them."""
    return facts.network.trained * (facts.dtype[1] if facts.full else 4)


def _drawn(facts: Facts, chosen: MemorySettings) -> int:
    """Device memory of a batch while it is drawn, besides the weights."""
    record, ranks = facts.record, chosen.ranks
    batches = (each * min(chosen.rollout_batch_size, math.ceil(rows / ranks)) for each, rows in record.batches)
    network = chosen.rollout_batch_size * facts.passes[0] * facts.network.working // chosen.context
    return network + facts.latent * max([record.held // ranks, *batches])


def _rollout(facts: Facts, chosen: MemorySettings, draws: int, away: int) -> dict[str, int]:
    """Stages of a rollout: finished images are scored during sampling, or after all are drawn."""
    here, size, finished = draws, chosen.rollout_batch_size, facts.record.finished
    stages = {"sampling": draws} if finished and draws else {}
    if finished:
        here, size = 0, min(facts.scored, math.ceil(finished / chosen.ranks))
    decoded = _decoded(facts.decode, chosen, size) + size * (2 * facts.image + facts.latent)
    return stages | {f"{'sampling, ' * bool(here)}decoding, scoring {plural(size, 'image')}": here + decoded + away}


def base_bytes(weights: DenoiserWeights, form: str, width: int) -> int:
    """Bytes of a denoiser's weights, `width` for each weight that `form` leaves unchanged."""
    if form == "none":
        return weights.parameters * width
    coded = codes = 0
    for (outputs, inputs), count in weights.matrices.items():
        size = outputs * inputs
        coded += count * size
        if form == "nf4":
            # 4 bits a weight, a scale in 8 bits for each 64 of them, float32 for each 256 of those, and two tables of
            # 16 and 256 numbers and one more.
            scales = math.ceil(size / 64)
            codes += count * (math.ceil(size / 2) + scales + 4 * (math.ceil(scales / 256) + 16 + 256 + 1))
        else:  # 8 bits a weight and a float32 scale for each row
            codes += count * (size + 4 * outputs)
    return codes + (weights.parameters - coded) * width


def trained_bytes(parameters: int, slots: int, *, moments: float = 8.0) -> int:
    """A LoRA in float32, its gradient, its sum in float64, Adam's moments, and further slots."""
    return int(parameters * (4 + 4 + 8 + moments + SLOT * slots))


def checkpoint_bytes(parameters: int, slots: int) -> int:
    """One checkpoint on disk."""
    return parameters * (SAVED_STATE + SLOT * slots)


def fitting(memory: Memory, card: float, allowed: Sequence[int], *, checkpointed: bool) -> int:
    """The largest allowed micro-batch that a card of so many GiB holds, with gradient checkpointing if `checkpointed`;
    0 if none. `allowed` sizes divide an update's images."""
    each = memory.image_checkpointed if checkpointed else memory.image
    free = card * GIB - memory.fixed
    if free < max([0, *memory.stages.values()]) or card * GIB < memory.start + OVERHEAD:
        return 0
    return max((size for size in allowed if size * each + memory.update <= free), default=0)


def allowed_sizes(images: int, multiple: int) -> list[int]:
    """Micro-batches that divide a process's images of an update and are multiples of what must stay together."""
    return [size for size in range(multiple, images + 1, multiple) if images % size == 0]


# ---- parts of it -----------------------------------------------------------------------------------------------------


def _decoded(each: tuple[int, int] | None, chosen: MemorySettings, batch: int) -> int:
    return 0 if each is None else each[chosen.vae_tiling] * min(chosen.vae_slice, batch)


def _are_masters(facts: Facts, chosen: MemorySettings) -> bool:
    """Whether the parts of the denoiser that a process holds are masters in float32."""
    return facts.full and chosen.shard > 1


def _denoiser(facts: Facts, chosen: MemorySettings) -> dict[str, int]:
    name, width = ("float32", 4) if _are_masters(facts, chosen) else facts.dtype
    words = name if chosen.quantize == "none" else f"{chosen.quantize} and {name}"
    words += f", 1/{chosen.shard}" * (chosen.shard > 1)
    return {f"denoiser, {words}": base_bytes(facts.network.weights, chosen.quantize, width) // chosen.shard}


def _trained(facts: Facts, chosen: MemorySettings) -> dict[str, int]:
    count, slots = facts.network.trained, facts.slots
    copies = ", copies" * bool(slots or facts.reference)
    moments = 0.0 if chosen.optim_offload else _MOMENTS[chosen.optimizer]
    adam = ", Adam" * (moments > 0)
    if not facts.full:
        return {f"LoRA, gradient{adam}{', copies' * bool(slots)}": trained_bytes(count, slots, moments=moments)}
    width, split = facts.dtype[1], _are_masters(facts, chosen)
    gradient = 4 if split else width + 4  # its sum, and that of a micro-batch where it is whole
    share = f", 1/{chosen.shard}" * split
    if chosen.optim_offload:
        words = "gradient" if split else "gradient and its sum"
        return {f"{words}{share}": count * gradient // chosen.shard}
    masters = 4 * (width < 4 and not split)
    each = gradient + masters + moments + SLOT * slots + _reference(facts, chosen)
    return {f"{'masters, ' * (masters > 0)}gradient{adam}{copies}{share}": int(count * each / chosen.shard)}


def _reference(facts: Facts, chosen: MemorySettings) -> int:
    """Bytes per trained weight of its copy from before training, in the network's dtype."""
    return (4 if _are_masters(facts, chosen) else facts.dtype[1]) * facts.reference


def _host(facts: Facts, chosen: MemorySettings, parts: tuple[int, int, int]) -> dict[str, int]:
    """Host memory of a process; `parts` are bytes of text encoders, autoencoder and rewards."""
    ranks, trained = chosen.ranks, facts.network.trained
    columns = [count * facts.latent // ranks for count in facts.record.columns]
    rounds = facts.record.rounds
    record = rounds * (sum(map(pinned, columns)) + sum(columns) * (rounds > 1))
    found = {"record of a rollout": record} if record else {}
    own = sent_bytes(facts) // (chosen.shard if facts.full else 1)
    if chosen.rollouts:
        found["weights laid down for workers"] = own
    if chosen.staleness:  # of each its record, and its weights, once more as they are laid down
        found["iterations drawn ahead"] = chosen.staleness * (sum(columns) + 2 * own)
    if facts.gradients[0]:
        images, piece = facts.images // ranks, chosen.rollout_batch_size
        found["gradients of its images"] = facts.gradients[0] * images // piece * pinned(4 * trained * piece)
    if facts.prompts is not None and facts.prompt:
        count = facts.prompts if chosen.free_text_encoders else min(facts.prompts, EMBEDDING_CACHE)
        kept = count * facts.prompt * facts.dtype[1]
        found["embeddings of prompts"] = min(kept, CACHED_BYTES) if facts.cached else kept
    resting = zip(("text_encoders", "vae", "rewards"), ("text encoders", "autoencoder", "rewards"), parts, strict=True)
    found |= {f"{words} at rest": size for key, words, size in resting if key in chosen.offload and size}
    if chosen.optim_offload:
        each = 4 + 4 + 8 + facts.full * SLOT * facts.slots + facts.full * _reference(facts, chosen)
        found["weights, gradient, Adam"] = trained * each // (chosen.shard if facts.full else 1)
    return found


def pinned(size: int) -> int:
    """Bytes of host memory for a tensor of so many bytes: pinned in powers of two up to a limit."""
    return size if size > PINNED or not size else 1 << (size - 1).bit_length()
