"""The model card of a run: the hub's YAML front matter, and what others need to use and to judge the LoRA."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.config.readers import is_read
from flowrl.config.rewards import unique_keys
from flowrl.config.strict_yaml import read_mapping
from flowrl.generation.models import Source
from flowrl.pipelines.places.known_checkpoints import published, tables
from flowrl.pipelines.places.lora_places import LORA_FILE
from flowrl.prompts.overlap import held_out_or_shared
from flowrl.publishing.model_index import INDEX, dump_yaml
from flowrl.rendering.markup import estimate, moment, plural, signed
from flowrl.rewards import reproduction_of
from flowrl.runs.held_out_result import HeldOut, conclusion
from flowrl.runs.run_data import RunData
from flowrl.runtime.files import read_text
from flowrl.runtime.scrubbing import SECRET, without_secrets
from flowrl.statistics.bootstrap import LEVEL


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """A licence."""

    title: str
    hub: str = "other"
    """The hub's word for it; "other" if it has none."""
    name: str | None = None
    """`license_name` of a card, for "other"."""
    link: str | None = None
    """Address of its text; None for the base model's page."""
    demands: str
    """What it demands of a LoRA that you share."""


_READ = (
    "This toolkit has no summary of it: read the text at the base model's page before you pass the LoRA on. As a rule "
    "such a licence also binds what is derived from the model."
)
TERMS = {name: Terms(**row) for name, row in read_mapping(Path(__file__).with_name("base_licences.yaml")).items()}
"""By `licence` of `pipelines/published.json`."""


def terms_of(model: str, licence: str | None = None) -> Terms | None:
    """The terms of a base model: a hub id, `asset:NAME` (which ships with flowrl, under its licence) or a place on this
    machine. A given `licence`, as the hub calls it, replaces the base's. None if it is unknown here."""
    if licence:
        demands = "Stated by whoever shares this LoRA; the demands of the base model hold too."
        return Terms(title=licence, hub=licence, demands=demands)
    if model.startswith("asset:"):
        return TERMS["Apache-2.0"]
    known = published(model)
    if known is None:
        return None
    slug = "-".join("".join(c if c.isalnum() else " " for c in known.licence.lower()).split())
    return TERMS.get(known.licence) or Terms(title=known.licence, name=slug, demands=_READ)


MADE = "<!-- written by flowrl push -->"
"""Mark by which a card is recognised."""
SHOWN = read_text(Path(__file__).with_name("shown_settings.txt")).split()
"""Settings that a card names; all of them are in config.yaml."""
_TRUE_GUIDANCE = ("qwen_image", "qwen_image_edit")  # whose stock class calls it true_cfg_scale

