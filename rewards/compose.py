"""Several rewards as one: weights, schedules, bounds, gates, and the treatment of failed items."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from types import FunctionType, MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowrl.config.rewards import RewardConfig, check_weights, unique_keys
from flowrl.config.sections import Precision
from flowrl.rewards.base import (
    KINDS,
    VERDICTS,
    AskedReward,
    Reward,
    RewardInputs,
    RewardOutput,
    changed,
    gives_verdicts,
    models_of,
)
from flowrl.rewards.base.outputs import check_output, log_words
from flowrl.rewards.base.specs import Spec, validate_reward_specs
from flowrl.runtime.placement import Resting, sent
from flowrl.runtime.precision import arithmetic


def at_rest(reward: Reward, device: torch.device, known: dict[int, Resting], *, holds: bool) -> Reward:
    """A reward that does not learn, with its networks on the host; each call copies them to the device. `known` has by
    identity what already rests: rewards that share a network share its rest. `holds` says that it must hold one. Raises
    ValueError: a network that it should hold is not found, or cannot be moved."""
    found = {id(network): network for network in networks_of(reward)}
    way_out = "leave rewards out of pipeline.offload"
    if holds and not found:
        raise ValueError(f"pipeline.offload: the networks of reward {reward.name!r} were not found: {way_out}")
    for name, network in found.items():
        if name not in known:
            try:
                known[name] = Resting([network], device)
            except ValueError as error:
                raise ValueError(f"pipeline.offload: reward {reward.name!r} cannot rest, {error}: {way_out}") from error
    resting = [rest for name, rest in known.items() if name in found]  # in one order, so no two threads deadlock
    if not resting:
        return reward

    def awake(inputs: RewardInputs) -> RewardOutput:
        with ExitStack() as stack:
            for rest in resting:
                stack.enter_context(rest.awake())
            return reward(inputs)

    return changed(reward, awake)


def networks_of(value: Any) -> Iterator[nn.Module]:
    """The networks that a reward holds: among bound arguments, fields and closures of this package's own objects."""
    seen, left = set[int](), [value]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, nn.Module):
            yield one
        elif isinstance(one, partial):
            left += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, MethodType):
            left += [one.__self__, one.__func__]
        elif isinstance(one, FunctionType):
            left += [cell.cell_contents for cell in one.__closure__ or ()]
        elif isinstance(one, Mapping):
            left += one.values()
        elif isinstance(one, Sequence) and not isinstance(one, str | bytes):
            left += one
        elif type(one).__module__.startswith("flowrl."):
            slots = chain.from_iterable(getattr(kind, "__slots__", ()) for kind in type(one).__mro__)
            left += [getattr(one, name) for name in (*slots, *getattr(one, "__dict__", {})) if hasattr(one, name)]


