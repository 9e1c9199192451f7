"""The numbers of a run by name: what each of `metrics.jsonl`, of the trackers and of the report's charts means.

A row of `metrics.jsonl` is one iteration, or one evaluation: then its names begin with ``eval/``. A name in angle
brackets stands for what a run calls it: ``reward/<name>`` is ``reward/pick_score`` where `pick_score` is trained on.
"""

from __future__ import annotations

import functools
import re

__all__ = ["METRICS", "meaning_of"]

METRICS: dict[str, dict[str, str]] = {
    "Rewards": {
        "iteration": "number of the iteration, from 0; of an evaluation, iterations that were finished before it",
        "reward": "mean of the weighted sum over the iteration's images",
        "reward_std": "standard deviation of that sum over the iteration's images",
        "reward_error": "standard error of the mean reward, over prompts",
        "reward/<name>": "mean of one reward, before its weight",
        "reward/<name>/<part>": "mean of a sub-score of it, where it has any; of a reward that learns, a number of its "
        "training",
        "reward/<name>/gated": "share of images below the reward's `gate`",
        "reward/<name>/invalid_ratio": "share of images for which this reward failed",
        "reward_errors/<word>": "images whose reward failed for the cause that the word names",
        "invalid_ratio": "share of images whose reward failed",
        "num_images": "images of the iteration",
        "num_scored": "images scored in the iteration, completions and further rounds included",
        "diversity": "root mean square distance of two images of one prompt, at 8 x 8 pixels",
        "constant_ratio": "share of images of one colour, where there are any",
    },
    "Advantages": {
        "advantage_abs": "mean absolute advantage",
        "zero_std_ratio": "share of groups whose images all got the same reward; they are masked, and count in the "
        "mean of the loss with `loss_denominator: all`; of pairs, the share of prompts without one",
        "live_rows": "rows that were trained: transitions, noised images or pairs",
    },
    "Update": {
        "loss": "what was minimised, the KL included: mean over live rows",
        "policy_loss": "the same without KL",
        "kl": "KL of policy and reference at the stored states, per latent dimension with `log_ratio: mean`, in nats; "
        "of recipe forward the mean square difference of the velocities",
        "ratio_mean": "importance ratio over all updates of the iteration",
        "ratio_max_deviation": "its largest distance from 1",
        "ratio_first_deviation": "largest distance between the log-densities of rollout and first update, in nats per "
        "latent dimension: 0 on a CPU where both take the same batches, else rounding, or what a stale rollout missed",
        "clip_fraction": "share of rows whose gradient the clip range cuts, by the objective's own ratio (of guard the "
        "normalised one); with `ratio: mixed` each of its two ratios counts half",
        "masked_fraction": "share of rows that objective dppo leaves out",
        "approx_kl": "KL of old and new policy by the k3 estimator, mean of `ratio - 1 - log ratio`",
        "grad_norm": "norm of the gradient before clipping, mean over the iteration's updates",
        "lr": "the optimizer's learning rate at the last update",
        "loss_scale": "in float16: what the loss is multiplied by, so that small gradients are not lost",
    },
    "Recipe forward": {
        "error": "mean square error of the predicted velocity at the noised images (awm, dgpo, rwr, rft)",
        "positive_error": "that of the branch towards what the reward likes (nft)",
        "negative_error": "that of the branch away from it (nft)",
        "optimality": "mean of r in [0, 1], the reward as the probability of being the better one (nft, crd)",
        "gate": "mean gate of a group, sigmoid of its weighted errors (dgpo)",
        "implicit_reward": "mean implicit reward of the policy against the old one (crd)",
        "weight": "mean weight of an image (rwr, rft)",
        "old_kl": "mean square difference of the velocities of the policy and of the old one",
        "velocity_norm_ratio": "norm of the policy's velocity over that of the reference",
        "old_decay": "share of itself that the old policy kept at the end of the iteration",
        "sampling_decay": "the same of the policy that samples (crd)",
    },
    "Recipe preference": {
        "pairs": "pairs of the iteration",
        "implicit_accuracy": "share of pairs whose winner the policy has come to prefer",
        "winner_reward": "implicit reward of the winners: how much better than the reference they are predicted",
        "loser_reward": "the same of the losers",
        "margin": "mean difference of the two",
    },
    "Recipe backprop": {
        "trained_calls": "network calls that the gradient runs through",
        "last_step": "step at which the image is judged",
    },
    "Cost": {
        "images": "images scored since the start",
        "nfe/total": "network evaluations of one image since the start, counted at the network; guidance counts twice",
        "nfe/rollout": "those of sampling",
        "nfe/completion": "those that finished latents on the way",
        "nfe/update": "those of the update's forward passes",
        "nfe/reference": "those of the reference policy and of old ones",
        "nfe/backward": "backward passes",
        "seconds/total": "training time since the start",
        "seconds": "time of the iteration",
        "seconds/<stage>": "time of a stage of the iteration: rollout, reward, update and what else it had",
        "memory/peak_gib": "on CUDA: most memory that tensors took up at once since the start (the largest of all "
        "processes)",
        "memory/reserved_gib": "on CUDA: most memory that torch held of the device since the start, gaps included (the "
        "largest of all processes); far above the peak where memory is in pieces",
        "memory/<stage>_gib": "the same in a stage of the iteration (the main process's)",
        "judge/requests": "questions to judges on servers since the last row, evaluations included",
        "judge/retries": "those that were asked again",
        "judge/tokens": "tokens that they cost",
        "judge/seconds": "median time of an answered question",
        "judge/seconds_p95": "what one in twenty exceeds",
        "workers/alive": "rollout workers that are there",
        "workers/restarts": "workers that were started again in the iteration",
        "workers/wait_seconds": "seconds that the learner waited for images in the iteration",
    },
    "Warnings": {
        "warnings": "what is wrong, by name, where something is: a mapping of names to sentences",
    },
    "Evaluations": {
        "eval/reward/<name>": "mean reward on the held-out prompts",
        "eval/reward/<name>_low": "lower end of its 95 % interval",
        "eval/reward/<name>_high": "upper end of its 95 % interval",
        "eval/reward/<name>_invalid_ratio": "share of held-out images for which it failed",
        "eval/reward/<name>/<part>": "mean of a sub-score",
        "eval/geneval/score": "official GenEval verdicts, macro over the six tasks",
        "eval/geneval/score_low": "lower end of its 95 % interval",
        "eval/geneval/score_high": "upper end of its 95 % interval",
        "eval/geneval/<task>": "mean verdict of one of the six tasks",
        "eval/geneval/graded": "mean graded credit",
        "eval/kl": "mean square difference of the velocities to the base model on held-out prompts: drift, not in nats",
        "eval/temporal/<name>": "with `eval.temporal`: change, flicker, freeze and teleport of the clips",
        "eval/temporal/<name>_low": "lower end of its 95 % interval",
        "eval/temporal/<name>_high": "upper end of its 95 % interval",
        "seconds/eval": "time of the evaluation",
    },
}
"""Group -> name -> meaning."""


def meaning_of(name: str) -> str | None:
    """What a metric means; None where it is none of those that runs log.

    A name that stands in the table goes before one with angle brackets, a longer one before a shorter one.

    >>> meaning_of("reward/pick_score/invalid_ratio")
    'share of images for which this reward failed'
    """
    return next((meaning for pattern, meaning in _patterns() if pattern.fullmatch(name)), None)


@functools.cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    """Names as patterns with their meanings, the most particular first."""
    found = {name: meaning for group in METRICS.values() for name, meaning in group.items()}
    order = sorted(found, key=lambda name: (name.count("<"), -len(re.sub(r"<\w+>", "", name))))
    return [(re.compile(re.sub(r"<\w+>", "[^/]+", name)), found[name]) for name in order]
