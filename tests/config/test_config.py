"""The strict loader: what it accepts, what it refuses, and what the refusal says."""

from __future__ import annotations

import dataclasses
import itertools
import time
from pathlib import Path

import pytest
import yaml
from config_files import MINIMAL, minimal_file, refusal

from flowrl.config.foreign import foreign_words
from flowrl.config.overrides import typed_settings
from flowrl.config.rewards import RewardConfig
from flowrl.config.sections import PolicyConfig
from flowrl.config.strict_yaml import MAX_CHARACTERS, MAX_TOLD, dump, parse_yaml
from flowrl.config.train import ConfigError, TrainConfig, load_config, resolve_path, to_yaml

WORDS = foreign_words()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return minimal_file(tmp_path)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_defaults_and_derived_quantities(path: Path) -> None:
    config = load_config(path)
    assert (config.num_images, config.clip_bounds, config.policy.alpha) == (24, (1e-4, 1e-4), 64)
    assert config.sampler.stochastic_range == (0, 9)
    assert config.rewards[1] == RewardConfig(file="my.py", function="sharp", weight=0.5, options={"radius": 0.1})
    assert PolicyConfig(lora_rank=8, lora_alpha=4).alpha == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("optim.lr=1e-4", "optim.lr", 1e-4),
        ("optim.lr=1", "optim.lr", 1.0),
        ("clip_range=[1e-5, 2e-5]", "clip_range", (1e-5, 2e-5)),
        ("clip_range=1e-3", "clip_range", 1e-3),
        ("sampler.sde_window_range=[1,4]", "sampler.sde_window_range", (1, 4)),
        ("sampler.noise_level=null", "sampler.noise_level", None),
        ("policy.target_modules=[to_q, to_k]", "policy.target_modules", ("to_q", "to_k")),
        ("same_latent=true", "same_latent", True),
        ("same_latent=3", "same_latent", 3),
        ("out=2024", "out", "2024"),
        ("out=1e-4", "out", "1e-4"),
        ("out=null", "out", None),
        ("out=a=b", "out", "a=b"),
        ("out=run # 2", "out", "run # 2"),
        ("logging.tensorboard=false", "logging.tensorboard", False),
        ("micro_batch_size=8", "micro_batch_size", 8),
        ("adv_std=none", "adv_std", "none"),
    ],
)
def test_override_values_and_types(path: Path, override: str, key: str, value: object) -> None:
    node: object = load_config(path, [override])
    for part in key.split("."):
        node = getattr(node, part)
    assert node == value
    assert type(node) is type(value)


def test_later_overrides_win_and_reach_into_lists_and_options(path: Path) -> None:
    config = load_config(path, ["rewards.0.weight=2", "rewards.0.weight=3", "rewards.1.options.shape.kind=disk"])
    assert config.rewards[0].weight == 3.0
    assert config.rewards[1].options == {"radius": 0.1, "shape": {"kind": "disk"}}
    swapped = load_config(path, ["rewards=[{name: a}]", "rewards.0.weight=-1"])
    assert swapped.rewards == (RewardConfig(name="a", weight=-1.0),)


def test_round_trip_with_every_default_written_out(path: Path) -> None:
    tricky = ["out=yes", "policy.init_lora=1e-4", "rewards.1.options.text='010'", "clip_range=[1e-05, 3e+0]", "seed=7"]
    tricky.append("rewards.1.options.weights={'1': 0.5, two: [1, 2]}")
    config = load_config(path, tricky)
    text = to_yaml(config)
    again = path.with_name("again.yaml")
    assert load_config(write(again, text)) == config
    plain = yaml.safe_load(text)  # what a program with YAML 1.1 rules reads
    assert plain["out"] == "yes"
    assert plain["policy"]["init_lora"] == "1e-4"
    assert plain["clip_range"] == [1e-5, 3.0]
    assert plain["rewards"][1]["options"]["text"] == "010"
    assert plain["rewards"][1]["options"]["weights"] == {"1": 0.5, "two": [1, 2]}
    assert set(plain) == {field.name for field in dataclasses.fields(TrainConfig)}


@pytest.mark.parametrize("value", [{1: 2}, {"a": [{None: 1}]}, float("inf"), {"a": {1, 2}}])
def test_options_hold_only_what_a_configuration_can_write(value: object) -> None:
    """From Python too: what is read back has to equal what was given."""
    rewards = [{"name": "jpeg_size", "options": {"weights": value}}]
    with pytest.raises(ConfigError, match=r"rewards\.0\.options\.weights.*; use text, .*mappings whose keys are text"):
        load_config({"base": "tiny_recommended", "rewards": rewards})


