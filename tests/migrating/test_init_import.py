"""`flowrl init --from`: files of four toolkits, in small, become ours with every key told of; bad ones are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from counted_operations import measured_once

from flowrl import cli
from flowrl.config.train import load_config
from flowrl.migrating.foreign_files import read_foreign
from flowrl.migrating.imported import Line, translate

BASE = """
import ml_collections

def get_config():
    config = ml_collections.ConfigDict()
    config.seed = 7
    config.num_epochs = 100000
    config.mixed_precision = "no"
    config.resolution = 64
    config.logdir = "logs"
    config.pretrained = pretrained = ml_collections.ConfigDict()
    pretrained.model = "nobody/model"
    pretrained.revision = "main"
    config.sample = sample = ml_collections.ConfigDict()
    sample.num_steps = 4
    sample.guidance_scale = 4.5
    sample.sde_window_size = 2
    sample.sde_window_range = (0, 2)
    sample.global_std = True
    config.train = train = ml_collections.ConfigDict()
    train.timestep_fraction = 1.0
    train.learning_rate = 3e-4
    train.adam_beta1 = 0.9
    train.beta = 0.0
    config.prompt_fn = "general_ocr"
    return config
"""
FLOW_GRPO = """
import imp
import os

base = imp.load_source("base", os.path.join(os.path.dirname(__file__), "base.py"))
open("ran", "w").write("a file that is read was run")

def shared():
    config = base.get_config()
    config.dataset = os.path.join(os.getcwd(), "dataset/words")
    return config

def small():
    gpu_number = 2
    config = shared()
    config.pretrained.model = "asset:tiny-sd3"
    config.sample.train_batch_size = 4
    config.sample.num_image_per_prompt = 4
    each = config.sample.train_batch_size
    config.sample.num_batches_per_epoch = int(4/(gpu_number*each/config.sample.num_image_per_prompt))
    assert config.sample.num_batches_per_epoch % 2 == 0, "even"
    config.train.gradient_accumulation_steps = config.sample.num_batches_per_epoch//2
    config.train.beta = 0.04
    config.reward_fn = {
        "jpeg_compressibility": 1,
    }
    config.save_dir = f'logs/small'
    return config

def get_config(name):
    return globals()[name]()
"""
FLOW_FACTORY = """
launcher: accelerate
data: {dataset_dir: dataset/words, max_dataset_size: 10}
model: {model_name_or_path: "asset:tiny-sd3", finetune_type: lora, lora_rank: 8, target_modules: default}
train:
  trainer_type: grpo
  clip_range: [-1.0e-4, 2.0e-4]
  kl_beta: 0
  resolution: [64, 64]
  num_inference_steps: 6
  guidance_scale: 2.0
  per_device_batch_size: 3
  group_size: 4
  unique_sample_num_per_epoch: 4
  global_std: false
  gradient_step_per_epoch: 2
  ema_decay: 0.9
  ema_update_interval: 4
scheduler: {dynamics_type: CPS, num_sde_steps: 1, sde_steps: [1, 2, 3]}
rewards: {name: r, reward_model: PickScore_Rank, batch_size: 16}
"""
VERL_OMNI = """set -x
# python3 -m verl_omni.trainer.main_diffusion data.train_batch_size=99
GPUS=4
TP=2
python3 -m verl_omni.trainer.main_diffusion \\
    data.train_files=$HOME/train.parquet \\
    data.train_batch_size=8 \\
    actor_rollout_ref.model.algorithm=flow_grpo \\
    actor_rollout_ref.model.path=asset:tiny-sd3 \\
    actor_rollout_ref.model.lora_rank=${RANK:-16} \\
    actor_rollout_ref.model.target_modules="['to_q','to_k']" \\
    actor_rollout_ref.actor.optim.lr=3e-4 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=4 \\
    actor_rollout_ref.rollout.n=4 \\
    actor_rollout_ref.rollout.pipeline.height=64 \\
    actor_rollout_ref.rollout.pipeline.width=64 \\
    actor_rollout_ref.rollout.agent.num_workers=$((GPUS / TP)) \\
    actor_rollout_ref.rollout.algo.sde_window_size=2 \\
    actor_rollout_ref.rollout.algo.sde_window_range="[0,5]" \\
    +actor_rollout_ref.rollout.engine_kwargs.vllm_omni.max_num_seqs=8 \\
    reward.custom_reward_function.name=compute_score_ocr \\
    trainer.logger='["console", "wandb"]' \\
    trainer.test_freq=-1 \\
    "$@"