Merge = Literal["sum", "geometric", "harmonic"]
Partial = Literal["drop", "renormalise"]
_SMALLEST = 1e-6  # smallest value with which a reward enters geometric and harmonic means


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """One reward of a sum, its key in the log, and its settings in the run's list."""

    reward: Reward
    key: str
    entry: RewardConfig

    @property
    def weight(self) -> float:
        """How much the reward counts in the sum."""
        return self.entry.weight


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedSum:
    """A `Reward`: `sum_k weight_k r_k`, with every reward and its sub-scores as parts.

    Parts are `reward/<key>` and `reward/<key>/<part>`; `keys` are the rewards' labels, else their names, the second of
    a name with `_2`. Errors are `<key>/<word>`. Weights are not normalised.

    An item whose gate's reward failed is invalid: nobody knows whether the gate lets it through.
    """

    terms: tuple[Term, ...]
    """The rewards and their weights."""
    merge: Merge = "sum"
    """`sum`; `geometric`: prod r^(w / sum w); `harmonic`: sum w / sum(w / r), rewards raised to at least 1e-6."""
    partial: Partial = "drop"
    """An item that is invalid in a reward of nonzero weight is invalid in the whole with `drop`; with `renormalise` the
    others take over its weight, in proportion to theirs."""
    dtype: Precision = "float32"
    """Arithmetic of the frozen networks of rewards that do not learn; see `flowrl.runtime.precision`."""

    @property
    def rewards(self) -> tuple[Reward, ...]:
        """The rewards, in the order of the configuration."""
        return tuple(term.reward for term in self.terms)

    @property
    def keys(self) -> tuple[str, ...]:
        """The label of each reward, which names its part."""
        return tuple(term.key for term in self.terms)

    @property
    def name(self) -> str:
        """All labels, joined."""
        return "+".join(self.keys)

    @property
    def kind(self) -> str:
        """The most demanding kind of its members, in the order of `KINDS`; a gate looks at whole groups."""
        gated = ["groupwise"] if any(term.entry.gate is not None for term in self.terms) else []
        return max((*gated, *(reward.kind for reward in self.rewards)), key=KINDS.index)

    @property
    def whole_groups(self) -> bool:
        """Whether all images of a group must come in one call; if a member also learns, `kind` does not show it."""
        return any(term.entry.gate is not None or term.reward.kind in ("groupwise", "pairwise") for term in self.terms)

    @property
    def waits(self) -> bool:
        """Whether any reward waits for another program."""
        return any(reward.waits for reward in self.rewards)

    @property
    def needs(self) -> frozenset[str]:
        """The fields of `RewardInputs` that any reward reads."""
        return frozenset().union(*(reward.needs for reward in self.rewards))

    @property
    def differentiable(self) -> bool:
        """Whether the whole sum carries gradient: every member of nonzero weight must."""
        return all(term.reward.differentiable for term in self.terms if term.weight)

    @property
    def version(self) -> str:
        return " + ".join(f"{term.weight:g} * {term.reward.version}" for term in self.terms)

    @property
    def verdicts(self) -> str:
        """The key of the first reward that gives verdicts, see `gives_verdicts`; without any, the name for verdicts."""
        return next((term.key for term in self.terms if gives_verdicts(term.reward.name)), VERDICTS)

    def weights_at(self, iteration: int) -> tuple[float, ...]:
        """The weights of an iteration."""
        return tuple(term.entry.weight_at(iteration) for term in self.terms)

    def __call__(self, inputs: RewardInputs) -> RewardOutput:
        return self._combine(
            [self._of(term, inputs) for term in self.terms], inputs.group_ids, inputs.iteration, inputs.images.device
        )

    def _of(self, term: Term, inputs: RewardInputs) -> RewardOutput:
        with arithmetic("float32" if term.reward.kind == "adversarial" else self.dtype):
            return term.reward(inputs)

    def start(self, inputs: RewardInputs, executor: Executor) -> Callable[[], RewardOutput]:
        """Starts the rewards that wait for another program, with copies of the images on the host, which hold no device
        memory; runs the others, and returns how to get the result."""
        videos = None if inputs.videos is None else inputs.videos.detach().cpu()
        sounds = None if inputs.sounds is None else inputs.sounds.detach().cpu()
        away = replace(inputs, images=inputs.images.detach().cpu(), videos=videos, sounds=sounds)
        jobs = [
            term.reward.ask(away)
            if isinstance(term.reward, AskedReward)
            else executor.submit(copy_context().run, term.reward, away).result
            if term.reward.waits
            else None
            for term in self.terms
        ]
        here = [None if job else self._of(term, inputs) for job, term in zip(jobs, self.terms, strict=True)]
        group_ids, iteration, device = inputs.group_ids, inputs.iteration, inputs.images.device  # not the images

        def result() -> RewardOutput:
            pairs = zip(jobs, here, strict=True)
            outputs = [done if job is None else job() for job, done in pairs]
            return self._combine(outputs, group_ids, iteration, device)

        return result

    def _combine(
        self, outputs: Sequence[RewardOutput | None], group_ids: Tensor, iteration: int, device: torch.device
    ) -> RewardOutput:
        batch, gates = len(group_ids), []
        values, known, weights = [], [], []
        parts: dict[str, Tensor] = {}
        errors: dict[str, int] = {}
        for term, given in zip(self.terms, outputs, strict=True):
            output = check_output(given, batch, term.key)
            value = output.values.to(device).clamp(*term.entry.bounds)
            if term.weight:  # a reward that is only watched must not spoil the sum
                values.append(value)
                known.append(output.valid.to(device))
                weights.append(term.entry.weight_at(iteration))
            if term.entry.gate is not None:
                gates.append(output.valid.to(device))
            parts[f"reward/{term.key}"] = value
            for part, name in log_words(output.parts).items():
                parts[f"reward/{term.key}/{name}"] = output.parts[part].to(device)
            for word, name in log_words(output.errors).items():
                key = f"{term.key}/{name}"
                errors[key] = errors.get(key, 0) + output.errors[word]
        valid_KB = torch.stack(known)
        weight_K = sent(torch.tensor(weights, dtype=torch.float32), device)
        if not any(weights) and (self.merge != "sum" or self.partial != "drop"):
            raise ValueError(
                f"the schedules of {self.name} make every weight 0 in iteration {iteration}, and a mean of nothing has "
                f"no value: let one reward keep a weight, or sum them with merge sum and partial drop."
            )
        # With `renormalise`, a reward whose weight is 0 now cannot replace the others.
        valid = valid_KB.all(0) if self.partial == "drop" else (valid_KB & (weight_K != 0)[:, None]).any(0)
        for open_B in gates:
            valid = valid & open_B
        total = torch.where(valid, _merge(torch.stack(values), valid_KB, weight_K, self.merge), torch.nan)
        for term in self.terms:
            if term.entry.gate is not None:
                closed = parts[f"reward/{term.key}"] < term.entry.gate
                parts[f"reward/{term.key}/gated"] = closed.float()
                total = close_gates(total, closed, group_ids.to(device))
        return RewardOutput(values=total, valid=valid, parts=parts, errors=errors)