def test_dump_quotes_what_our_own_rules_would_misread() -> None:
    values = {
        k: k for k in ("1e5", "-2E3", ".5", "null", "~", "<<", "=", "no", "1:30", "0x10", "2024-01-01", "", " a ")
    }
    assert parse_yaml(dump(values), "x") == values
    assert yaml.safe_load(dump(values)) == values


REFUSALS: list[tuple[list[str], list[str]]] = [
    (["sampler.sde_window_size=-1"], ["sampler.sde_window_size", "at least 0", "-1"]),
    (["sampler.sde_window_range=[1,2,3]"], ["a list of 2 values", "[1, 2, 3]"]),
    (["sampler.num_steps=0"], ["sampler.num_steps", "at least 1", "got 0"]),
    (["sampler.guidance_scale=-1"], ["sampler.guidance_scale", "-1"]),
    (["group_size=1"], ["group_size must be at least 2, got 1"]),
    (
        ["group_size=4", "same_latent=3"],
        ["same_latent is true, false or a divisor above 1 of group_size (4), got 3"],
    ),
    (["num_iterations=0"], ["num_iterations must be at least 1, got 0"]),
    (["prompts_per_step=0"], ["prompts_per_step must be at least 1"]),
    (["checkpoint_every=0"], ["checkpoint_every must be at least 1"]),
    (["keep_checkpoints=0"], ["keep_checkpoints must be at least 1"]),
    (["eval_every=-1"], ["eval_every must be at least 0"]),
    (["eval_every=5", "prompts.eval=null"], ["eval_every is 5", "prompts.eval"]),
    (["seed=-1"], ["seed must be at least 0"]),
    (["threads=0"], ["threads must be at least 1"]),
    (["kl_coef=-0.1"], ["kl_coef must be at least 0, got -0.1"]),
    (["clip_range=0"], ["clip_range", "[0, 0]", "1e-4"]),
    (["clip_range=[0.5,-1]"], ["clip_range", "[0.5, -1]"]),
    (["clip_range=[1.5,2]"], ["clip_range", "[1.5, 2]"]),
    (["clip_range=.inf"], ["clip_range", "a finite number", "inf"]),
    (["adv_clip_range=0"], ["adv_clip_range must be above 0, got 0"]),
    (["adv_std=batch"], ["group, global, none", "did you mean 'global'"]),
    (["adv_std=null"], ["one of group, global, none", "got None"]),
    (["optim.lr=-1e-4"], ["optim.lr must be at least 0, got -0.0001"]),
    (["optim.betas=[0.9, 1.0]"], ["optim.betas must lie in [0, 1)", "got 1"]),
    (["optim.eps=0"], ["optim.eps must be above 0"]),
    (["optim.max_grad_norm=0"], ["optim.max_grad_norm must be above 0"]),
    (["policy.ema_decay=1"], ["policy.ema_decay must lie in [0, 1)"]),
    (["policy.lora_rank=0"], ["policy.lora_rank must be at least 1"]),
    (["policy.target_modules=[]"], ["policy.target_modules is empty"]),
    (["policy.target_modules=to_q"], ["policy.target_modules must be a list", "'to_q'"]),
    (["pipeline.device=gpu"], ["auto, cpu, cuda, cuda:N or mps", "'gpu'"]),
    (["pipeline.dtype=bf16"], ["'bf16'", "did you mean 'bfloat16'"]),
    (["pipeline.model=''"], ["pipeline.model", "empty"]),
    (["pipeline.height=0"], ["pipeline.height must be at least 1"]),
    (["prompts.train=prompts.tsv"], [".txt, .jsonl or .csv", "prompts.tsv"]),
    (["rewards=[]"], ["rewards is empty"]),
    (["rewards.0.weight=0", "rewards.1.weight=0"], ["nothing to learn"]),
    (["rewards.0.file=x.py"], ["rewards.0:", "name: scene, file: x.py"]),
    (["rewards.1.function=null"], ["rewards.1:", "both file and function", "file: my.py"]),
    (["rewards.1={name: scene}"], ["rewards.1 and rewards.0", "'scene'", "weights"]),
    (["rewards.1={name: scene, label: other}"], ["rewards.1 and rewards.0", "'other'", "weights"]),
    (["rewards.0.label=x", "rewards.1.label=x"], ["rewards.0 and rewards.1 have the same label 'x'"]),
    (["rewards.0.label=a/b"], ["rewards.0:", "label", "'a/b'"]),
    (["rewards.2.weight=1"], ["no item '2'", "0, 1"]),
    (["rewards.first.weight=1"], ["no item 'first'"]),
    (["rewards={name: scene}"], ["rewards must be a list of mappings", "(a mapping)"]),
    (["rewards.1.options.when=!!timestamp 2024-01-01"], ["rewards.1.options.when", "datetime.date"]),
    (["updates_per_rollout=5"], ["updates_per_rollout (5)", "24 images", "[1, 2, 3, 4, 6, 8, 12, 24]"]),
    (["seed=1.5"], ["seed must be an integer, got 1.5 (a number)"]),
    (["seed=true"], ["seed must be an integer, got True (true or false)"]),
    (["seed=010"], ["seed must be an integer, got '010' (text)"]),
    (["optim.lr=true"], ["optim.lr must be a finite number, got True"]),
    (["optim.lr=fast"], ["optim.lr must be a finite number, got 'fast'"]),
    ([f"optim.lr={10**400}"], ["optim.lr must be a finite number"]),
    (["progress=yes"], ["progress must be true or false, got 'yes'"]),
    (["pipeline.model=null"], ["pipeline.model must be text, got None (nothing)"]),
    (["pipeline=tiny"], ["pipeline must be a mapping", "'tiny'"]),
    (["group_size"], ["write KEY=VALUE", "'group_size'"]),
    (["sampler..kernel=cps"], ["write KEY=VALUE"]),
    (["=3"], ["write KEY=VALUE"]),
    (["group_size.x=3"], ["group_size is 6", "no part 'x'"]),
    (["optim.lr=[1"], ["override 'optim.lr=[1'", "not valid YAML"]),
]


