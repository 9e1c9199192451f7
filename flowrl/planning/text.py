"""A plan for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from flowrl.config.sections import PipelineConfig, SamplerConfig
from flowrl.config.train import TrainConfig
from flowrl.pipelines.places.hub_files import did_you_mean
from flowrl.pipelines.places.known_checkpoints import precision_note
from flowrl.planning.cost import FLOOR, Cost
from flowrl.planning.disk import disk_rows, on_hub
from flowrl.planning.fits import Fit, fit
from flowrl.planning.gather import Plan
from flowrl.planning.memory import CARDS, LIBRARIES, NODE, OVERHEAD, Facts, Memory, fitting
from flowrl.planning.outlook import Outlook, headline, outlook_lines, sooner_lines
from flowrl.planning.refusals import Obstacles
from flowrl.planning.throughput import PEAKS, SHARES
from flowrl.planning.verdict import in_the_way
from flowrl.planning.words import Row, duration, flops, in_bytes, mean, note, pairs, span, table
from flowrl.rendering.markup import plural
from flowrl.session.advice import sizes_line
from flowrl.training.parts import attention_text

BRIEF = 40
"""Lines of a brief plan."""
BRIEFLY = ("recipe", "iterations", "model", "", "size", "sampler")
"""Facts about the run in a brief plan."""
_TOLD = (24, 40, 80)
"""Cards, in GB, that a plan covers unless you name one."""


def as_text(plan: Plan, found: Obstacles, outlook: Outlook) -> str:
    """All sections; the last one names what you have to do first."""
    sections = [
        ("What it does", pairs(run_rows(plan))),
        ("Batches", _batches(plan)),
        ("Network evaluations", _evaluations(plan)),
        ("Cost", _cost(plan)),
        ("Memory of a process, an estimate from counted tensors", memory_lines(plan, outlook.card)),
        ("Disk", pairs(disk_rows(plan))),
        ("Before it starts", first_rows(plan, found)),
    ]
    return _blocks(plan, outlook, gains=True, sections=sections)


def brief_text(plan: Plan, found: Obstacles, outlook: Outlook) -> str:
    """In `BRIEF` lines: the verdict, what would shorten the run, what you have to do first, and what the run does."""
    rows = [row for row in run_rows(plan) if row[0] in BRIEFLY]
    does = [*pairs(rows), *_batches(plan)[:1]]
    sections = [("Before it starts", first_rows(plan, found)), ("What it does", does)]
    text = _blocks(plan, outlook, gains=False, sections=sections)
    lines = text.split("\n")
    more = "`long` shows memory, network evaluations, cost and disk in full."
    if len(lines) > BRIEF - 2:
        lines, more = lines[: BRIEF - 2], f"{len(lines) - BRIEF + 2} more lines, and all that is known: `long`."
    return "\n".join([*lines, "", more])


def _blocks(plan: Plan, outlook: Outlook, *, gains: bool, sections: Sequence[tuple[str, list[str]]]) -> str:
    """The verdict and sections with their titles; empty ones are left out."""
    sooner = f"To end sooner, on {outlook.speed}", sooner_lines(plan, outlook)
    told = [("", outlook_lines(plan, outlook, gains=gains)), sooner, *sections]
    blocks = ("\n".join([*([title] if title else []), *lines]) for title, lines in told if lines)
    return "\n\n".join([headline(plan, outlook), *blocks])


# ---- sections --------------------------------------------------------------------------------------------------------


def run_rows(plan: Plan) -> list[Row]:
    """Recipe, length, model, size and sampler."""
    config, run = plan.config, plan.run
    recipe = f"{config.recipe}, objective {plan.counts.objective}"
    recipe += f", credit {plan.counts.credit}" if plan.counts.credit else ""
    drawn = "not known" if plan.size is None else f"{plan.size[0]} x {plan.size[1]}"
    if plan.size is not None and plan.size[2] is not None:
        drawn += f", {plan.size[2]} frames"
    if plan.network is not None:
        tokens = f"{'at most ' * (plan.text.usual is not None)}{plan.text.most} text tokens"
        drawn += f"; latent {list(plan.latent)}, {tokens}" if plan.latent else f"; {tokens}"
        drawn += f", {plan.network.attended:,} attend at once" if plan.network.attended else ""
    sampler, ends = config.sampler, []
    if run.iterations < config.num_iterations:
        ends.append(f"the budget ends it there, before its {config.num_iterations}")
    if config.budget.seconds is not None:
        ends.append(f"or after {config.budget.seconds:g} s")
    # Settings that make a run faster or smaller, where they are not the default.
    sections: list[tuple[PipelineConfig | SamplerConfig | TrainConfig, str, tuple[str, ...]]] = [
        (config.pipeline, "pipeline.", ("compile", "vae_dtype")),
        (config.sampler, "sampler.", ("train_negative",)),
        (config, "", ("reward_dtype", "keep_graphs")),
    ]
    speed = [
        f"{where}{own.name}: {str(value).lower()}"
        for section, where, names in sections
        for own in fields(section)
        if own.name in names and (value := getattr(section, own.name)) != own.default
    ]
    return [
        ("recipe", recipe),
        ("iterations", f"{run.iterations:,}" + "".join(f"; {text}" for text in ends)),
        ("model", f"{config.pipeline.model}, family {plan.family}, {config.pipeline.dtype}"),
        *_stand_ins(plan),
        ("attention", attention_text(config.pipeline)),
        ("size", drawn),
        ("sampler", f"{sampler.kernel}, {plural(sampler.num_steps, 'step')}, guidance {sampler.guidance_scale:g}"),
        *([("speed", ", ".join(speed))] if speed else []),
    ]


def _stand_ins(plan: Plan) -> list[Row]:
    """Notes on the model, and on what stands for its unknown parts."""
    if (note := precision_note(plan.model, plan.config.pipeline.dtype)) is not None:
        return [("", note)]
    if plan.counted_as is not None:
        meant = did_you_mean(plan.model)
        return [("", f"nothing is known of it here: counted as {plan.counted_as}, the family's first{meant}")]
    if plan.parts_of is not None:
        return [("", f"its denoiser as its configuration says, its other parts as {plan.parts_of}")]
    return []


def _batches(plan: Plan) -> list[str]:
    config, geometry, updates = plan.config, plan.geometry, plan.config.updates_per_rollout
    iterations = plan.run.iterations
    of_files = {"dpo_offline": f"pairs of two {plan.drawn}s", "sft": f"{plan.drawn}s of a file"}
    what = of_files.get(config.objective.name or "", f"{plan.drawn}s")
    count = config.prompts_per_step if config.objective.name == "dpo_offline" else config.num_images
    made = f"{config.prompts_per_step} prompts x {config.group_size} = {config.num_images:,} {plan.drawn}s"
    rows = [("an iteration", f"{count:,} {what}" if config.objective.name in of_files else made)]
    if plan.run.total.images != config.num_images * iterations:
        rows.append(("", f"{mean(plan.run.total.images, iterations)} decoded and scored"))
    rows += [
        ("a process", f"{geometry.images_per_process:,} {plan.drawn}s of {plan.processes} process(es)"),
        (
            "rollout",
            f"{geometry.images_per_process // geometry.rollout_batch_size:,} batches of {geometry.rollout_batch_size}",
        ),
        (
            "update",
            f"{geometry.micro_batches_per_update:,} micro-batches of {geometry.micro_batch_size}, "
            f"{updates} update{'s' * (updates > 1)} an iteration",
        ),
        ("the run", f"{count * iterations:,} {what}, {updates * iterations:,} updates"),
    ]
    if smaller := sizes_line(config, max(1, plan.processes // config.parallel.context)):
        rows.append(("batch sizes", smaller))
    if config.curriculum.max_rounds > 1:
        rows.append(("rounds", f"up to {config.curriculum.max_rounds} of an iteration; numbers here are of one"))
    return pairs(rows)


def _evaluations(plan: Plan) -> list[str]:
    config, run = plan.config, plan.run
    a_sample = "an image" if plan.drawn == "image" else "a clip"
    kinds, images = ("rollout", "completion", "update", "backward", "reference"), config.num_images * run.iterations
    each = {kind: getattr(run.total, kind) / images for kind in kinds}
    rows = [("", a_sample, "an iteration", "the run")]
    for kind, value in each.items():
        total = getattr(run.total, kind)
        if total:
            rows.append((kind, f"{value:,.4g}", mean(total, run.iterations), f"{total:,}"))
    rows.append(("all", f"{sum(each.values()):,.4g}", mean(run.total.total, run.iterations), f"{run.total.total:,}"))
    lines = table(rows)
    if config.keep_graphs == "gradients":
        lines += note("backward in the rollout, through every transition that is drawn: the update evaluates nothing")
    if not plan.counts.exact:
        lines += note("update, backward and reference at most: micro-batches that teach nothing are left out")
    if run.evaluations:
        if run.evaluation_rows is None:
            text = f"{run.evaluations} of prompts that are not here, so their size is not known"
        else:
            text = f"{run.evaluations} of {run.evaluation_images:,} {plan.drawn}s, {run.evaluation_rows:,} evaluations "
            text += f"each and once {run.base_rows:,} of the base" if run.base_rows else "each"
        lines += pairs([("evaluation", f"{text}; not in the table")])
    return lines


def _cost(plan: Plan) -> list[str]:
    network, cost, run = plan.network, plan.cost, plan.run
    if network is None or cost is None:
        return note(f"not known: {plan.unknown}")
    passes = f"{flops(network.forward)} forward, {flops(network.forward + network.backward)} with its backward pass"
    lines = pairs([("one evaluation", f"{passes}; attention is {network.attention:.0%} of the forward")])
    if plan.usual_forward is not None and plan.text.usual != plan.text.most:
        share = f"{plan.usual_forward / network.forward:.0%} of that, and so of what follows"
        told = f"{plan.text.usual} tokens ({plan.text.told}): {flops(plan.usual_forward)} forward, {share}"
        lines += pairs([("a usual prompt", told)])
    counts = (plan.config.num_images * run.iterations, run.iterations)
    a_sample = "an image" if plan.drawn == "image" else "a clip"
    stages = {**cost.stages, **({"decoding": cost.decoding} if cost.decoding else {})}
    rows: list[tuple[str, ...]] = [("", a_sample, "an iteration", "the run", "share")]
    for name, value in stages.items():
        rows.append((name, *(flops(value / n) for n in counts), flops(value), f"{value / cost.total:.0%}"))
    if cost.evaluation:
        rows.append(("evaluation", "", "", flops(cost.evaluation), f"{cost.evaluation / cost.total:.0%}"))
    rows.append(("all", *(flops(cost.training / n) for n in counts), flops(cost.total), "100%"))
    lines += table(rows)
    missing = ["text encoders", "rewards"]
    missing += ["decoding"] * (cost.decoding is None) + ["evaluations"] * (cost.evaluation is None)
    listed = f"{', '.join(missing[:-1])} and {missing[-1]}"
    lines += note(f"without {listed}; stages of {a_sample} and an iteration are without evaluations")
    return lines + _hours(plan, cost)


def _hours(plan: Plan, cost: Cost) -> list[str]:
    kind, iterations = plan.pace.processor, plan.run.iterations
    if plan.pace.range is None:
        rows = [(f"{kind} time", "an iteration", "the run", *([f"on {plan.processes}"] if plan.processes > 1 else []))]
        for name, peak in PEAKS.items():
            paces = (peak * SHARES[0], peak * SHARES[1])
            amounts = [cost.training / iterations, cost.total]
            amounts += [cost.total / plan.processes] if plan.processes > 1 else []
            rows.append((f"one {name}", *(span(amount, paces) for amount in amounts)))
        return table(rows) + note(plan.pace.told)
    paces = plan.pace.range
    each = span(cost.training / iterations, paces)
    told = f"{span(cost.total, paces)} on one {kind}; {each} an iteration. {plan.pace.told}"
    hours = [(f"{kind} time", told)]
    if plan.processes > 1:
        hours.append(("", f"{span(cost.total / plan.processes, paces)} on {plan.processes}"))
    if kind == "GPU":
        least = f"never less than {duration(cost.total / (FLOOR * 1e12))}"
        hours.append(("", f"{least}: no GPU of an H200's kind exceeds {FLOOR:g} TFLOP/s"))
    return pairs(hours)


def memory_lines(plan: Plan, card: int | None = None) -> list[str]:
    """Memory of a process, and what to change for a card of so many GB, or for the usual cards if it is None."""
    memory, facts = plan.memory, plan.facts
    if memory is None or facts is None:
        return note(f"not known: {plan.unknown}")
    rows = [(label, in_bytes(size)) for label, size in memory.held.items()]
    rows += [(name, "not known") for name in memory.unknown]
    rows.append(("all the time", in_bytes(sum(memory.held.values()))))
    rows += [(f"+ {name}", in_bytes(size)) for name, size in memory.stages.items()]
    where, kept = "sampling, activations" if facts.gradients[1] else "activations", memory.gradients
    rows.append((f"+ {where}, {plural(memory.micro_batch_size, 'image')}", in_bytes(memory.configured + memory.update)))
    rows += [("of them gradients of images", in_bytes(kept))] if kept else []
    rows.append(("reserve", in_bytes(OVERHEAD)))
    rows.append(("at most", in_bytes(memory.peak)))
    lines = table(rows)
    if memory.start:
        parts = "text encoders and autoencoder; the denoiser is loaded once the encoders are dropped"
        parts = "all parts; the encoders are dropped then" if facts.at_once else parts
        lines += note(f"at the start {in_bytes(memory.start)} of {parts}")
    lines += _host_lines(plan, memory, facts)
    if memory.worker is not None:
        back, workers = in_bytes(sum(facts.record.columns) * facts.latent), plan.config.workers
        gpus = f" on {workers.drawing * workers.rollout_gpus:g} GPUs" * (plan.pace.processor == "GPU")
        lines += note(
            f"this is the process that learns; one of the {workers.drawing} that draw{gpus} takes at most "
            f"{in_bytes(memory.worker)}. In an iteration it is sent {in_bytes(memory.sent)} of weights, and {back} of "
            "latents come back from all of them"
        )
    lines += _micro_batches(plan, memory, facts)
    if plan.counts.through_rewards:
        lines += note("reward and decoder keep activations too, which are not counted")
    lines += ["To fit a card"]
    cards = _TOLD if card is None else (card,)
    return lines + pairs((f"{size} GB", _words(fit(facts, plan.settings, plan.choices, size), plan)) for size in cards)


def _host_lines(plan: Plan, memory: Memory, facts: Facts) -> list[str]:
    host = [(label, in_bytes(size)) for label, size in memory.host.items()]
    if facts.prompts is None and facts.prompt:
        host.append(("embeddings of prompts", f"{in_bytes(facts.prompt * facts.dtype[1])} each"))
    host += [("while the model loads", in_bytes(memory.host_start)), ("libraries", in_bytes(LIBRARIES))]
    node = min(plan.processes, NODE)
    most = f", {in_bytes(memory.machine(plan.settings))} for {node} on one machine" if node > 1 else ""
    return ["Host memory of a process", *table([*host, ("at most", in_bytes(memory.host_peak) + most)])]


def _micro_batches(plan: Plan, memory: Memory, facts: Facts) -> list[str]:
    lines = note(
        f"an image of a micro-batch takes {in_bytes(memory.image)}, with gradient checkpointing "
        f"{in_bytes(memory.image_checkpointed)}"
        if facts.network.blocks
        else f"an image of a micro-batch takes {in_bytes(memory.image)}; this network cannot be checkpointed"
    )
    if facts.keeps:
        return lines + note(f"keep_graphs keeps those of {plural(facts.keeps, 'image')} at once")
    allowed = plan.choices.sizes[plan.settings.shard]
    suggested = [("largest micro_batch_size", *(f"{card} GB" for card in CARDS))]
    for label, checkpointed in (("plain", False), ("gradient_checkpointing", True)):
        if checkpointed and not facts.network.blocks:
            continue
        sizes = [fitting(memory, size, allowed, checkpointed=checkpointed) for size in CARDS.values()]
        suggested.append((label, *(str(size) if size else "-" for size in sizes)))
    return lines + table(suggested)


def _words(found: Fit, plan: Plan) -> str:
    most = in_bytes(found.memory.peak)
    if found.overrides is None:
        return f"does not fit with any setting: {in_the_way(found)}"
    most += " and what is not known" if found.memory.unknown else ""
    if not found.overrides:
        return f"fits as it is, at most {most}"
    more = found.settings.processes
    where = f", on {more} such cards" if more > plan.processes else ""
    return f"{' '.join(found.overrides)}: at most {most}{where}"


def first_rows(plan: Plan, found: Obstacles) -> list[str]:
    """Licence, what you have to put in place, and what this machine lacks."""
    rows: list[Row] = []
    if plan.config.pipeline.model.startswith("asset:"):
        rows.append(("licence", "Apache-2.0; ships with flowrl"))
    elif not on_hub(plan):
        rows.append(("licence", "none known for a folder: see where it came from"))
    elif plan.licence is None:
        rows.append(("licence", f"not known: see huggingface.co/{plan.model}"))
    else:
        name, gated = plan.licence
        todo = f"; gated: accept it at huggingface.co/{plan.model}, then hf auth login" if gated else "; not gated"
        rows.append(("licence", name + todo))
    rows += [("put in place" if place == 0 else "", text) for place, text in enumerate(found.absent)]
    rows += [("device", text) for text in found.device]
    if plan.prompts is not None and plan.prompts < plan.config.prompts_per_step:
        few = f"prompts.train holds {plan.prompts}, fewer than prompts_per_step ({plan.config.prompts_per_step})"
        rows.append(("prompts", f"{few}: an iteration repeats some"))
    if plan.run.iterations == 1 and plan.config.num_iterations > 1:
        rows.append(("budget", "it is used up by the first iteration: raise it"))
    return pairs(rows)
