"""What `flowrl compare` keeps of a run is used again for the same weights, model and prompts alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from evaluation_runs import make_run

from flowrl.comparing import measure as module
from flowrl.comparing.measure import measure


def test_a_measure_is_of_the_weights_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = str(tmp_path / "run" / "prompts.txt")
    run = make_run(tmp_path / "run", prompts={"train": prompts, "eval": prompts})
    marks: list[str] = []

    def stop(*given: Any) -> None:
        raise RuntimeError("it is measured")

    def noted(inputs: Any) -> str:
        marks.append(json.dumps(inputs, sort_keys=True))
        return marks[-1]

    monkeypatch.setattr(module, "load_pipeline", stop)
    monkeypatch.setattr(module, "digest_of", noted)
    kept, weights = run / "measure.json", run / "lora" / "pytorch_lora_weights.safetensors"
    kept.write_text(json.dumps({"kl": 1.0, "diversity": 2.0}))  # later than the weights, of which it says nothing
    with pytest.raises(RuntimeError, match="it is measured"):
        measure(run)
    kept.write_text(json.dumps({"kl": 1.0, "diversity": 2.0, "of": marks[0]}))
    assert measure(run) == {"kl": 1.0, "diversity": 2.0}
    old = weights.stat()
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    os.utime(weights, ns=(old.st_atime_ns, old.st_mtime_ns))
    with pytest.raises(RuntimeError, match="it is measured"):
        measure(run)
