"""Checks a configuration on this machine: its settings, prompts, model, licences and reward servers.

It trains two iterations with the configuration's own recipe, like `flowrl bench`, with as few prompts as possible.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flowrl.config.base import SETTINGS, named_config
from flowrl.config.overrides import Settings
from flowrl.config.rewards import unique_keys
from flowrl.config.train import ConfigError, TrainConfig, load_config, location_of
from flowrl.health.diagnosis import Check, Examination, divided, faulty
from flowrl.health.machine_checks import disk_check
from flowrl.pipelines import PIPELINES
from flowrl.pipelines.places.hub_files import ask, refusal
from flowrl.pipelines.places.known_checkpoints import published
from flowrl.planning.published_models import in_cache, licence_of
from flowrl.planning.refusals import Obstacles, obstacles
from flowrl.profiling.iterations import run_iterations, settings_of, with_prompts
from flowrl.profiling.subject import CANNOT_LOAD, BenchSubject, prepare
from flowrl.prompts.identity import distinct
from flowrl.prompts.loading import Prompt
from flowrl.prompts.overlap import overlap_of_rows, shared_words
from flowrl.rewards import RewardInputs, addresses_of, asks_people, models_of
from flowrl.rewards.base.specs import CheckedReward, check_reward
from flowrl.rewards.judges.chat import is_server
from flowrl.runs.run_data import failure_reasons, warnings_by_kind
from flowrl.runtime.failures import Faults, explain, faults_of
from flowrl.runtime.randomness import counter_normal
from flowrl.session.advice import few_step_advice
from flowrl.session.preflight import more_faults
from flowrl.training.parts import cut_lines, model_family, read_run_prompts
from flowrl.training.prompting import RunPrompts

_SIZE = 64  # pixels of the images that servers are asked about
CANNOT = (ValueError, OSError, ImportError, RuntimeError, MemoryError)
"""Errors that loading and requests raise if something is missing."""


def diagnose_configuration(
    given: str | Mapping[str, Any], overrides: Settings, *, step: bool, offline: bool
) -> Examination:
    """Checks all that can be known of a configuration before its run; `step` trains twice, `offline` asks no hub."""
    about = f"The configuration {SETTINGS if isinstance(given, Mapping) else given}"
    try:
        path, name = named_config(given)
        try:
            config = load_config(path, overrides)
        except ConfigError as error:
            raise Faults(*error.faults, *more_faults(path, overrides, error)) from error
        about = about if isinstance(path, Mapping) else f"{about} ({path})"
        copy = config.parallel.shard * config.parallel.context
        found = obstacles(config, model_family(config.pipeline), copy * (config.parallel.replicate or 1))
    except CANNOT as error:
        return Examination(about=about, checks=tuple(faulty("settings", one) for one in faults_of(error)))
    return Examination(about=about, checks=_checks(config, name, found, step=step, offline=offline))


def _checks(config: TrainConfig, name: str, found: Obstacles, *, step: bool, offline: bool) -> tuple[Check, ...]:
    """All checks except reading the settings, in order; `found` are faults that stop a run."""
    told = {*found.refused, *found.absent, *found.device}
    prompts = None  # where they cannot be read, which is told with what stands in the way
    with suppress(ValueError, OSError):
        prompts = read_run_prompts(config.prompts)
    checks = [*_prompts(config, prompts)]
    for kind, sentences in (("settings", found.refused), ("missing", found.absent), ("device", found.device)):
        checks += [faulty("prompts" if said in found.of_prompts else kind, said) for said in sentences]
    if not told:
        checks.append(Check("settings", "ok", "flowrl train would take them"))
    if advice := few_step_advice(config):
        checks.append(Check("distilled model", "warning", *advice))
    checks += _model(config, offline=offline)
    checks += [
        check
        for check in _rewards(config, () if prompts is None else prompts.train, offline=offline)
        if check.state != "fault" or not any(sentence.startswith(check.found) for sentence in told)
    ]
    if config.out is not None:
        checks.append(disk_check(Path(config.out), name="disk of out"))
    if step:
        checks += step_checks(config, name, hindered=any(check.state == "fault" for check in checks))
    return tuple(checks)


def _prompts(config: TrainConfig, prompts: RunPrompts | None) -> Iterator[Check]:
    """Counts prompts, training prompts among the evaluation prompts, and prompts too long for a reward."""
    if prompts is None:
        return
    shared = overlap_of_rows(prompts.train, prompts.held_out)
    said = f"{len(prompts.train)} to train on, {len(prompts.held_out)} to evaluate on"
    if again := len(prompts.train) - len(distinct(prompts.train)):
        said += f"; {again} of those to train on are repeats"
    texts = list({row.text: None for row in (*prompts.train, *prompts.held_out)})
    for line in cut_lines(_right_rewards(config), texts):
        yield Check("cut prompts", "note", line)
    if shared.exact:
        yield Check(
            "prompts",
            "warning",
            f"{said}; {shared_words(len(shared.exact), shared.total)}",
            "take other prompts for prompts.eval: scores on those say nothing about new prompts",
        )
    else:
        yield Check("prompts", "ok", said)


def _right_rewards(config: TrainConfig) -> list[CheckedReward]:
    """The rewards whose options are right; the check of settings names the faults of the others."""
    found = list[CheckedReward]()
    for entry in (*config.rewards, *config.eval.rewards):
        with suppress(*CANNOT):
            found.append(check_reward(entry))
    return found


# ---- model and licences ----------------------------------------------------------------------------------------------


def _model(config: TrainConfig, *, offline: bool) -> Iterator[Check]:
    try:
        location = location_of(config.pipeline)
    except ValueError as error:
        yield faulty("model", str(error))
        return
    if Path(location).exists():
        yield Check("model", "ok", f"{location} is here")
    elif in_cache(location):
        yield Check("model", "ok", f"{location} is in the hub's cache")
    elif offline:
        yield Check(
            "model",
            "warning",
            f"{location} is not here, and the hub was not asked (`offline`)",
            "download it first, or set pipeline.model to a folder",
        )
    else:
        asked = ask(location)
        if asked.why == "found":
            yield Check("model", "note", f"{location} is on the hub: the first run downloads it")
        elif asked.why == "offline" and published(location) is not None:
            yield faulty(
                "model",
                f"{location} is not in the hub's cache, and the hub cannot be asked: download it where it can, "
                "and set pipeline.model to the folder, or HF_HOME to a cache that holds it",
            )
        else:
            yield faulty("model", refusal(location, asked, sorted(PIPELINES)))
    models = [location]
    for checked in _right_rewards(config):  # the others are told with the rewards
        with suppress(*CANNOT):
            models += [model.name for model in models_of(checked.options) or ()]
    yield from _licences(models, offline=offline)


def _licences(models: Sequence[str], *, offline: bool) -> Iterator[Check]:
    said, gated = list[str](), list[str]()
    for model in dict.fromkeys(models):
        known = published(model)
        licence = (known.licence, known.gated) if known is not None else None if offline else licence_of(model)
        if licence is None:
            continue
        said.append(f"{model}: {licence[0]}")
        if licence[1] and not (Path(model).exists() or in_cache(model)):
            gated.append(model)
    if gated:
        yield Check(
            "licences",
            "warning",
            "; ".join(said),
            f"accept the licence of {', '.join(gated)} on its page of the hub, and set HF_TOKEN to a token of the "
            "account that did",
        )
    elif said:
        yield Check("licences", "note", "; ".join(said))


# ---- rewards ---------------------------------------------------------------------------------------------------------


def _rewards(config: TrainConfig, prompts: Sequence[Prompt], *, offline: bool) -> Iterator[Check]:
    """Asks reward servers about two images; checks of other rewards whether their models are here."""
    names = unique_keys([entry.called for entry in config.rewards])
    for number, entry in enumerate((*config.rewards, *config.eval.rewards)):
        name = f"reward {names[number]}" if number < len(names) else f"eval reward {entry.called}"
        try:
            checked = check_reward(entry)
            if (addresses_of(entry.name or "") and not asks_people(entry.name)) or _asks_judge(entry.options):
                yield _ask_server(name, checked, prompts)
            else:
                yield _kept(name, checked, offline=offline)
        except CANNOT as error:
            yield faulty(name, explain(error))


def _kept(name: str, checked: CheckedReward, *, offline: bool) -> Check:
    """Whether the models of a reward are here, or can be downloaded."""
    models = [model.name for model in models_of(checked.options) or ()]
    away = [model for model in models if not (Path(model).exists() or in_cache(model))]
    if not away:
        return Check(name, "ok", "its options are right, and what it loads is here")
    missing = ", ".join(away)
    if offline:
        cure = "download it first, or move the reward to a server (flowrl serve)"
        return Check(name, "warning", f"{missing} is not here (`offline`)", cure)
    if any(ask(model, "config.json").why in ("offline", "gated", "no repository") for model in away):
        cure = "download it where you have access, or move the reward to a server that has it (flowrl serve)"
        return Check(name, "fault", f"{missing} is not in the hub's cache, and the hub does not give it", cure)
    return Check(name, "note", f"{missing} is not in the hub's cache: the first run downloads it")


def _asks_judge(options: Any) -> bool:
    """Whether a judge on a server stands anywhere in a reward's options."""
    if isinstance(options, Mapping):
        return ({"server", "model"} <= options.keys() and is_server(options)) or any(map(_asks_judge, options.values()))
    return isinstance(options, Sequence) and not isinstance(options, str) and any(map(_asks_judge, options))