_USE = read_text(Path(__file__).with_name("how_to_use.md")).removesuffix("\n")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCard:
    """The contents of a card; `text` is its README.md."""

    name: str
    run: RunData
    source: Source
    base: str | None
    """Hub id of the base model; None if it has none."""
    terms: Terms | None
    """Terms of the base's licence, None if unknown."""
    held: HeldOut | None
    images: Sequence[tuple[str, str, str, str]]
    """Per shown prompt: text, seed, files before and after, in the shared folder."""
    comfyui: str
    """The file for ComfyUI, or a sentence on why there is none."""
    task: str
    """The hub's name of the model's task."""

    def text(self) -> str:
        """README.md."""
        front = dump_yaml(self._front())
        parts = [f"# {self.name}", MADE, self._lead(), self._samples(), self._use(), self._scores(), self._training(),
                 self._licence(), self._again()]  # fmt: skip
        return f"---\n{front}---\n\n" + "\n\n".join(part for part in parts if part) + "\n"

    def _front(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.terms is not None:
            found["license"] = self.terms.hub
            if self.terms.hub == "other":
                found["license_name"] = self.terms.name
                found["license_link"] = self.terms.link or (
                    f"https://huggingface.co/{self.base}" if self.base else "LICENSE"
                )
        if self.base is not None:
            found |= {"base_model": self.base, "base_model_relation": "adapter"}
        found |= {"library_name": "diffusers", "pipeline_tag": self.task}
        found["tags"] = ["lora", "diffusers", self.task, "reinforcement-learning", "flowrl"]
        shown = [{"text": text, "output": {"url": after}} for text, _, _, after in self.images]
        if shown:
            found["widget"] = shown
        if (index := self._own_index()) is not None:
            found[INDEX] = index
        return found

    def _own_index(self) -> list[dict[str, Any]] | None:
        """Results of the tuned model in the run's own evaluations, by the hub's library."""
        held = self.held
        if held is None or held.after is None:
            return None
        from huggingface_hub.repocard_data import EvalResult, eval_results_to_model_index

        bounds = {"low": held.after.low, "high": held.after.high, "level": LEVEL} if held.after.known else {}
        result = EvalResult(
            task_type=self.task,
            dataset_type="prompts",
            dataset_name=_prompts(self.run, "eval") or "held-out prompts",
            dataset_args={"iteration": held.last, "images_compared": held.num_pairs},
            metric_type=held.metric,
            metric_name=f"{held.label} of the run's own evaluation",
            metric_value=held.after.mean,
            metric_args=bounds | {"before_training": held.before.mean},
        )
        return list(eval_results_to_model_index(self.name, [result]))

    def _lead(self) -> str:
        model = self.source.model
        if self.base:
            base = f"[{self.base}](https://huggingface.co/{self.base})"
        elif model.startswith("asset:"):
            base = f"`{model}`, a small model that ships with flowrl"
        else:
            base = f"`{without_places(model)}`, a model that is not named on the hub here"
        rank = self.run.config.get("policy", {}).get("lora_rank")
        text = (
            f"A LoRA{f' of rank {rank}' if rank else ''} for {base}, trained by reinforcement learning with flowrl for "
            f"{plural(len(self.run.train), 'iteration')}. There is no trigger word: it acts on every prompt."
        )
        if not self.run.finished:
            text += " The run had not finished when this card was written."
        return text

    def _samples(self) -> str:
        if not self.images:
            return "## Before and after\n\nThe run kept no samples from two moments, so none are shown."
        first, last = self.run.pair_iterations
        rows = [
            f"| {_media(before, text)} | {_media(after, text)} | {_cell(text)}{f' (seed {seed})' if seed else ''} |"
            for text, seed, before, after in self.images
        ]
        return (
            "## Before and after\n\nSame prompt, same start noise. The first ones in order, not picked.\n\n"
            f"| {moment(first)} | {moment(last)} | prompt |\n|---|---|---|\n" + "\n".join(rows)
        )

    def _use(self) -> str:
        source, base = self.source, self.base or "BASE"
        guidance = "true_cfg_scale" if source.family in _TRUE_GUIDANCE else "guidance_scale"
        # Of a family that has several stock classes, the one that finds the right one by itself.
        stock = tables()["families"].get(source.family, {}).get("stock", [])
        size = "".join(
            f", {name}={value}" for name in ("height", "width", "num_frames") if (value := source.options.get(name))
        )
        image = "image=IMAGE, " if self.task.startswith("image-to") else ""
        what = "frames = pipe(...).frames[0]" if self.task.endswith("video") else "image = pipe(...).images[0]"
        call = what.replace(
            "...",
            f"{image}prompt=PROMPT, num_inference_steps={source.num_steps}, {guidance}={source.guidance_scale:g}{size}",
        )
        experts = (
            f'\npipe.load_lora_weights(\n    "FOLDER", subfolder="transformer_2", weight_name="{LORA_FILE}", '
            "load_into_transformer_2=True,\n)"
        )
        two = source.lora is not None and (source.lora / "transformer_2").is_dir()
        missing = "" if self.base else "`BASE` is the base model that is named above. "
        return _USE.format(
            stock=stock[0] if len(stock) == 1 else "DiffusionPipeline", base=base, dtype=source.dtype, file=LORA_FILE,
            experts=experts if two else "", call=call, missing=missing, steps=source.num_steps,
            guidance=f"{source.guidance_scale:g}", comfyui=self.comfyui,
        )  # fmt: skip

    def _scores(self) -> str:
        held, run = self.held, self.run
        if held is None:
            return "## Scores\n\nThe run had no held-out evaluation: nothing is said about new prompts."
        lines = ["## Scores", ""]
        rows = [(moment(held.first), estimate(held.before))]
        if held.after is not None:
            rows.append((moment(held.last), estimate(held.after)))
            known = held.difference is not None and held.difference.known
            change = estimate(held.difference, sign=True) if known and held.difference else signed(held.change)
            rows.append(("paired difference", f"{change}: {conclusion(held.difference)}"))
        lines += [f"{run.held_word.capitalize()} {held.label}:", "", "| | |", "|---|---|"]
        lines += [f"| {name} | {value} |" for name, value in rows]
        if held.after is not None:
            lines += ["", f"{plural(held.num_pairs, run.sample_word)} of the same prompts and seeds were compared"
                      + (f"; the interval covers {held.claim} and other start noise. " if not held.untold else
                         f"; no interval: {held.untold}. ")
                      + "Another training seed can differ by more. Numbers of benchmarks, if there are any, are in "
                      f"the `{INDEX}` of this card."]  # fmt: skip
        if shared := held_out_or_shared(run.manifest.get("eval_prompts"))[1]:
            lines += ["", f"{shared}: on those the scores say nothing about new prompts."]
        return "\n".join(lines)

    def _training(self) -> str:
        run, config = self.run, self.run.config
        versions = (run.manifest.get("inputs") or {}).get("rewards") or {}
        held = f", evaluated on `{name}`" if (name := _prompts(run, "eval")) else ""
        lines = ["## Training", "", f"Prompts: `{_prompts(run, 'train') or 'not stated'}`{held}."]
        lines += ["", "Rewards, and what they stand for:", ""]
        rewards = config.get("rewards") or []
        keys = unique_keys([str(one.get("label") or one.get("name") or one.get("function")) for one in rewards])
        lines += [_reward(reward, key, versions) for reward, key in zip(rewards, keys, strict=True)]
        recipe, objective = str(config.get("recipe")), str(_at(config, "objective.name") or "")
        rows = [
            f"| `{key}` | {_cell(without_places(', '.join(map(str, value if isinstance(value, list) else [value]))))} |"
            for key in SHOWN
            if (value := _at(config, key)) is not None and is_read(key, recipe, objective)
        ]
        return "\n".join(
            [*lines, "", "Settings; all of them are in `config.yaml`:", "", "| key | value |", "|---|---|", *rows]
        )

    def _licence(self) -> str:
        if self.terms is None:
            return (
                "## Licence\n\nThe licence of the base model is not known here, and it binds the LoRA too: read it on "
                "the base model's page before you use this or pass it on."
            )
        where = f" ([text]({self.terms.link}))" if self.terms.link else ""
        return (
            f"## Licence\n\nThe base model's: {self.terms.title}{where}. {self.terms.demands} This is a summary; the "
            "text of the licence is what counts."
        )

    def _again(self) -> str:
        manifest = self.run.manifest
        versions = manifest.get("versions") or {}
        named = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        commit = manifest.get("git_commit")
        ran = [f"command: `{without_places(str(manifest['command']))}`"] if manifest.get("command") else []
        lines = [
            f"commit of flowrl: `{commit}`" if commit else "commit of flowrl: not known, an installed release",
            *ran,
            f"libraries: {named}",
            f"device: {without_places(str(manifest.get('device', 'not stated')))}",
        ]
        return (
            "## How to reproduce\n\nRun `flowrl train config.yaml out=FOLDER`, after you put your own places of "
            "prompts, rewards and model into it (those of the machine that trained were removed).\n\n"
            + "\n".join(f"- {x}" for x in lines)
        )


def task_of_run(run: RunData) -> str:
    """The hub's name for what a run's model does."""
    given = "image" if any(pair.sources for pair in run.pairs) else "text"
    return f"{given}-to-{run.sample_word}"


def _media(file: str, text: str) -> str:
    if file.endswith(".mp4"):
        return f'<video src="{file}" controls loop muted></video>'
    return f"![{_cell(text).replace('[', '(').replace(']', ')')}]({file})"


def _cell(text: str) -> str:
    """Escapes text so that it breaks no row and starts no markup."""
    flat = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return flat.replace("|", "\\|").replace("`", "\\`")


def _reward(reward: Mapping[str, Any], own: str, versions: Mapping[str, str]) -> str:
    name, options = reward.get("name"), reward.get("options") or {}
    text = f"- `{own}`{f' ({name})' if name not in (None, own) else ''}, weight {reward.get('weight', 1.0):g}"
    if name is None:
        text += f": a function of `{without_places(str(reward.get('file'))).rpartition('/')[2]}`, which is not shared"
    version = versions.get(f"reward {own}")
    text += f"; version `{without_places(str(version))}`" if version else ""
    reproduces = reproduction_of(name, options) if name else None
    return text + (f". {without_places(reproduces)}" if reproduces else ". It has no published number to meet.")


def _prompts(run: RunData, which: str) -> str | None:
    found = (run.config.get("prompts") or {}).get(which)
    return without_places(str(found)).removeprefix("\u2026/") if found else None


def _at(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


_URL = re.compile(r"\b[a-z][a-z0-9+]*://[^\s'\"]+")
_PATH = re.compile(
    r"(?<![\w.:/\u2026-])(?:~[\w.-]*|[A-Za-z]:\\|/)(?:[^\s'\",;\[\](){}]*[/\\])?([^\s'\",;\[\](){}/\\]*)"
)
_SECRET_KEYS = re.compile(r"(?:token|key|secret|password)(?:_env)?$", re.I)


def without_places(text: str) -> str:
    """Reduces paths in a text to their last part, and addresses and secrets to a word."""
    text = without_secrets(_URL.sub("ADDRESS", text))
    return _PATH.sub(lambda found: f"\u2026/{found[1]}" if len(found[0]) > 1 else found[0], text)


def settings_without_places(value: Any, key: str = "") -> Any:
    """Does the same for all texts in nested settings; leaves out values whose key names a secret."""
    if isinstance(value, dict):
        return {name: settings_without_places(part, str(name)) for name, part in value.items()}
    if isinstance(value, list):
        return [settings_without_places(part, key) for part in value]
    if isinstance(value, str):
        return SECRET if _SECRET_KEYS.search(key) else without_places(value)
    return value
