"""Conditioning, trajectories and the row table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flowrl.recipes.grpo import rows_of
from flowrl.samplers.completion import sample_trajectories
from flowrl.trajectory import Conditioning, Credit, Rows, Trajectory


def test_conditioning_selects_and_joins() -> None:
    cond = Conditioning({"text": torch.arange(12.0).reshape(3, 4), "pooled": torch.arange(3)})
    assert len(cond) == 3
    assert torch.equal(cond[1].tensors["text"], cond.tensors["text"][1:2])
    assert torch.equal(cond[-1].tensors["pooled"], torch.tensor([2]))
    assert torch.equal(cond[[2, 0]].tensors["pooled"], torch.tensor([2, 0]))
    assert torch.equal(cond[torch.tensor([False, True, True])].tensors["pooled"], torch.tensor([1, 2]))
    joined = Conditioning.cat([cond[:1], cond[1:]])
    assert all(torch.equal(joined.tensors[name], tensor) for name, tensor in cond.tensors.items())
    assert [len(cond[i]) for i in range(3)] == [1, 1, 1]
    with pytest.raises(IndexError, match="batch of 3"):
        cond[3]
    assert len(cond[0].expand(5)) == 5
    for bad in ({}, {"a": torch.tensor(1.0)}, {"a": torch.ones(2), "b": torch.ones(3)}):
        with pytest.raises(ValueError, match="first dimension"):
            Conditioning(bad)


def test_rows_hold_the_rollouts_transitions() -> None:
    b, kept, steps = 3, (1, 2, 4, 5), (1, 4)
    states = torch.arange(b * 4.0).reshape(b, 4, 1)
    trajectory = Trajectory(
        states=states, kept=kept, steps=steps, log_prob=torch.arange(6.0).reshape(3, 2), final=torch.zeros(b, 1)
    )
    group, advantage = torch.tensor([0, 0, 7]), torch.tensor([0.5, 0.5, -1.0, -1.0, 2.0, 2.0], dtype=torch.float64)
    keep = torch.tensor([True, True, False, False, True, True])
    sampled = sample_trajectories(trajectory, group, None)
    weighted = Credit(raw=torch.zeros(1, 6), norm=sampled.group, weight=torch.tensor([0.5, 1.5] * 3))
    rows = rows_of(sampled, weighted, advantage[None], keep, (0.1, 0.3))
    assert len(rows) == 6
    for i in range(b):
        for k, step in enumerate(steps):
            row = rows[i * 2 + k]
            assert sampled.states[row.source].item() == states[i, kept.index(step), 0]
            assert sampled.states[row.produced].item() == states[i, kept.index(step + 1), 0]
            values: dict[str, Any] = {name: column.item() for name, column in row.columns().items()}
            wanted: dict[str, Any] = {"step": step, "sample": i, "group": int(group[i]), "old_log_prob": 2 * i + k}
            wanted |= {"weight": (0.5, 1.5)[k], "advantage": float(advantage[2 * i]), "keep": i != 1}
            assert {name: values[name] for name in wanted} == wanted
            assert (values["clip_low"], values["clip_high"]) == pytest.approx((0.1, 0.3))
    assert rows.advantage.dtype == rows.weight.dtype == torch.float32
    plain = rows_of(sampled, replace(weighted, weight=None), advantage[None], keep, (0.1, 0.3))
    assert plain.weight.tolist() == [1.0] * 6
    kept_rows = rows[rows.keep]
    assert isinstance(kept_rows, Rows)
    assert kept_rows.sample.tolist() == [0, 0, 2, 2]
    assert rows[2:4].sample.tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"one shape \[M\]"):
        rows_of(sampled, weighted, advantage[None, :1], keep, (0.1, 0.3))


def test_trajectory_refuses_contradictions() -> None:
    good: dict[str, Any] = {
        "states": torch.zeros(2, 2, 3),
        "kept": (0, 1),
        "steps": (0,),
        "log_prob": torch.zeros(2, 1),
        "final": torch.zeros(2, 3),
    }
    Trajectory(**good)
    for change in ({"kept": (0, 2)}, {"steps": (1,)}, {"log_prob": torch.zeros(2)}, {"kept": (1, 0)}):
        with pytest.raises(ValueError, match="kept"):
            Trajectory(**(good | change))