def _ask_server(name: str, checked: CheckedReward, prompts: Sequence[Prompt]) -> Check:
    begun = time.perf_counter()
    reward = checked.build(torch.device("cpu"), {})
    reached = time.perf_counter() - begun
    if not prompts or reward.needs & {"videos", "sounds", "source_images", "reference_images"}:
        return Check(name, "ok", f"its server is ready in {reached:.2g} s; no score was asked for")
    # Noise, which every scorer gives some score: two images of one prompt, since some compare.
    inputs = RewardInputs(
        prompts=[prompts[0].text] * 2,
        images=counter_normal((2, 3, _SIZE, _SIZE), "doctor", reward.version).mul(0.2).add(0.5).clamp(0, 1),
        metadata=[dict(prompts[0].metadata)] * 2,
        group_ids=torch.zeros(2, dtype=torch.int64),
        sample_ids=torch.arange(2),
    )
    begun = time.perf_counter()
    output = reward(inputs)
    seconds = time.perf_counter() - begun
    if not bool(output.valid.all()):
        words = ", ".join(sorted({word for word in output.errors or () if word})) or "no reason was given"
        said, cure = divided(
            f"its server is ready and gives no score for two images of noise ({words}): look at the server's log, and "
            "try the reward on images with flowrl reward score"
        )
        return Check(name, "fault", said, cure)
    return Check(name, "ok", f"its server is ready in {reached:.2g} s, and scores two images in {seconds:.2g} s")