@pytest.mark.parametrize(("overrides", "parts"), REFUSALS, ids=[" ".join(o)[:60] for o, _ in REFUSALS])
def test_refusals_teach(path: Path, overrides: list[str], parts: list[str]) -> None:
    message = refusal(path, *overrides)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["is empty"]),
        ("# only a comment\n", ["is empty"]),
        ("- a\n", ["a list", "a mapping of keys to values"]),
        ("just text\n", ["text", "a mapping"]),
        ("seed: 1\nseed: 2\n", ["line 2", "'seed' appears twice", "first on line 1"]),
        ("optim:\n  lr: 1\n  lr: 2\n", ["line 3", "'lr' appears twice"]),
        ("optim:\n\tlr: 1\n", ["line 2", "no tabs"]),
        ("seed: [1\nout: x\n", ["line 2", "not valid YAML"]),
        ("1: x\n", ["line 1", "keys are text"]),
        ("[a, b]: x\n", ["line 1", "keys are text"]),
        ("seed: !!python/object:os.system x\n", ["line 1", "not valid YAML", "remove the tag"]),
        ("seed: 1\n---\nseed: 2\n", ["not valid YAML", "line 2", "remove what follows"]),
        (MINIMAL.replace("group_size: 6\n", ""), ["required key 'group_size' is missing", "an integer"]),
        (MINIMAL.replace("kernel: flow_sde", ""), ["required key 'sampler.kernel' is missing", "text"]),
        (MINIMAL.replace("{kernel: flow_sde}", ""), ["sampler must be a mapping", "got None"]),
        (MINIMAL.replace("{radius: 1e-1}", "&o {again: *o}"), ["options", "contains itself"]),
    ],
)
def test_files_that_cannot_be_used(path: Path, text: str, parts: list[str]) -> None:
    message = refusal(write(path, text))
    for part in [str(path), *parts]:
        assert part in message


