"""An epoch of flow_grpo's training of a LoRA on Stable Diffusion 3, around functions of its checkout.

What its script does at top level is written down here in other words: LoRA by PEFT, AdamW, accelerate's accumulation of
gradients over the trained steps, sampling, rewards in a thread, advantages of each prompt's images, rows of zero
advantage left out, rows shuffled, the clipped loss, its statistics. Left out, which is to its advantage: progress bars,
wandb, its average of the weights, its data loaders.

Different on purpose: stock `encode_prompt` (its own pads CLIP's tokens to 77, the embedded model has 16), prompts and
rewards of the run beside it, its ranks and numbers, and the sigma grid of the stock scheduler on both sides.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from diffusers import StableDiffusion3Pipeline
from peer_checkout import Published
from peft import LoraConfig, get_peft_model
from torch import Tensor

from flowrl.config.train import TrainConfig
from flowrl.pipelines.weights.lora import JOINT_ATTENTION
from flowrl.pipelines.weights.stock_loading import quiet_libraries

PRECISIONS = {"float32": "no", "bfloat16": "bf16"}
"""What accelerate calls a dtype."""
Rewards = Callable[[Tensor, Sequence[str]], Tensor]
"""Numbers `[b]` of images `[b, 3, H, W]` in [0, 1] and their prompts."""
Samples = dict[str, Tensor]
"""Columns `[B, ...]` of an epoch; those of steps are `[B, T, ...]`."""


@dataclass(slots=True)
class Spent:
    """Of one epoch or iteration: CPU seconds of the process, wall seconds, the update's share, rows of the network.

    Attributes:
        forward, graph: rows that were evaluated, and those of them with a graph.
    """

    cpu: float = 0.0
    wall: float = 0.0
    update_cpu: float = 0.0
    update_wall: float = 0.0
    forward: int = 0
    graph: int = 0


class Epochs:
    """flow_grpo's models, optimizer and accelerator, and what one epoch does with them."""

    def __init__(
        self, published: Published, config: TrainConfig, model: str, rewards: Rewards, *, detached: bool
    ) -> None:
        """Loads the stock pipeline.

        Args:
            published: functions of the checkout.
            config: of the run beside it; read for sizes, steps, guidance, LoRA, optimizer, clip range and KL.
            model: folder of the stock pipeline.
            rewards: of images.
            detached: whether gradient flows through the prompt's branch alone, as released.
        """
        quiet_libraries()
        self.published, self.config, self.rewards = published, config, rewards
        self.scorer = published.compute_log_prob if detached else published.compute_log_prob_of_both
        self.num_trained = config.sampler.num_steps - 1
        geometry = config.resolve_batch(1)
        self.size, self.batches = geometry.micro_batch_size, geometry.micro_batches_per_update
        precision = PRECISIONS[config.pipeline.dtype]
        self.accelerator = Accelerator(
            cpu=True, mixed_precision=precision,
            gradient_accumulation_steps=self.num_trained * self.batches,
        )  # fmt: skip
        self.pipe: Any = StableDiffusion3Pipeline.from_pretrained(model, dtype=torch.float32)
        self.pipe.set_progress_bar_config(disable=True)
        for name, part in self.pipe.components.items():
            if isinstance(part, torch.nn.Module):
                part.requires_grad_(False).to(
                    torch.bfloat16 if precision == "bf16" and name.startswith("text") else torch.float32
                )
        rank = config.policy.lora_rank or 32
        self.pipe.transformer = get_peft_model(self.pipe.transformer, LoraConfig(
            r=rank, lora_alpha=config.policy.lora_alpha or 2 * rank, init_lora_weights="gaussian",
            target_modules=list(JOINT_ATTENTION),
        ))  # fmt: skip
        self.trained = {
            name.removeprefix("base_model.model."): parameter
            for name, parameter in self.pipe.transformer.named_parameters() if parameter.requires_grad
        }  # fmt: skip
        settings = config.optim
        optimizer = torch.optim.AdamW(
            self.trained.values(), lr=settings.lr, betas=settings.betas, eps=settings.eps,
            weight_decay=settings.weight_decay,
        )  # fmt: skip
        self.transformer, self.optimizer = self.accelerator.prepare(self.pipe.transformer, optimizer)
        self.tracker = published.tracker(False)
        self.executor = ThreadPoolExecutor(max_workers=8)
        self.settings = SimpleNamespace(
            train=SimpleNamespace(cfg=config.sampler.guidance_scale != 1),
            sample=SimpleNamespace(
                guidance_scale=config.sampler.guidance_scale, noise_level=config.sampler.noise_level
            ),
        )
        self._empty = self.encoded([""])
        self.spent = Spent()
        self.pipe.transformer.get_base_model().register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        self.spent.forward += len(kwargs["hidden_states"])
        self.spent.graph += len(kwargs["hidden_states"]) * torch.is_grad_enabled()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes LoRA weights, by names without PEFT's prefix."""
        assert tensors.keys() == self.trained.keys()
        for name, parameter in self.trained.items():
            parameter.data.copy_(tensors[name])

    def epoch(self, prompts: Sequence[str]) -> tuple[Spent, dict[str, float]]:
        """Samples an image for each prompt, and updates once; what it cost, and its statistics."""
        self.spent = Spent()
        with timed(self.spent, "cpu", "wall"):
            samples = self.sample(prompts)
            with timed(self.spent, "update_cpu", "update_wall"):
                info = self.train(self.kept(samples))
        return self.spent, info

    # ---- sampling ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encoded(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Embeddings of prompts, and pooled ones."""
        embeds, _none, pooled, _none = self.pipe.encode_prompt(
            list(prompts), None, None, do_classifier_free_guidance=False,
            max_sequence_length=self.config.pipeline.max_sequence_length,
        )  # fmt: skip
        return embeds, pooled

    def negative(self, count: int) -> tuple[Tensor, Tensor]:
        """Embeddings of the empty prompt, repeated."""
        embeds, pooled = self._empty
        return embeds.repeat(count, 1, 1), pooled.repeat(count, 1)

    def sample(self, prompts: Sequence[str]) -> Samples:
        """Draws batch after batch, asks for rewards in a thread, and makes advantages."""
        self.pipe.transformer.eval()
        waiting, parts = list[Any](), list[Samples]()
        for first in range(0, len(prompts), self.size):
            own = prompts[first : first + self.size]
            (embeds, pooled), (no_embeds, no_pooled) = self.encoded(own), self.negative(len(own))
            with torch.no_grad():
                images, latents, log_probs = self.published.pipeline_with_logprob(
                    self.pipe, prompt_embeds=embeds, pooled_prompt_embeds=pooled, negative_prompt_embeds=no_embeds,
                    negative_pooled_prompt_embeds=no_pooled, num_inference_steps=self.config.sampler.num_steps,
                    guidance_scale=self.settings.sample.guidance_scale, output_type="pt",
                    noise_level=self.settings.sample.noise_level,
                )  # fmt: skip
            path = torch.stack(latents, dim=1)
            waiting.append(self.executor.submit(self.rewards, images, own))
            parts.append({
                "embeds": embeds, "pooled": pooled, "timesteps": self.pipe.scheduler.timesteps.repeat(len(own), 1),
                "latents": path[:, :-1], "next_latents": path[:, 1:], "log_probs": torch.stack(log_probs, dim=1),
            })  # fmt: skip
        rewards = torch.cat([future.result() for future in waiting]).float()
        samples = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        spread = rewards.unsqueeze(1).repeat(1, self.num_trained)
        advantages = self.tracker.update(list(prompts), spread.numpy())
        self.tracker.clear()
        return samples | {"advantages": torch.as_tensor(advantages), "rewards": rewards}

    def kept(self, samples: Samples) -> Samples:
        """Rows without advantage left out, but as many kept at random as fill the batches; then shuffled."""
        live = samples["advantages"].abs().sum(1) != 0
        lacking = -int(live.sum()) % self.batches
        dead = torch.nonzero(~live).flatten()
        if lacking and len(dead) >= lacking:
            live[dead[torch.randperm(len(dead))[:lacking]]] = True
        order = torch.nonzero(live).flatten()
        order = order[torch.randperm(len(order))]
        return {key: column[order] for key, column in samples.items()}

    # ---- update --------------------------------------------------------------------------------------------------

    def train(self, samples: Samples, *, step: bool = True) -> dict[str, float]:
        """Gradients of all trained steps, and an optimizer step; statistics, empty where no row is left."""
        count, settings, info = len(samples["latents"]), self.config, defaultdict[str, list[Tensor]](list)
        low, high = settings.clip_bounds
        if not count:
            return {}
        self.pipe.transformer.train()
        for part in range(self.batches):
            size = count // self.batches
            sample = {key: column[part * size : (part + 1) * size] for key, column in samples.items()}
            no_embeds, no_pooled = self.negative(size)
            embeds, pooled = torch.cat([no_embeds, sample["embeds"]]), torch.cat([no_pooled, sample["pooled"]])
            for j in range(self.num_trained):
                with self.accelerator.accumulate(self.transformer) if step else nullcontext():
                    given = (self.transformer, self.pipe, sample, j, embeds, pooled, self.settings)
                    _, log_prob, mean, std = self.scorer(*given)
                    if settings.kl_coef:
                        with torch.no_grad(), self.transformer.disable_adapter():
                            _, _, reference, _ = self.scorer(*given)
                    bound = settings.adv_clip_range
                    advantage = sample["advantages"][:, j].clamp(-bound, bound)
                    ratio = torch.exp(log_prob - sample["log_probs"][:, j])
                    clipped = ratio.clamp(1 - low, 1 + high)
                    policy_loss = loss = torch.maximum(-advantage * ratio, -advantage * clipped).mean()
                    if settings.kl_coef:
                        square = ((mean - reference) ** 2).mean(dim=(1, 2, 3), keepdim=True)
                        kl = (square / (2 * std**2)).mean()
                        loss = policy_loss + settings.kl_coef * kl
                        info["kl"].append(kl)
                    info["approx_kl"].append(0.5 * (log_prob - sample["log_probs"][:, j]).square().mean())
                    info["clipped"].append(((ratio - 1).abs() > high).float().mean())
                    info["clipped_above"].append((ratio - 1 > high).float().mean())
                    info["clipped_below"].append((1 - ratio > low).float().mean())
                    info["deviation"].append((ratio - 1).abs().max())
                    info["policy_loss"].append(policy_loss)
                    info["loss"].append(loss)
                    if not step:
                        (loss / (self.num_trained * self.batches)).backward()
                        continue
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.trained.values(), settings.optim.max_grad_norm)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
        reduced = self.accelerator.reduce({key: torch.stack(v).detach().mean() for key, v in info.items()})
        return {key: float(value) for key, value in reduced.items()}

    def gradient(self, samples: Samples, *, detached: bool) -> tuple[Tensor, dict[str, float]]:
        """The gradient `[N]` of an epoch's loss at these samples, and its statistics; nothing moves."""
        outer, published = self.scorer, self.published
        self.scorer = published.compute_log_prob if detached else published.compute_log_prob_of_both
        for parameter in self.trained.values():
            parameter.grad = None
        info = self.train(samples, step=False)
        self.scorer = outer
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.trained.values()]
        flat = torch.cat([gradient.flatten().double() for gradient in found])
        self.optimizer.zero_grad()
        return flat, info


@contextmanager
def timed(spent: Spent, cpu: str, wall: str) -> Iterator[None]:
    """Adds the time inside to two fields: CPU seconds of the process, and wall seconds."""
    begun_cpu, begun = time.process_time(), time.perf_counter()
    yield
    setattr(spent, cpu, getattr(spent, cpu) + time.process_time() - begun_cpu)
    setattr(spent, wall, getattr(spent, wall) + time.perf_counter() - begun)
