"""Processes that share the tokens of every image (`parallel.context`) against one that has them all, on gloo.

    python tests/trials/shared_tokens.py --out docs/research/trials/shared_tokens.json

Of random pipelines of every family that can be split, with a LoRA that acts: how far the velocity of two processes lies
from one's, and the LoRA's gradient summed over both, relative to the largest number; whether both processes have the
same bits; and which part of the numbers that a graph keeps one of two processes keeps. Then runs on four processes, two
pairs of which share images, against one process; also with weights that are split over two of them.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
sys.path[:0] = [str(HELPERS), str(HELPERS / "families")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from origin import origin  # noqa: E402
from split_runs import command  # noqa: E402
from tiny_flux import save_tiny_flux, save_tiny_kontext  # noqa: E402
from tiny_flux2 import save_tiny_flux2  # noqa: E402
from tiny_ltx_video import save_tiny_ltx_video  # noqa: E402
from tiny_qwen_image import save_tiny_qwen_image, save_tiny_qwen_image_edit  # noqa: E402
from tiny_runs import differences, lora_tensors, metrics, start  # noqa: E402
from tiny_wan import OPTIONS, save_tiny_wan  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.multiprocessing.spawn import spawn  # noqa: E402
from video_family import image  # noqa: E402

from flowrl.cli import main as flowrl  # noqa: E402
from flowrl.pipelines import family  # noqa: E402
from flowrl.pipelines.lora import Policy  # noqa: E402
from flowrl.pipelines.weights.context_parallel import share_tokens  # noqa: E402
from flowrl.runtime.randomness import counter_normal  # noqa: E402
from flowrl.training.processes.mesh import Layout, device_mesh  # noqa: E402

PROMPTS = ["a photo of a red circle", "two blue squares and a green star beside them"]
_IMAGE = {"max_sequence_length": 16, "height": 32, "width": 32}
_QWEN = {"height": 16, "width": 16, "max_sequence_length": 64}
_BFLOAT16 = {"dtype": torch.bfloat16}
CASES: Mapping[str, tuple[str, Callable[[Path], Path], dict[str, Any]]] = {
    "wan": ("wan", save_tiny_wan, OPTIONS),
    "wan, two experts": ("wan", lambda folder: save_tiny_wan(folder, "t2v-a14b"), OPTIONS),
    "wan, first frame": (
        "wan", lambda folder: save_tiny_wan(folder, "ti2v-5b"), {**OPTIONS, "image_to_video": True},
    ),
    "wan, image beside": ("wan", lambda folder: save_tiny_wan(folder, "i2v"), {**OPTIONS, "max_sequence_length": 12}),
    "flux": ("flux", save_tiny_flux, _IMAGE),
    "kontext": ("kontext", save_tiny_kontext, _IMAGE),
    "flux2": ("flux2", save_tiny_flux2, {**_IMAGE, "max_sequence_length": 32}),
    "qwen_image": ("qwen_image", save_tiny_qwen_image, _QWEN),
    "qwen_image_edit": ("qwen_image_edit", save_tiny_qwen_image_edit, _QWEN),
    "ltx_video": (
        "ltx_video", save_tiny_ltx_video, {"max_sequence_length": 16, "height": 64, "width": 64, "num_frames": 9},
    ),
    "wan, bfloat16": ("wan", save_tiny_wan, {**OPTIONS, **_BFLOAT16}),
    "wan, bfloat16, native": ("wan", save_tiny_wan, {**OPTIONS, **_BFLOAT16, "attention": "native"}),
    "wan, math": ("wan", save_tiny_wan, {**OPTIONS, "attention": "math"}),
    "qwen_image, bfloat16": ("qwen_image", save_tiny_qwen_image, {**_QWEN, **_BFLOAT16}),
    "qwen_image, math": ("qwen_image", save_tiny_qwen_image, {**_QWEN, "attention": "math"}),
}  # fmt: skip
"""Name -> family, what writes a tiny pipeline of it, and what it is loaded with."""


def compared(rank: int, name: str, folder: Path, mesh: DeviceMesh) -> dict[str, Any]:
    """One case, on both processes."""
    own, write, options = CASES[name]
    place = folder / name
    if rank == 0:
        write(place)
    dist.barrier()
    whole, one, kept = _evaluated(own, place, None, **options)
    split, parts, kept_of_two = _evaluated(own, place, mesh, **options)
    for part in parts:
        dist.all_reduce(part)
    other = split.clone()
    dist.broadcast(other, 0)
    equal = torch.tensor([int(torch.equal(split, other))])
    dist.all_reduce(equal)
    largest = max(float(gradient.abs().max()) for gradient in one)
    worst = max(float((a - b).abs().max()) for a, b in zip(one, parts, strict=True))
    return {
        "case": name, "velocity": float((whole - split).abs().max() / whole.abs().max()), "gradient": worst / largest,
        "both_equal": bool(equal.item() == 2), "kept": round(kept_of_two / kept, 3),
    }  # fmt: skip


def _evaluated(name: str, place: Path, mesh: DeviceMesh | None, **options: Any) -> tuple[Tensor, list[Tensor], int]:
    """Velocity, gradients of the LoRA, and bytes that the graph keeps besides weights."""
    pipeline: Any = family(name).load(str(place), **{"dtype": torch.float32, **options})
    policy = Policy(pipeline.denoiser, rank=2, alpha=4, targets=pipeline.lora_targets, seed=0)
    for number, parameter in enumerate(policy.parameters.values()):
        parameter.data += 0.3 * counter_normal(parameter.shape, "lora", number)
    if mesh is not None:
        share_tokens(pipeline, mesh)
    sources = [[image(0, 32, 32)] for _ in PROMPTS] if pipeline.num_sources[1] else None
    cond = pipeline.encode(PROMPTS, sources)
    x = counter_normal((len(PROMPTS), *pipeline.latent_shape), "x")
    direction = counter_normal(x.shape, "direction")
    weights = {weight.untyped_storage().data_ptr() for weight in pipeline.denoiser.parameters()}
    kept: dict[int, int] = {}

    def packed(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    evaluate = pipeline.guided(pipeline.network, cond, None, 1.0)
    with torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor):
        velocity = evaluate(x, torch.tensor([0.5, 0.9]), torch.tensor([500.0, 900.0]))
    gradients = torch.autograd.grad((velocity * direction).sum(), list(policy.parameters.values()), allow_unused=True)
    pairs = zip(gradients, policy.parameters.values(), strict=True)
    return velocity.detach(), [torch.zeros_like(p) if g is None else g for g, p in pairs], sum(kept.values())


def _worker(rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = device_mesh(Layout(context=2), "cpu")["context"]
    results = [compared(rank, name, folder, mesh) for name in CASES]
    if rank == 0:
        (folder / "cases.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def four(folder: Path, name: str, recipe: str, shard: int) -> dict[str, Any]:
    """A run on four processes in pairs, against one process."""
    one, two = folder / f"one-{name}", folder / f"four-{name}-{shard}"
    more = ("optim.eps=0.01", "prompts_per_step=4", "num_iterations=3")
    if not one.is_dir():
        assert flowrl(["train", *command(folder, name, recipe, one, *more)]) == 0
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=4", "--master-addr=127.0.0.1",
                f"--master-port={_port()}"]  # fmt: skip
    shared = command(folder, name, recipe, two, *more, "parallel.context=2", f"parallel.shard={shard}")
    process = start([*launcher, "-m", "flowrl", "train", *shared], folder, GLOO_SOCKET_IFNAME="lo")
    _, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    worst, rows = 0.0, list(zip(metrics(one), metrics(two), strict=True))
    for mine, theirs in rows:
        assert mine.keys() == theirs.keys()
        worst = max(worst, *(abs(mine[k] - theirs[k]) / max(1.0, abs(mine[k]), abs(mine.get("reward", 0.0)))
                             for k in mine))  # fmt: skip
    ratios = [theirs["ratio_first_deviation"] for _, theirs in rows if "ratio_first_deviation" in theirs]
    return {
        "case": f"{recipe} of {name}, 4 processes, context 2, shard {shard}", "metrics": worst,
        "ratio_first_deviation": max(ratios, default=None), "lora": differences(lora_tensors(one), lora_tensors(two)),
    }  # fmt: skip


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        spawn(_worker, (_port(), folder), nprocs=2)
        results = json.loads((folder / "cases.json").read_text())
        for name, recipe, shard in (("wan", "grpo", 1), ("wan", "grpo", 2), ("qwen_image", "forward", 2)):
            results.append(four(folder, name, recipe, shard))
    for result in results:
        print(json.dumps(result), flush=True)
    given.out.write_text(json.dumps(origin() | {"results": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