def test_all_missing_and_unknown_keys_are_told_at_once(path: Path) -> None:
    write(path, "sampler: {eta: 1}\nlearning_rate: 1\npolicy: {lora_rnk: 4}\nrewards: [{nam: a}, {name: b, wait: 1}]\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["wandb=true"])
    first, *lines, last = str(caught.value).split("\n")
    assert first == f"{path}: 12 keys are wrong"
    for said in (
        "'eta' is called 'sampler.noise_level'", "key 'sampler.kernel' is missing", "'optim.lr'", "'policy.lora_rank'",
        "did you mean 'rewards.0.name'", "'rewards.1.wait'", "key 'num_iterations' is missing", "'prompts_per_step'",
        "'group_size' is missing", "'pipeline' is missing", "'prompts' is missing", "override 'wandb=true'",
    ):  # fmt: skip
        assert sum(said in line for line in lines) == 1, said
    assert len(lines) == 12
    assert "base: tiny_recommended" in last


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["workers.address=head:6379"], "workers.address is head:6379, but nobody works there"),
        (["workers.rollout_gpus=0.5"], "workers.rollout_gpus is 0.5, but workers.rollouts is 0"),
        (["workers.reward_gpus=2", "workers.rollouts=1"], "workers.reward_gpus is 2, but workers.rewards is 0"),
        (["workers.staleness=1", "workers.rewards=1"], "workers.staleness is 1, but workers.rollouts is 0"),
        (["workers.shard=2"], "workers.shard is 2, but workers.rollouts is 0"),
    ],
)
def test_settings_of_workers_that_there_are_none_of(path: Path, settings: list[str], said: str) -> None:
    write(path, MINIMAL)
    assert said in refusal(path, *settings)
    load_config(path, [*settings, "workers.rollouts=1", "workers.rewards=1"])


@pytest.mark.parametrize(
    ("overrides", "processes", "taken"),
    [
        (["micro_batch_size=5"], 1, (24, 4)),
        (["rollout_batch_size=7"], 1, (6, 24)),
        (["updates_per_rollout=2", "micro_batch_size=24"], 1, (24, 12)),
        (["rollout_batch_size=24", "micro_batch_size=24"], 2, (12, 12)),
        (["rollout_batch_size=1000"], 3, (8, 8)),
        (["rollout_batch_size=1"], 1, (1, 24)),
    ],
)
def test_batch_sizes_are_upper_bounds(path: Path, overrides: list[str], processes: int, taken: tuple[int, int]) -> None:
    write(path, MINIMAL)
    geometry = load_config(path, overrides).resolve_batch(processes)
    assert (geometry.rollout_batch_size, geometry.micro_batch_size) == taken


def test_keys_values_and_contradictions_are_told_at_once(path: Path) -> None:
    write(path, MINIMAL)
    wrong = [
        "learning_rate=1", "sampler.num_steps=many", "policy.lora_rank=0", "optim.eps=0", "kl_reference=ema",
        "workers.staleness=1", "optim.lr=-1",
    ]  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        load_config(path, wrong)
    message = str(caught.value)
    assert message.startswith(f"{path}: 7 mistakes\n")
    for said in (
        "'learning_rate' is called 'optim.lr'", "sampler.num_steps must be an integer", "policy.lora_rank must be at",
        "optim.eps must be above 0", "optim.lr must be at least 0", "workers.staleness is 1", "kl_reference is ema",
    ):  # fmt: skip
        assert message.count(said) == 1, said


def test_what_follows_from_a_wrong_key_is_not_told_as_another_mistake(path: Path) -> None:
    write(path, MINIMAL.replace("prompts: {", "prompts: {evl: x.txt, "))
    message = refusal(path, "eval_every=2")
    assert "did you mean 'prompts.eval'" in message
    assert "eval_every" not in message.replace("override 'eval_every=2'", "")


def test_a_message_about_very_many_keys_ends(path: Path) -> None:
    write(path, MINIMAL + "".join(f"zz{i}: 1\n" for i in range(60)))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    lines = str(caught.value).split("\n")
    assert len(lines) == MAX_TOLD + 2
    assert lines[-1].strip() == f"and {60 - MAX_TOLD} more"


def bomb(merge: str = "") -> str:
    """Twenty lines that stand for 9^20 values."""
    item = "{{<<: [{0}]}}" if merge else "[{0}]"
    first = "{x: 1}" if merge else "[1]"
    lines = [f"a0: &a0 {first}"]
    lines += [f"a{i}: &a{i} {item.format(', '.join([f'*a{i - 1}'] * 9))}" for i in range(1, 20)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (bomb(), "values once its aliases"),
        (bomb(merge="<<"), "values once its aliases"),
        ("seed: " + "[" * 3000 + "]" * 3000, "nested too deep"),
        ("seed: " + "{a: " * 3000 + "1" + "}" * 3000, "nested too deep"),
        ("#" * (MAX_CHARACTERS + 1), "characters"),
        (MINIMAL + "seed: " + "9" * 5000, "5000 digits; write a number with fewer digits"),
        (MINIMAL + "optim: {lr: [" + ", ".join(["1"] * 1000) + "]}", "1, 1 ..."),
    ],
    ids=["aliases", "merge", "lists", "mappings", "long", "digits", "value"],
)
def test_files_that_would_never_end_are_refused(path: Path, text: str, said: str) -> None:
    began = time.process_time()
    message = refusal(write(path, text))
    assert said in message
    assert str(path) in message
    assert len(message) < 1000
    assert time.process_time() - began < 5


