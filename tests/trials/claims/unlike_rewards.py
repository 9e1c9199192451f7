"""What is left of a verdict's say when it is added to a reward of another scale: sum, GDPO, log-taming. Nothing is
trained.

    python tests/trials/claims/unlike_rewards.py --out docs/research/claims/unlike_rewards.json

`asset:tiny-sd3` draws 12 images for each of 24 training prompts from five seeds of start noise, at its default
sampling; GenEval's verdict is one reward, what comes of the JPEG file's bytes the other. Decided before any was
drawn: the measure is the correlation of advantages with the verdict within a prompt, over prompts whose verdicts
differ; `gdpo` is that of GDPO (arXiv 2601.05242) less that of the sum, with 5,000 less the bytes beside the verdict;
`log_tame` is that of log-taming (arXiv 2512.04784) less that of the sum, with 100 exp(-2 z) beside it, z the bytes in
standard deviations.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parents[1])]

from origin import origin  # noqa: E402

from flowrl.advantages.normalise import aggregate  # noqa: E402
from flowrl.advantages.reward_maps import log_tame  # noqa: E402
from flowrl.config.train import resolve_path  # noqa: E402
from flowrl.generation.models import find_source, load_source  # noqa: E402
from flowrl.prompts.loading import read_prompts, spread  # noqa: E402
from flowrl.rewards import RewardInputs, to_uint8  # noqa: E402
from flowrl.rewards.geneval import Geneval  # noqa: E402
from flowrl.rewards.jpeg import jpeg_bytes  # noqa: E402
from flowrl.runtime.files import write_atomically  # noqa: E402
from flowrl.runtime.randomness import counter_normal  # noqa: E402
from flowrl.training.heldout import generate  # noqa: E402

SEEDS, PROMPTS, GROUP = 5, 24, 12
EQUAL = torch.ones(2)


def say(advantage: Tensor, verdict: Tensor) -> float:
    """Correlation of [P, G] advantages with verdicts within a prompt, over prompts whose verdicts differ."""
    differ = verdict.std(1) > 0
    a, v = (x[differ] - x[differ].mean(1, keepdim=True) for x in (advantage.double(), verdict.double()))
    return float((a * v).sum() / (a.square().sum() * v.square().sum()).sqrt())


def measured(verdict: Tensor, size: Tensor) -> dict[str, float]:
    """The say that the verdict has under each rule; [P, G] verdicts and bytes."""
    group = torch.arange(PROMPTS).repeat_interleave(GROUP)
    z = (size - size.mean()) / size.std()
    found: dict[str, float] = {}
    for name, other in (("bytes", 5000 - size), ("tail", 100 * torch.exp(-2 * z))):
        raw = torch.stack([verdict.flatten(), other.flatten()])
        rows = {"sum": aggregate(raw, group, EQUAL, "sum"), "gdpo": aggregate(raw, group, EQUAL, "gdpo", correction=1),
                "log_tame": aggregate(log_tame(raw), group, EQUAL, "sum")}  # fmt: skip
        found |= {f"{name}_{rule}": say(row.view(PROMPTS, GROUP), verdict) for rule, row in rows.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    rows = read_prompts(resolve_path("asset:prompts/world_train.jsonl"))
    prompts = [rows[place] for place in spread(len(rows), PROMPTS)]
    pipeline = load_source(find_source("asset:tiny-sd3"), "cpu")
    schedule, judge = pipeline.schedule(10, "diffusers"), Geneval(credit="official").load(torch.device("cpu"))
    found = []
    for seed in range(SEEDS):
        verdicts, sizes = [], []
        for place, prompt in enumerate(prompts):
            x = counter_normal((GROUP, *pipeline.latent_shape), seed, "unlike", place)
            images = generate(pipeline, [prompt] * GROUP, x, schedule, guidance_scale=3.0)
            inputs = RewardInputs(
                images=images, prompts=[prompt.text] * GROUP, metadata=[prompt.metadata] * GROUP,
                group_ids=torch.zeros(GROUP, dtype=torch.int64), sample_ids=torch.arange(GROUP),
            )  # fmt: skip
            verdicts.append(judge(inputs, quirk=False)["official"])
            sizes.append([float(jpeg_bytes(image)) for image in to_uint8(images)])
        found.append(measured(torch.tensor(verdicts), torch.tensor(sizes)))
        print(found[-1], flush=True)
    effects = {
        "gdpo": {"per_seed": [row["bytes_gdpo"] - row["bytes_sum"] for row in found]},
        "log_tame": {"per_seed": [row["tail_log_tame"] - row["tail_sum"] for row in found]},
    }
    write_atomically(given.out, json.dumps(origin() | {"measured": found, "effects": effects}, indent=1) + "\n")


if __name__ == "__main__":
    main()
