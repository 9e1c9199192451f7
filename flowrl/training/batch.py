"""The images that one process makes in one iteration, and what they were asked to show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.prompts.loading import Prompt
from flowrl.trajectory import Conditioning


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AskedPrompts:
    """The prompts of p groups."""

    groups: Tensor
    """[p] numbers of the groups, counted over all processes (and over the rounds of an iteration), ascending."""
    prompts: tuple[Prompt, ...]  # one per group
    prompt_ids: tuple[int, ...]  # their lines in the prompt file
    cond: Conditioning  # the prompts encoded, one row per group

    def rows(self, group: Tensor) -> Tensor:
        """Place of group numbers among the groups."""
        return torch.searchsorted(self.groups, group.cpu())

    def cond_of(self, group: Tensor) -> Conditioning:
        """Conditioning of groups `[b]`, one row each."""
        return self.cond[self.rows(group)]

    def prompts_of(self, group: Tensor) -> list[Prompt]:
        """Prompts of groups `[b]`."""
        return [self.prompts[int(row)] for row in self.rows(group)]

    def prompt_ids_of(self, group: Tensor) -> Tensor:
        """Lines in the prompt file of groups `[b]`."""
        return torch.tensor(self.prompt_ids)[self.rows(group)]

    @staticmethod
    def cat(parts: Sequence[AskedPrompts]) -> AskedPrompts:
        """Joins the rounds of one iteration."""
        return AskedPrompts(
            groups=torch.cat([part.groups for part in parts]),
            prompts=tuple(prompt for part in parts for prompt in part.prompts),
            prompt_ids=tuple(number for part in parts for number in part.prompt_ids),
            cond=Conditioning.cat([part.cond for part in parts]),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """The images of one round of sampling."""

    iteration: int  # counts from 0
    own: range  # image numbers of this process, consecutive; image i belongs to group `i // group_size`
    group: Tensor  # [b] group of each image
    asked: AskedPrompts  # the prompts of those groups