def test_files_that_cannot_be_read(path: Path, tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "nowhere.yaml")
    assert "is a folder" in refusal(tmp_path)
    path.write_bytes(b"seed: \xff\xfe")
    assert "not UTF-8" in refusal(path)


def test_anchors_and_merge_keys_are_ordinary_yaml(path: Path) -> None:
    text = MINIMAL + "optim: &o {lr: 1e-5}\n"
    assert load_config(write(path, text)).optim.lr == 1e-5
    shared = MINIMAL.partition("rewards:")[0] + "rewards: [{name: a, options: &o {x: 1}}, {name: b, options: *o}]\n"
    config = load_config(write(path, shared), ["rewards.0.options.x=2"])
    assert [reward.options["x"] for reward in config.rewards] == [2, 1]
    assert parse_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\n", "x")["b"] == {"x": 3, "y": 2}


@pytest.mark.parametrize("prompts", [1, 5, 7, 12, 48])
@pytest.mark.parametrize("group", [2, 9, 24])
@pytest.mark.parametrize("updates", [1, 2, 3])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_default_geometry_is_the_largest_that_fits(
    path: Path, prompts: int, group: int, updates: int, processes: int
) -> None:
    images = prompts * group
    overrides = [f"prompts_per_step={prompts}", f"group_size={group}", f"updates_per_rollout={updates}"]
    if images % updates:
        assert f"updates_per_rollout ({updates})" in refusal(path, *overrides)
        return
    config = load_config(path, overrides)
    if images % processes or images // processes % updates:
        with pytest.raises(ConfigError, match=r"do not divide by"):
            config.resolve_batch(processes)
        return
    geometry = config.resolve_batch(processes)
    share = images // processes
    assert geometry.images_per_process == share
    assert geometry.rollout_batch_size == max(d for d in range(1, 25) if share % d == 0)
    assert geometry.micro_batch_size == max(d for d in range(1, 25) if share % (d * updates) == 0)
    assert geometry.micro_batches_per_update * updates * geometry.micro_batch_size == share


def test_given_sizes_may_exceed_the_default_limit(path: Path) -> None:
    overrides = ["prompts_per_step=8", "micro_batch_size=48", "rollout_batch_size=48"]
    geometry = load_config(path, overrides).resolve_batch(1)
    assert (geometry.micro_batch_size, geometry.rollout_batch_size, geometry.micro_batches_per_update) == (48, 48, 1)
    assert load_config(path, overrides).resolve_batch(2).rollout_batch_size == 24


def test_paths_resolve_or_say_what_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.txt").write_text("a")
    monkeypatch.chdir(tmp_path)
    assert resolve_path("p.txt").read_text() == "a"
    assert resolve_path("p.txt", tmp_path) == tmp_path / "p.txt"
    with pytest.raises(ConfigError, match=r"there is no 'q\.txt': looked for .*q\.txt"):
        resolve_path("q.txt")
    for bad in ("asset:", "asset:no-such-thing", "asset:../pyproject.toml"):
        with pytest.raises(ConfigError, match=r"there is no asset"):
            resolve_path(bad)


def test_every_field_has_a_docstring() -> None:
    import ast

    import flowrl.config.sections
    import flowrl.config.train

    for module in (flowrl.config.train, flowrl.config.sections):
        tree = ast.parse(Path(str(module.__file__)).read_text())
        for cls in (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith("Config")):
            body = list(cls.body)
            for field, after in itertools.pairwise(body):
                if isinstance(field, ast.AnnAssign):
                    assert isinstance(after, ast.Expr), f"{cls.name}: {ast.unparse(field)} has no docstring"


def test_of_a_key_that_is_typed_twice_the_last_word_counts(path: Path) -> None:
    """Also where a section that holds it is typed in between."""
    words = ["optim.lr=0.1", "optim={lr: 0.2, eps: 0.4}", "optim.lr=0.3"]
    optim = load_config(path, typed_settings(words)).optim
    assert (optim.lr, optim.eps) == (0.3, 0.4)
