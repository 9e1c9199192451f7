"""Configurations that build on others."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from flowrl.config.base import config_files, read_with_base
from flowrl.config.strict_yaml import ConfigError
from flowrl.config.train import find_config, load_config, to_yaml
from flowrl.planning.catalogue import families

BELOW = """
num_iterations: 4
prompts_per_step: 2
group_size: 4
clip_range: [0.1, 0.2]
pipeline: {model: some/model, dtype: float32}
sampler: {kernel: flow_sde, num_steps: 8, noise_level: 0.5}
prompts: {train: prompts.txt}
rewards: [{name: jpeg_compressibility}, {name: clip_score}]
"""


def write(folder: Path, **files: str) -> Path:
    """Writes files by name and returns the folder."""
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


def test_mappings_merge_key_by_key_and_everything_else_replaces(tmp_path: Path) -> None:
    above = (
        "base: below\nsampler: {num_steps: 5}\nrewards: [{name: jpeg_compressibility, weight: 2}]\nclip_range: 0.3\n"
    )
    folder = write(tmp_path, below=BELOW, above=above)
    config = load_config(folder / "above.yaml", ["sampler.noise_level=0.9"])
    assert (config.sampler.kernel, config.sampler.num_steps, config.sampler.noise_level) == ("flow_sde", 5, 0.9)
    assert [(reward.name, reward.weight) for reward in config.rewards] == [("jpeg_compressibility", 2)]
    assert config.clip_range == 0.3
    assert config.pipeline == load_config(folder / "below.yaml").pipeline
    (tmp_path / "whole.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "whole.yaml") == config  # a run's own file needs no base


def test_a_base_has_a_base_and_the_nearest_wins(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    write(tmp_path, below=BELOW, middle="base: below.yaml\nnum_iterations: 5\nsampler: {num_steps: 5, kernel: cps}\n")
    write(tmp_path / "more", top="base: ../middle\nsampler: {num_steps: 6}\n")
    config = load_config(tmp_path / "more" / "top.yaml")
    assert (config.num_iterations, config.sampler.kernel, config.sampler.num_steps) == (5, "cps", 6)
    assert "base" not in read_with_base(tmp_path / "more" / "top.yaml")


def test_null_takes_a_setting_back_and_a_mapping_may_replace_a_value(tmp_path: Path) -> None:
    write(tmp_path, below=BELOW, above="base: below\nsampler: {noise_level: null}\nclip_range: {a: 1}\n")
    merged = read_with_base(tmp_path / "above.yaml")
    assert merged["sampler"] == {"kernel": "flow_sde", "num_steps": 8, "noise_level": None}
    assert merged["clip_range"] == {"a": 1}


def test_an_empty_file_is_its_base(tmp_path: Path) -> None:
    write(tmp_path, below=BELOW, above="base: below\n")
    assert load_config(tmp_path / "above.yaml") == load_config(tmp_path / "below.yaml")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a": "base: a\n"}, ["circle", "a.yaml -> a.yaml"]),
        ({"a": "base: b\n", "b": "base: c\n", "c": "base: a\n"}, ["circle", "a.yaml -> b.yaml -> c.yaml -> a.yaml"]),
        ({"a": "base: gone\n"}, ["gone.yaml"]),
        ({"a": "base: [b, c]\n"}, ["a.yaml", "base is the name of another configuration", "['b', 'c']"]),
        ({"a": "base: ''\n"}, ["base is the name"]),
        ({"a": "base: b\n", "b": "- 1\n"}, ["b.yaml"]),
        ({"a": "base: b\nsampler: {num_step: 5}\n", "b": BELOW}, ["a.yaml", "sampler.num_step", "num_steps"]),
    ],
)
def test_bases_that_cannot_be_are_refused(tmp_path: Path, files: dict[str, str], said: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(write(tmp_path, **files) / "a.yaml")
    for part in said:
        assert part in str(error.value)


def test_base_is_no_setting_of_the_command_line_and_is_refused_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="base"):
        load_config(write(tmp_path, below=BELOW) / "below.yaml", ["base=other"])


def test_a_configuration_that_ships_is_a_base_from_anywhere(tmp_path: Path) -> None:
    folder = write(tmp_path, mine="base: tiny_g2rpo\nseed: 5\n")
    config = load_config(folder / "mine.yaml")
    assert config == dataclasses.replace(load_config(find_config("tiny_g2rpo")), seed=5)
    write(tmp_path, tiny_g2rpo=BELOW)  # what lies beside the file is nearer
    assert load_config(folder / "mine.yaml").pipeline.model == "some/model"


def test_every_name_that_ships_is_given_once_and_lies_in_the_folder_of_its_family() -> None:
    files = sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))
    assert sorted(file.resolve() for file in config_files().values()) == files
    family_of = {model: name for name, known in families().items() for model in known["checkpoints"]}
    for name, file in config_files().items():
        model = read_with_base(file)["pipeline"]["model"]
        folder = "embedded" if model.startswith("asset:") else family_of[model]
        assert file.parent.name == folder, name


def test_a_path_that_is_not_there_is_answered_with_the_name_at_its_end(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no configuration 'configs/tiny_dpo\.yaml': did you mean tiny_dpo\?"):
        find_config("configs/tiny_dpo.yaml")
    with pytest.raises(ValueError, match=r"did you mean flux_recommended\?"):  # the recipe of a family
        find_config("flux")
    write(tmp_path, mine="seed: 1\n")
    with pytest.raises(
        ValueError, match=r"no configuration 'runs/tiny_dp': give a YAML file"
    ):  # a run that is not there
        find_config("runs/tiny_dp")
    with pytest.raises(ValueError, match=r"nime\.yaml': did you mean .*mine\.yaml\?"):
        find_config(str(tmp_path / "nime.yaml"))


def test_a_base_that_is_nowhere_is_answered_with_the_places_and_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(write(tmp_path, mine="base: tiny_g2rp\n") / "mine.yaml")
    for part in (
        str(tmp_path / "mine.yaml"),
        str(tmp_path / "tiny_g2rp.yaml"),
        "did you mean tiny_g2rpo?",
        "that ship",
        "'flowrl list configs'",
    ):
        assert part in str(error.value)
    assert "tiny_nft" not in str(error.value)  # a list of all names buries the nearest one
