"""The comparison with flow_grpo, against small stand-ins of its functions: so that it works with a checkout."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import sys
from pathlib import Path

import peer_flow_grpo
import pytest
import torch
from peer_checkout import PIPELINE, SCRIPT, STEP, TRACKER, function_of, load_checkout
from peer_flow_grpo import CASES, measure, spread, table

STAND_INS = {
    STEP: '''
import math
import torch

def sde_step_with_logprob(self, model_output, timestep, sample, noise_level=0.7, prev_sample=None, generator=None):
    """Flow-SDE, eq. 9 of arXiv 2505.05470; mean log-density of each row."""
    place = [self.index_for_timestep(t) for t in timestep]
    now, after = (self.sigmas[[i + k for i in place]].view(-1, 1, 1, 1) for k in (0, 1))
    g = noise_level * (now / (1 - torch.where(now == 1, self.sigmas[1], now))).sqrt()
    h = now - after
    mean = sample - h * (model_output + g**2 / (2 * now) * (sample + (1 - now) * model_output))
    std = g * h.sqrt()
    if prev_sample is None:
        prev_sample = mean + std * torch.randn(mean.shape)
    log = -((prev_sample.detach() - mean) ** 2) / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)
    return prev_sample, log.mean(dim=(1, 2, 3)), mean, g
''',
    PIPELINE: """
import torch
from .sd3_sde_with_logprob import sde_step_with_logprob

@torch.no_grad()
def pipeline_with_logprob(self, prompt_embeds, pooled_prompt_embeds, negative_prompt_embeds,
                          negative_pooled_prompt_embeds, num_inference_steps, guidance_scale, output_type, noise_level):
    embeds = torch.cat([negative_prompt_embeds, prompt_embeds])
    pooled = torch.cat([negative_pooled_prompt_embeds, pooled_prompt_embeds])
    size = self.transformer.config.sample_size
    x = torch.randn(len(prompt_embeds), self.transformer.config.in_channels, size, size)
    path, logs = [x], []
    self.scheduler.set_timesteps(num_inference_steps)
    for t in self.scheduler.timesteps:
        no, yes = self.transformer(
            hidden_states=torch.cat([x, x]), timestep=t.expand(2 * len(x)), encoder_hidden_states=embeds,
            pooled_projections=pooled, return_dict=False,
        )[0].chunk(2)
        x, log, _, _ = sde_step_with_logprob(
            self.scheduler, (no + guidance_scale * (yes - no)).float(), t[None], x, noise_level=noise_level
        )
        path.append(x)
        logs.append(log)
    z = x / self.vae.config.scaling_factor + self.vae.config.shift_factor
    return self.image_processor.postprocess(self.vae.decode(z)[0], output_type=output_type), path, logs
""",
    TRACKER: """
import numpy as np

class PerPromptStatTracker:
    def __init__(self, global_std=False):
        pass

    def update(self, prompts, rewards):
        rewards, names = np.asarray(rewards, dtype=np.float64), np.asarray(prompts)
        found = np.zeros_like(rewards)
        for name in set(prompts):
            own = rewards[names == name]
            found[names == name] = (own - own.mean(0)) / (own.std(0) + 1e-4)
        return found

    def clear(self):
        pass
""",
    SCRIPT: """
import a_library_that_nobody_has

def compute_log_prob(transformer, pipeline, sample, j, embeds, pooled_embeds, config):
    out = transformer(
        hidden_states=torch.cat([sample["latents"][:, j]] * 2), timestep=torch.cat([sample["timesteps"][:, j]] * 2),
        encoder_hidden_states=embeds, pooled_projections=pooled_embeds, return_dict=False,
    )[0]
    no, yes = out.chunk(2)
    no = no.detach()
    return sde_step_with_logprob(
        pipeline.scheduler, (no + config.sample.guidance_scale * (yes - no)).float(), sample["timesteps"][:, j],
        sample["latents"][:, j].float(), prev_sample=sample["next_latents"][:, j].float(),
        noise_level=config.sample.noise_level,
    )
""",
}
"""What has the names and arguments of the checkout's functions and computes the same, in other words."""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkout")
    for name, source in STAND_INS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(source)
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in STAND_INS}


def test_a_folder_without_the_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lacks flow_grpo/.*sd3_pipeline.*check out ac4c86e"):
        load_checkout(tmp_path)


def test_another_version_is_refused(checkout: Path) -> None:
    with pytest.raises(ValueError, match=r"not flow_grpo at commit ac4c86e.*stat_tracking\.py.* differ"):
        load_checkout(checkout)


