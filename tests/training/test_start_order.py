"""The start of a run: what is loaded when, what comes from disk, and that no number depends on it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakSet

import diffusers
import pytest
import transformers
from tiny_runs import PROMPTS, TinyRuns, lora, metrics, tiny_runs
from torch import nn
from two_processes import on_two_processes

from flowrl.cli import main

FREED = "pipeline.free_text_encoders=true"
COUNTED = """
import os
import sys
from pathlib import Path

from flowrl.cli import main
from flowrl.pipelines.shared.prompt_embeddings import Embedded

row = Embedded._row

def noted(self, key, images):
    def embed(prompt, sources, given=self.encode_one):
        with Path(sys.argv[1], os.environ["RANK"]).open("a") as file:
            file.write(prompt + "\\n")
        return given(prompt, sources)

    self.encode_one, before = embed, self.encode_one
    try:
        return row(self, key, images)
    finally:
        self.encode_one = before

Embedded._row = noted
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_sd3_folder: Path) -> TinyRuns:
    folder = tmp_path_factory.mktemp("start")
    (folder / "held_out.txt").write_text("a yellow star\n")
    evaluated = {"eval_every": 1, "num_iterations": 1}
    return tiny_runs(folder, tiny_sd3_folder, **evaluated, prompts={
        "train": str(folder / "prompts.txt"), "eval": str(folder / "held_out.txt"), "negative": "blurred",
    })  # fmt: skip


@pytest.fixture(scope="module")
def plain(runs: TinyRuns) -> Path:
    return runs.train("plain")


def equal(a: Path, b: Path) -> None:
    assert metrics(a) == metrics(b)
    assert lora(a) == lora(b)


@contextmanager
def watched(what: Callable[[nn.Module], None]) -> Iterator[None]:
    """Inside, `what` is told of every network that a library has read, when it is there."""
    readers = (diffusers.ModelMixin, transformers.PreTrainedModel)
    with mock.patch.object(readers[0], "from_pretrained", _told(readers[0].from_pretrained, what)):
        with mock.patch.object(readers[1], "from_pretrained", _told(readers[1].from_pretrained, what)):
            yield


def _told(read: Any, what: Callable[[nn.Module], None]) -> Any:
    def reading(cls: Any, *args: Any, **options: Any) -> Any:
        found = read.__func__(cls, *args, **options)
        what(found[0] if isinstance(found, tuple) else found)
        return found

    return classmethod(reading)


@pytest.mark.slow
def test_no_number_depends_on_the_order_or_on_the_cache(runs: TinyRuns, plain: Path, tmp_path: Path) -> None:
    cache = f"prompts.cache={tmp_path / 'cache'}"
    read: list[str] = []
    with watched(lambda network: read.append(type(network).__name__)):
        equal(runs.train("freed", FREED), plain)
        assert [name for name in read if name != "AutoencoderKL"][-1] == "SD3Transformer2DModel"
        assert len([name for name in read if name.startswith(("CLIP", "T5"))]) == 3
        read.clear()
        equal(runs.train("written", FREED, cache), plain)
        assert len(list((tmp_path / "cache").glob("*/*.safetensors"))) == len(PROMPTS) + 2  # held out, negative
        assert len(read) == 5
        read.clear()
        equal(runs.train("read", FREED, cache), plain)
        assert read == ["AutoencoderKL", "SD3Transformer2DModel"]
        equal(runs.train("kept", cache), plain)  # encoders stay, rows come from disk all the same


@pytest.mark.slow
def test_an_entry_cut_short_is_made_again(runs: TinyRuns, plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = runs.folder / "cut"
    runs.train("before-cut", FREED, f"prompts.cache={cache}")
    entry = sorted(cache.glob("*/*.safetensors"))[0]
    whole = entry.read_bytes()
    entry.write_bytes(whole[: len(whole) // 2])
    capsys.readouterr()
    equal(runs.train("after-cut", FREED, f"prompts.cache={cache}"), plain)
    assert f"Note: {entry} cannot be used as an embedding" in capsys.readouterr().out
    head = 8 + int.from_bytes(whole[:8], "little")  # the library writes what it says in any order
    assert entry.read_bytes()[head:] == whole[head:]


def test_a_folder_that_cannot_be_written_is_refused_before_anything_loads(
    runs: TinyRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    with watched(lambda network: pytest.fail(type(network).__name__)):
        assert main(["train", str(runs.config), f"prompts.cache={runs.config / 'below'}"]) != 0
    assert "prompts.cache: nothing can be written into" in capsys.readouterr().err


@pytest.mark.slow
def test_the_start_holds_the_denoiser_or_the_encoders(runs: TinyRuns) -> None:
    networks, sizes, alive = WeakSet[nn.Module](), list[tuple[str, int]](), list[int]()

    def look(network: nn.Module) -> None:
        """Networks come into being here alone, so that this is where they are most."""
        networks.add(network)
        gc.collect()
        held = {id(one): sum(p.nbytes for p in one.parameters()) for one in networks}
        sizes.append((type(network).__name__, held[id(network)]))
        alive.append(sum(held.values()))

    gc.collect()
    gc.freeze()  # what other tests have left would be looked through each time
    with watched(look):
        runs.train("peak", FREED)
        freed = max(alive)
        gc.collect()
        alive.clear()
        sizes.clear()
        runs.train("whole")
    denoiser, vae = (dict(sizes)[kind] for kind in ("SD3Transformer2DModel", "AutoencoderKL"))
    encoders = [size for kind, size in sizes if kind.startswith(("CLIP", "T5"))]
    assert len(encoders) == 3
    assert freed == vae + max(denoiser, sum(encoders)) <= denoiser + max(encoders) + vae
    assert max(alive) == vae + denoiser + sum(encoders)


@pytest.mark.slow
def test_two_processes_share_the_embedding(runs: TinyRuns, plain: Path, warm_python: str) -> None:
    cache, counts, out = runs.folder / "shared", runs.folder / "counts", runs.folder / "shared-run"
    counts.mkdir()
    (runs.folder / "counted.py").write_text(COUNTED)
    on_two_processes(
        runs.folder, "counted.py", str(counts), "train", str(runs.config), f"out={out}", FREED,
        f"prompts.cache={cache}", python=warm_python,
    )  # fmt: skip
    mine, theirs = (set((counts / rank).read_text().splitlines()) - {"blurred"} for rank in ("0", "1"))
    assert mine | theirs == {*PROMPTS, "a yellow star"}
    assert not mine & theirs
    assert abs(len(mine) - len(theirs)) <= 1
    rewards, others = ([row["reward"] for row in metrics(run) if "reward" in row] for run in (plain, out))
    assert others == pytest.approx(rewards, rel=1e-5)  # images are drawn in other batches