_ITERATIONS = 2  # the first warms up


def step_checks(config: TrainConfig, name: str, *, hindered: bool) -> Iterator[Check]:
    """Throughput and memory of an iteration, and the recipe's own warnings; downloads no weights. `hindered` says that
    another check found a fault that stops the run."""
    why = ""
    if hindered:
        why = "fix what is marked above first"
    elif config.policy.train == "full" or config.parallel.shard * config.parallel.context > 1:
        why = "this step is for one process that trains a LoRA; run flowrl train with num_iterations=2 instead"
    elif not (Path(model := location_of(config.pipeline)).exists() or in_cache(model)):
        why = f"the weights of {model} are not here; flowrl bench measures random ones of its size"
    if why:
        yield Check("step", "note", f"not tried: {why}")
        return
    try:
        subject = prepare(config, name, random_weights=False, layers=None)
        few = fewest(subject)
        rows = run_iterations(subject, replace(few, num_iterations=_ITERATIONS))
    except (*CANNOT_LOAD, MemoryError) as error:
        yield faulty("step", explain(error))
        return
    for reward, reason in subject.absent:
        yield Check("step", "note", f"without the reward {reward}: {reason}")
    failed = max(row.get("invalid_ratio", 0.0) for row in rows)
    if failed > 0:
        yield Check(
            "step",
            "fault" if failed > config.max_invalid_ratio else "warning",
            f"{failed:.0%} of the images got no valid reward ({failure_reasons(rows) or 'no reason given'})",
            "fix the reward or its server: what fails teaches nothing, and beyond max_invalid_ratio "
            f"({config.max_invalid_ratio:g}) the run stops",
        )
    for said in warnings_by_kind(rows).values():
        yield Check("step", "warning", *divided(said[0][1]))
    row, images = rows[-1], few.num_images
    seconds, share = row["seconds"], config.prompts_per_step / few.prompts_per_step
    hours = seconds * share * config.num_iterations / 3600
    peak = row.get("memory/peak_gib")
    memory = (
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB of memory"
        if peak is None
        else f"{peak:.1f} GiB of the GPU"
    )
    yield Check(
        "step",
        "ok",
        f"{images} images trained on in {seconds:.2g} s ({images / seconds:.2g} a second), with at most {memory}; "
        f"{config.num_iterations} iterations of {config.num_images} images take about {hours:.2g} h on one such "
        "device, without evaluations",
    )


def fewest(subject: BenchSubject) -> TrainConfig:
    """The configuration of whole iterations with as few prompts as its other settings allow."""
    return next(with_prompts(subject, range(1, subject.config.prompts_per_step)), settings_of(subject))