"""
DANCE_GRPO = """mkdir images
torchrun --nnodes=2 --nproc_per_node=4 --node_rank=0 fastvideo/train_grpo_flux.py \\
    --pretrained_model_name_or_path data/flux --data_json_path data/captions.json \\
    --train_batch_size 1 --num_generations 12 --gradient_accumulation_steps 4 --learning_rate 1e-5 \\
    --sampling_steps 16 --eta 0.3 --h 256 --w 256 --t 1 --cfg 0.0 --use_hpsv2 --use_group --timestep_fraction 0.6 \\"""


@pytest.fixture(autouse=True)
def _measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured_once(monkeypatch)


def written(folder: Path) -> dict[str, str]:
    """A file of each toolkit, and how it is given."""
    files = {"base.py": BASE, "grpo.py": FLOW_GRPO, "factory.yaml": FLOW_FACTORY, "verl.sh": VERL_OMNI,
             "dance.sh": DANCE_GRPO}  # fmt: skip
    for name, text in files.items():
        (folder / name).write_text(text)
    return {"flow_grpo": f"{folder / 'grpo.py'}:small", "Flow-Factory": str(folder / "factory.yaml"),
            "verl-omni": str(folder / "verl.sh"), "DanceGRPO": str(folder / "dance.sh")}  # fmt: skip


def line_of(given: str, key: str) -> Line:
    """What became of a key."""
    return next(line for line in translate(read_foreign(given)).lines if line.key == key)


EXPECTED: dict[str, dict[str, Any]] = {
    "flow_grpo": {
        "pipeline.model": "asset:tiny-sd3", "seed": 7, "pipeline.dtype": "float32", "pipeline.width": 64,
        "prompts_per_step": 4, "group_size": 4, "updates_per_rollout": 2, "rollout_batch_size": 4, "adv_std": "global",
        "kl_coef": 0.04, "kl_type": "no_dt", "eval.guidance_scale": 4.5, "sampler.sde_window_size": 0,
        "sampler.trained_fraction": 1.0, "prompts.train": "dataset/words/train.txt", "optim.betas": [0.9, 0.999],
    },
    "Flow-Factory": {
        "clip_range": [1e-4, 2e-4], "prompts_per_step": 4, "group_size": 4, "updates_per_rollout": 2,
        "adv_std": "group", "policy.ema_every": 8,
        "sampler.kernel": "cps", "sampler.sde_window_range": [1, 4], "sampler.noise_level": 0.7,
        "optim.lr": 1e-5, "reward_aggregation": "gdpo", "prompts.eval": "dataset/words/test.jsonl",
    },
    "verl-omni": {
        "prompts_per_step": 8, "group_size": 4, "updates_per_rollout": 2, "policy.lora_rank": 16, "eval_every": 0,
        "policy.target_modules": ["to_q", "to_k"], "optim.lr": 3e-4, "optim.weight_decay": 0.01, "adv_std": "global",
        "sampler.sde_window_range": [0, 5], "sampler.guidance_scale": 1.0, "rewards": [{"name": "ocr", "weight": 1.0}],
    },
    "DanceGRPO": {
        "pipeline.model": "black-forest-labs/FLUX.1-dev", "policy.train": "full", "sampler.kernel": "dance_sde",
        "prompts_per_step": 8, "group_size": 12, "updates_per_rollout": 3, "same_latent": False, "sampler.shift": 1.0,
        "optim.max_grad_norm": 2.0, "optim.warmup": 10, "sampler.trained_steps": "random", "pipeline.height": 256,
    },
}  # fmt: skip
"""Toolkit -> what its file says here, worked out by hand."""


@pytest.mark.parametrize("kind", EXPECTED)
def test_keys_are_what_they_mean_there(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    foreign = read_foreign(written(tmp_path)[kind])
    done = translate(foreign)
    assert foreign.kind == kind
    assert {key: done.keys.get(key) for key in EXPECTED[kind]} == EXPECTED[kind]
    assert [line.key for line in done.lines if not line.unsaid] == list(foreign.keys)
    assert all(line.made if line.fate == "translated" else line.why and not line.made for line in done.lines)
    assert "not known" not in " ".join(line.why for line in done.lines)
    assert not (tmp_path / "ran").exists()  # Python is read, never run


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXPECTED)
def test_what_is_written_is_planned(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, ours = written(tmp_path)[kind], tmp_path / "ours.yaml"
    words = [] if kind == "DanceGRPO" else ["--reward", "jpeg_compressibility"]
    assert cli.main(["init", "--from", given, *words, "--out", str(ours)]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80 + len(str(tmp_path))
    text = ours.read_text()
    counts = re.search(
        r"# (\d+) keys of \S+: (\d+) translated, (\d+) without counterpart, (\d+) dropped, (\d+) unknown", text
    )
    assert counts is not None
    keys, *fates = map(int, counts.groups())
    assert keys == sum(fates) == len(read_foreign(given).keys)
    for key in read_foreign(given).keys:
        assert f"#   {key} =" in text
    config = load_config(ours)
    assert config.reward_aggregation == "sum"  # of one reward
    assert config.rewards[0].name == (words[-1] if words else "hps")
    assert cli.main(["plan", str(ours)]) == 0


def test_what_is_not_the_file_s_is_pointed_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = written(tmp_path)["verl-omni"]
    ours = tmp_path / "ours.yaml"
    assert cli.main(["init", "--from", given, "--model", "asset:tiny-sd3", "--out", str(ours)]) == 0
    assert "look: the prompts are those of" in capsys.readouterr().out
    assert "# Look: the prompts are those of" in ours.read_text()


def test_defaults_of_a_function_s_base_are_told_from_what_it_says(tmp_path: Path) -> None:
    given = written(tmp_path)["flow_grpo"]
    assert "only its default" in line_of(given, "sample.sde_window_size").why
    assert "stopped by hand" in line_of(given, "num_epochs").why
    text = FLOW_GRPO.replace("    gpu_number = 2\n", "")
    start, end = text.index("int(4/"), text.index("    assert config")
    text = f"{text[:start]}4\n    config.sample.sde_window_size = 1\n{text[end:]}"
    (tmp_path / "grpo.py").write_text(text)
    assert line_of(given, "sample.sde_window_size").made == {"sampler.sde_window_size": 1}
    assert "how many GPUs" in line_of(given, "sample.num_batches_per_epoch").why


def test_keys_and_rewards_that_are_not_known_are_said_to_be(tmp_path: Path) -> None:
    file = tmp_path / "factory.yaml"
    more = "  kl_beta: 0.1\n  larning_rate: 1\n  optimizer_type: lion\n"
    file.write_text(FLOW_FACTORY.replace("  kl_beta: 0\n", more).replace("PickScore_Rank", "MyScore"))
    done = {line.key: line for line in translate(read_foreign(str(file))).lines}
    assert done["train.larning_rate"].why == "not known of this toolkit"
    assert "optim.name" in done["train.optimizer_type"].why
    assert done["train.kl_beta"].fate == done["rewards[0].reward_model"].fate == "without counterpart"
    assert "choose rewards" in done["rewards[0].reward_model"].why


def test_a_kl_of_velocities_is_taken_over(tmp_path: Path) -> None:
    file = tmp_path / "factory.yaml"
    file.write_text(FLOW_FACTORY.replace("  kl_beta: 0\n", "  kl_beta: 0.04\n  kl_type: v-based\n"))
    assert line_of(str(file), "train.kl_beta").made == {"kl_coef": 0.04}
    assert line_of(str(file), "train.kl_type").made == {"kl_type": "velocity"}
    file.write_text(file.read_text().replace("v-based", "x-based"))
    assert "a square of latents" in line_of(str(file), "train.kl_beta").why


def _python(text: str) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        (folder / "x.py").write_text(text)
        return str(folder / "x.py")

    return write


def _file(name: str, text: str) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        (folder / name).write_text(text)
        return str(folder / name)

    return write


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: str(folder / "none.py"), "there is no file"),
        (_python("def f(:\n"), "is not Python: line 1"),
        (_python("x = 1\n"), "no function without arguments"),
        (_python("x" + "(" * 500), "is not Python"),
        (_python("def f():\n    config = base.get_config()\n    return config\n"), "there is no base.py beside it"),
        (_python("def f():\n    config = dict_of(4)\n    return config\n"), "is read, never run: line 2, 'dict_of(4)'"),
        (_python("import os\ndef f():\n    os.system('touch ran')\n    return {}\n"), "is read, never run: line 3"),
        (_python("def f():\n    x = 'a' * 10**9\n    return {}\n"), "is read, never run"),
        (_python("def f():\n    return f()\n"), "more than 20 deep"),
        (_python("def f():\n    c = {}\n    c.seed = 3\n    c.own = c\n    return c\n"), "holds itself"),
        (_python("def f():\n    x = [1]\n" + "    x = [x, x]\n" * 60 + "    return {}\n"), "is read, never run"),
        (_python("def f():\n    x = 9\n" + "    x = x * x\n" * 60 + "    return {}\n"), "is read, never run"),
        (_python("def f():\n    return {}\ndef g():\n    return {}\n"), "holds 2 configurations; name one"),
        (_python("def f():\n    return {'seed': 1}\n"), "names no model: say it with --model"),
        (lambda folder: _python("def first():\n    return {}\n")(folder) + ":frist", "did you mean"),
        (_file("x.yaml", "a: [1\n"), "not valid YAML"),
        (_file("x.yaml", "model: sd3\ntrain: 3\n"), "of no toolkit that is known"),
        (_file("x.yaml", FLOW_FACTORY.replace("grpo", "art")), "its algorithm is art"),
        (_file("x.yaml", "model: {model_type: wan2_v2v}\ntrain: {trainer_type: grpo}\n"), "build on lucy_edit_grpo"),
        (_file("x.sh", "echo hello\n"), "of no toolkit that is known"),
        (_file("x.sh", "python -m verl_omni.x data.seed=1 a.b='c\n"), "cannot be read"),
        (_file("x.sh", "A=xx\n" + "A=$A$A\n" * 60 + "torchrun train_grpo_wan.py --seed $A\n"), "names no model"),
        (_file("x.sh", "torchrun train_grpo_wan.py --seed 1\n"), "names no model"),
        (_file("x.txt", "a prompt\n"), "of no toolkit that is known"),
    ],
)
def test_bad_files_are_refused_in_words_and_nothing_is_written(
    make: Callable[[Path], str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    given, ours = make(tmp_path), tmp_path / "ours.yaml"
    assert cli.main(["init", "--from", given, "--out", str(ours)]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert not ours.exists()
    assert not (tmp_path / "ran").exists()


def test_values_that_are_refused_here_name_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(FLOW_FACTORY.replace("guidance_scale: 2.0", "guidance_scale: -1"))
    assert cli.main(["init", "--from", str(file), "--out", str(tmp_path / "ours.yaml")]) == 1
    error = capsys.readouterr().err
    assert "x.yaml says is not valid here, so replace it by key=value" in error
    assert "sampler.guidance_scale" in error