def test_a_function_is_cut_out_of_a_script_with_and_without_its_detach() -> None:
    source = "import nothing\n\ndef double(x):\n    x = x.detach()\n    return x * factor\n"
    x = torch.ones(2, requires_grad=True)
    plain, cut = (function_of(source, "double", {"factor": 2}, detached=detached)(x) for detached in (True, False))
    assert torch.equal(plain, cut)
    assert cut.requires_grad
    assert not plain.requires_grad
    with pytest.raises(ValueError, match="no function triple"):
        function_of(source, "triple", {})
    with pytest.raises(ValueError, match="0 statements"):
        function_of("def double(x):\n    return 2 * x\n", "double", {}, detached=False)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["float32, kl 0.04", "float32, prompt's branch"])
def test_gradients_are_equal_and_rows_are_counted(checkout: Path, case: str) -> None:
    """The gradient is that of all rows, or of the prompt's, to float32 rounding; the other one is far from it."""
    small = ("num_iterations=2", "prompts_per_step=1", "group_size=2", "sampler.num_steps=2", "policy.lora_rank=2",
             "rewards=[{name: jpeg_compressibility}]")  # fmt: skip
    found = measure(load_checkout(checkout, digests(checkout)), CASES[case], small)
    gradients, detached = found["gradients"], CASES[case].detached
    same, other = ("of the prompt's branch", "of both branches")[:: 1 if detached else -1]
    assert gradients[f"relative difference, {same}"] < 1e-4  # float32 through four blocks
    assert gradients[f"relative difference, {other}"] > 0.1
    assert gradients[f"cosine, {same}"] > 1 - 1e-8
    assert gradients["largest difference of sigmas"] == 0.0
    assert gradients[f"its largest deviation of a ratio from 1, {same}"] < 1e-5
    assert found["largest first deviation of flowrl's ratio"] == 0.0
    # Two images, two rows each: two steps are sampled and one is trained, with KL under the reference too.
    forward = 8 + 4 + (0 if detached else 4)
    assert found["rows"] == {
        "flowrl": {"forward": forward, "graph": 2 if detached else 4},
        "flow_grpo": {"forward": forward, "graph": 4},
    }
    assert found["rounds"] == 1
    assert all(turn[side]["cpu"] > turn[side]["update_cpu"] > 0 for turn in found["turns"] for side in found["rows"])
    assert "float32" in table({case: found})


def test_spread_is_of_the_middle() -> None:
    assert spread([3.0, 1.0, 8.0]) == {"median": 3.0, "least": 1.0, "largest": 8.0}


def test_the_command_writes_what_its_cases_found(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without measuring: what a case's process would have written."""
    phase = {name: {"median": 1.5, "least": 1.0, "largest": 2.0} for name in peer_flow_grpo._PHASES}
    rows = {side: {"forward": 4, "graph": 2} for side in ("flowrl", "flow_grpo")}
    asked = list[list[str]]()

    def started(words: list[str], **_: object) -> None:
        asked.append(words)
        out = next(word.removeprefix("--out=") for word in reversed(words) if word.startswith("--out="))
        Path(out).write_text(json.dumps({"rounds": 8, "rows": rows, "times faster": phase}))

    monkeypatch.setattr(peer_flow_grpo, "origin", lambda: {"command": shlex.join(["python", *sys.argv])})
    monkeypatch.setattr("subprocess.run", started)
    monkeypatch.setattr(peer_flow_grpo, "load_checkout", lambda folder: None)
    out = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["peer_flow_grpo.py", "--checkout", str(checkout), "--out", str(out),
                                      "--case", "float32", "--case=bfloat16"])  # fmt: skip
    peer_flow_grpo.main()
    found = json.loads(out.read_text())
    assert list(found["cases"]) == ["float32", "bfloat16"]
    assert str(tmp_path) not in out.read_text()
    assert str(checkout) not in out.read_text()
    assert "| float32 | 8 | 4 + 2 / 4 + 2 | 1.50 (1.00 to 2.00) |" in capsys.readouterr().out
    assert [word for words in asked for word in words if word.startswith("--case")] == ["--case=float32",
                                                                                    "--case=bfloat16"]  # fmt: skip


def test_every_trial_finds_the_helpers_that_it_imports() -> None:
    """Tests have the helpers on their path, a command of its own has not."""
    tests = Path(__file__).parent
    helpers = {path.stem for path in (tests / "helpers").rglob("*.py")}
    for path in (tests / "trials").rglob("*.py"):
        text = path.read_text()
        named = set(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE))
        if "__main__" in text and named & helpers - {one.stem for one in path.parent.glob("*.py")}:
            assert re.search(r"^(sys\.path|.*HELPERS).*$", text, re.MULTILINE), path