def _merge(value_KB: Tensor, valid_KB: Tensor, weight_K: Tensor, merge: Merge) -> Tensor:
    """[B] merged values; weights of missing members go to the others."""
    present = torch.where(valid_KB, weight_K[:, None], 0.0)
    if merge == "sum":
        total = torch.zeros_like(value_KB[0])
        for value, weight in zip(torch.where(valid_KB, value_KB, 0.0), present, strict=True):
            total = total + weight * value
        whole = valid_KB.all(0)
        return torch.where(whole, total, total * weight_K.sum() / torch.where(whole, 1.0, present.sum(0)))
    value_KB = torch.where(valid_KB, value_KB, 1.0).clamp(min=_SMALLEST)
    if merge == "geometric":
        return ((present * value_KB.log()).sum(0) / present.sum(0)).exp()
    return present.sum(0) / (present / value_KB).sum(0)


def close_gates(total_B: Tensor, closed_B: Tensor, group_B: Tensor) -> Tensor:
    """Totals in which a gated image gets the lowest of the group's other totals (of all if all are gated); a large
    penalty would swell the group's standard deviation and drown the other rewards."""
    result = total_B.clone()
    for group in group_B[closed_B].unique():
        members = (group_B == group) & ~total_B.isnan()
        judged = members & ~closed_B
        judged = judged if bool(judged.any()) else members
        if bool(judged.any()):
            result[members & closed_B] = total_B[judged].min()
    return result


def sum_of(
    members: Sequence[tuple[Reward, RewardConfig]], *, merge: Merge = "sum", partial: Partial = "drop"
) -> WeightedSum:
    """Sums rewards as their entries say; a label or name that occurs again gets the key `<name>_2`, `<name>_3`, ….
    Raises ValueError: if all weights are 0, a kind is unknown, or a mean that needs positive weights has others."""
    weights = [entry.weight for _, entry in members]
    check_weights(weights)
    factors = [factor for _, entry in members for _, factor in entry.schedule]
    if (merge != "sum" or partial != "drop") and min((*weights, *factors)) < 0:
        raise ValueError(
            f"a {merge} mean, or one that makes up for missing rewards, needs weights above 0, got {weights}"
            f"{f' and schedules with factors down to {min(factors):g}' if factors else ''}."
        )
    keys = unique_keys([entry.label or reward.name for reward, entry in members])
    terms: list[Term] = []
    for (reward, entry), key in zip(members, keys, strict=True):
        if reward.kind not in KINDS:
            raise ValueError(f"reward {reward.name!r}: kind must be one of {', '.join(KINDS)}, got {reward.kind!r}.")
        terms.append(Term(reward=reward, key=key, entry=entry))
    return WeightedSum(terms=tuple(terms), merge=merge, partial=partial)


def build_weighted_sum(
    specs: Sequence[Spec],
    *,
    device: torch.device | str = "cpu",
    merge: Merge = "sum",
    partial: Partial = "drop",
    rests: bool = False,
) -> WeightedSum:
    """Checks all specs, then makes the rewards on `device` one after another, and sums them. With `rests` their
    networks stay on the host except while they score."""
    checked, parts, device = validate_reward_specs(specs), dict[Hashable, Any](), torch.device(device)
    members, known = list[tuple[Reward, RewardConfig]](), dict[int, Resting]()
    for one in checked:
        made = one.build(device, parts)
        if rests and device.type != "cpu":
            made = at_rest(made, device, known, holds=bool(models_of(one.options)))
        members.append((made, one.entry))
    return sum_of(members, merge=merge, partial=partial)
