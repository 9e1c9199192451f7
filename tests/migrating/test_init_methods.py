"""`flowrl init --from` for methods other than GRPO: keys and values of published files of six toolkits, in small."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml
from counted_operations import measured_once

import flowrl
from flowrl import cli
from flowrl.config.strict_yaml import dotted_items
from flowrl.config.train import load_config
from flowrl.migrating.foreign_files import read_foreign
from flowrl.migrating.foreign_python import Reader
from flowrl.migrating.imported import FATE_OF, count_fates, import_foreign, settled, text_of_import
from flowrl.planning.written import settings_on
from flowrl.session.preflight import recipe_of

READ = yaml.safe_load(Path(__file__).with_name("published_samples.yaml").read_text())
SAMPLES: dict[str, dict[str, Any]] = READ["samples"]
"""Toolkit and method -> the file, what it says, and what that is here."""


@pytest.fixture(autouse=True)
def _measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured_once(monkeypatch)


def written(sample: str, folder: Path) -> str:
    """A file of a toolkit, and how it is given."""
    (folder / "base.py").write_text(READ["base.py"])
    (folder / SAMPLES[sample]["file"]).write_text(SAMPLES[sample]["text"])
    return str(folder / SAMPLES[sample]["file"])


def at(config: Any, dotted: str) -> Any:
    """A value of settings."""
    for part in dotted.split("."):
        config = config[int(part)] if part.isdigit() else config.get(part) if isinstance(config, dict) else None
    return config


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_method_s_keys_are_what_they_mean_there(sample: str, tmp_path: Path) -> None:
    given = written(sample, tmp_path)
    found = settled(import_foreign(given, None, None), [])
    expected = SAMPLES[sample]["means"]
    config = yaml.safe_load(text_of_import(found, []))
    missing = {key: value for key, value in expected.items() if at(config, key) != value}
    assert missing == {}, {key: at(config, key) for key in missing}
    assert [line.key for line in found.given] == list(read_foreign(given).keys)
    fates = Counter(line.fate for line in found.given)
    assert fates["unknown"] == 0, [line.key for line in found.given if line.fate == "unknown"]
    assert all(line.made if line.fate == "translated" else line.why and not line.made for line in found.given)
    assert str(sum(fates.values())) in count_fates(found)
    # nothing of the base contradicts it: its recipe refuses nothing but that pairs are not here
    built = load_config(settings_on(found.base, found.done.keys))
    lacks = "pairs" in str(expected) or "policy.teachers" in expected
    with pytest.raises(ValueError, match="there is no '") if lacks else nullcontext():
        recipe_of(built).check(built)
    assert built.clip_range == 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("sample", SAMPLES)
def test_a_plan_takes_what_is_written(sample: str, tmp_path: Path) -> None:
    ours = tmp_path / "ours.yaml"
    more: dict[str, Any] = {"policy": {"teachers": [{"guidance_scale": 7.0}]}}  # theirs are not on this machine
    taught = "policy.teachers" in SAMPLES[sample]["means"]
    made = flowrl.init(source=written(sample, tmp_path), out=ours, **more if taught else {})
    assert "fits" in " ".join(made.notes)  # by the plan of what it wrote
    objective = SAMPLES[sample]["means"].get("objective.name")
    assert load_config(ours).objective.name == objective


def test_a_key_that_nobody_knows_is_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(SAMPLES["Flow-Factory nft"]["text"].replace("nft_beta:", "nft_gamma: 3\n  nft_beta:"))
    found = import_foreign(str(file), None, None)
    assert [line.key for line in found.given if line.fate == "unknown"] == ["train.nft_gamma"]
    assert "1 unknown" in count_fates(found)
    assert "unknown" in FATE_OF.values()


def test_an_algorithm_that_is_not_translated_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(SAMPLES["Flow-Factory nft"]["text"].replace("trainer_type: nft", "trainer_type: art"))
    assert cli.main(["init", "--from", str(file), "--out", str(tmp_path / "ours.yaml")]) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "its algorithm is art, and --from translates grpo, guard" in told
    assert "build on hunyuan_video_art, sd35m_opd, tiny_art, tiny_opd, tiny_opd_off_policy, which ship for it" in told
    file.write_text(SAMPLES["Flow-Factory nft"]["text"].replace("trainer_type: nft", "trainer_type: nothing"))
    assert cli.main(["init", "--from", str(file), "--out", str(tmp_path / "ours.yaml")]) == 1
    assert "'flowrl list configs' names what ships" in " ".join(capsys.readouterr().err.split())


def test_a_recipe_that_init_does_not_write_is_told_where_to_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, model = tmp_path / "ours.yaml", "asset:tiny-sd3"
    words = ["init", "--model", model, "--card", "24", "--out", str(out), "policy.teachers=[{guidance_scale: 3}]"]
    assert cli.main([*words, "recipe=visited"]) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "has the recommended recipe, and `recipe` is visited: start from one that ships for it (hunyuan" in told
    with pytest.raises(flowrl.FlowrlError, match="there is none"):
        flowrl.init(model, 24, out=out, recipe="visitor")
    assert not out.exists()


@pytest.mark.slow
def test_card_hours_and_settings_go_with_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, ours = written("UniRL nft", tmp_path), tmp_path / "ours.yaml"
    assert cli.main(["init", "--from", given, "--hours", "5", "--out", str(ours)]) == 1
    assert "give --card" in " ".join(capsys.readouterr().err.split())
    words = ["--card", "48", "--hours", "60", "optim.lr=1e-4", "--out", str(ours)]
    assert cli.main(["init", "--from", given, *words]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "fits 48 GB" in said
    config = load_config(ours)
    assert config.optim.lr == 1e-4
    assert config.num_iterations < 10000
    ours.unlink()
    assert cli.main(["init", "--from", given, "clip_range=0.2", "--out", str(ours)]) == 1
    assert "does not read it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "keys"),
    [
        ("    x = 3\n    while x > 1:\n        x -= 1\n    return {'x': x}\n", {"x": 1}),
        ("    if 'a' in ['b'] or not True:\n        return {'x': 1}\n    return {'x': 2 if 1 < 2 else 3}\n", {"x": 2}),
        ("    return made(size=4)\ndef made(size, more=2):\n    return {'x': size * more}\n", {"x": 8}),
    ],
)
def test_choices_loops_and_named_arguments_are_followed(body: str, keys: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(f"def f():\n{body}")
    assert Reader(tmp_path / "x.py").call(tmp_path / "x.py", "f") == keys


def test_a_loop_without_an_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("def f():\n    while True:\n        pass\n    return {}\n")
    with pytest.raises(ValueError, match="has it no end"):
        Reader(tmp_path / "x.py").call(tmp_path / "x.py", "f")


def test_places_in_a_file_of_unirl_are_resolved(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    data = yaml.safe_load(SAMPLES["UniRL mixgrpo"]["text"])
    data["rollout"] = {"forward_batch_size": "${stack.micro_batch_size}", "a": "${rollout.b}", "b": "${rollout.a}"}
    file.write_text(yaml.safe_dump(data))
    keys = read_foreign(str(file)).keys
    assert keys["rollout.forward_batch_size"] == 8
    assert keys["logging.report_to_wandb"] is True
    assert keys["logging.entity"] is None
    assert set(dict(dotted_items(data))) == set(keys)


CHANGED = {
    "a variable": ("UniRL nft", "datasets/pickscore/train.txt", "'${oc.env:DATA_PATH}'", "prompts.train", None),
    "all weights": ("verl-omni nft", " actor_rollout_ref.model.lora_rank=64", "", "policy.lora_rank", None),
    "a long prompt": (
        "verl-omni nft",
        " actor_rollout_ref.model.lora_rank=64",
        " actor_rollout_ref.rollout.pipeline.max_sequence_length=8192",
        "pipeline.max_sequence_length",
        None,
    ),
}


@pytest.mark.parametrize("case", CHANGED)
def test_what_cannot_be_taken_over_as_it_is_leaves_no_refusal(case: str, tmp_path: Path) -> None:
    sample, old, new, key, expected = CHANGED[case]
    assert old in SAMPLES[sample]["text"]
    (tmp_path / SAMPLES[sample]["file"]).write_text(SAMPLES[sample]["text"].replace(old, new))
    found = settled(import_foreign(str(tmp_path / SAMPLES[sample]["file"]), None, None), [])
    assert found.done.keys.get(key) == expected
    load_config(settings_on(found.base, found.done.keys))
    assert not [line.key for line in found.given if line.fate == "unknown"]


def test_a_script_of_dance_grpo_is_for_a_model_and_may_train_a_lora(tmp_path: Path) -> None:
    file = tmp_path / "x.sh"
    flags = "--pretrained_model_name_or_path data/flux --lora_rank 128 --use_group --vq_coef 1.0 --mq_coef 0.0"
    file.write_text(f"torchrun --nproc_per_node=8 fastvideo/train_grpo_flux_lora.py {flags}")
    keys = import_foreign(str(file), None, None).done.keys
    wanted = {"pipeline.model": "black-forest-labs/FLUX.1-dev", "policy.train": "lora", "policy.lora_rank": 128}
    assert wanted.items() <= keys.items()
    assert [(one["name"], one["weight"]) for one in keys["rewards"]] == [("video_align", 1.0)]
