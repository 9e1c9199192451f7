"""The arithmetic of learning a rubric: which pairs, which rules, which weights (AutoRubric-T2I, arXiv 2605.17602).

Letters: n preference pairs, m rules. `delta[i, j] = s_j(winner_i) - s_j(loser_i)` with s_j = P(yes to rule j). The
weights minimise an l1-penalised logistic loss without intercept, which sets most of them to 0:

    (1/n) sum_i log(1 + exp(-w . delta_i)) + penalty * |w|_1
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Sequence
from typing import Literal

import numpy as np

from flowrl.runtime.shapes import Float64, Int64

Negative = Literal["reject", "flip"]


def require_scikit_learn() -> None:
    """Says how to get scikit-learn where it is missing, before a judge is asked thousands of questions."""
    advice = "in flowrl's folder, pip install -e '.[rubrics]'."
    if importlib.util.find_spec("sklearn") is None:
        raise ValueError(f"learning a rubric needs scikit-learn: {advice}")
    version = importlib.metadata.version("scikit-learn")
    if tuple(int(part) for part in version.split(".")[:2]) < (1, 8):  # which would fit with another penalty, unasked
        raise ValueError(f"learning a rubric needs scikit-learn 1.8 or newer, got {version}: {advice}")


def largest_penalty(delta: Float64[np.ndarray, " n m"]) -> float:
    """The penalty from which on all weights are 0: `max_j |mean_i delta_ij| / 2`, the loss's slope at 0."""
    return 0.5 * float(np.abs(delta.mean(axis=0)).max())


def fit_weights(delta: Float64[np.ndarray, " n m"], penalty: float) -> Float64[np.ndarray, " m"]:
    """The weights that minimise the loss of the module, of either sign.

    scikit-learn fits two classes, so every pair is entered twice, once turned round: label 1 with delta and label 0
    with -delta. That doubles the sum of losses and changes no minimum; its C is `1 / (2 n penalty)`.

    Raises ValueError: without scikit-learn, for a penalty that is not positive, or differences that are not finite.
    """
    require_scikit_learn()
    from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]

    if not penalty > 0:
        raise ValueError(f"penalty must be positive, got {penalty}: 0 keeps every rule and may have no finite weights.")
    if delta.ndim != 2 or min(delta.shape) == 0 or not np.isfinite(delta).all():
        raise ValueError(f"delta must be finite [pairs, rules] with one of each at least, got shape {delta.shape}.")
    if penalty >= largest_penalty(delta):
        return np.zeros(delta.shape[1])
    model = LogisticRegression(
        solver="liblinear",
        l1_ratio=1.0,
        C=1.0 / (2 * len(delta) * penalty),
        fit_intercept=False,
        tol=1e-8,
        max_iter=100_000,
        random_state=0,  # liblinear visits the rules in random order; the minimum is the same, its last digits are not
    )
    model.fit(np.concatenate([delta, -delta]), np.repeat([1, 0], len(delta)))
    return np.asarray(model.coef_[0], dtype=np.float64)


def select_rules(
    delta: Float64[np.ndarray, " n m"], penalty: float, *, top: int = 20, negative: Negative = "reject"
) -> Float64[np.ndarray, " m"]:
    """The fitted weights of the `top` rules that count most, 0 for the others.

    A negative weight says that yes to the rule speaks against the image. Such a rule was proposed to say the
    opposite, so most often it only corrects for others: `reject` drops these rules and fits again until none is left.
    `flip` keeps the sign, for a rule whose good answer is no.
    """
    rules = np.arange(delta.shape[1])
    weights = fit_weights(delta, penalty)
    while negative == "reject" and (weights < 0).any():
        rules = rules[weights >= 0]
        weights = fit_weights(delta[:, rules], penalty) if len(rules) else np.zeros(0)
    strongest = np.argsort(-np.abs(weights), kind="stable")[:top]
    kept = np.zeros(delta.shape[1])
    kept[rules[strongest]] = weights[strongest]
    return kept


def hard_pairs(
    delta: Float64[np.ndarray, " n m"], weights: Float64[np.ndarray, " m"], count: int
) -> Int64[np.ndarray, " k"]:
    """The pairs that the rubric gets wrong or nearly so: those of the smallest margin `w . delta_i`, hardest first."""
    return np.argsort(delta @ weights, kind="stable")[:count].astype(np.int64)


def accuracy(delta: Float64[np.ndarray, " n m"], weights: Float64[np.ndarray, " m"]) -> float:
    """The fraction of pairs whose winner scores higher; a tie is half a pair."""
    margin = delta @ weights
    return float(((margin > 0) + 0.5 * (margin == 0)).mean())


def complete_part(
    scores: Float64[np.ndarray, " n 2 m"], max_failed: float = 0.1
) -> tuple[Int64[np.ndarray, " a"], Int64[np.ndarray, " b"]]:
    """Pairs and rules without failed answers (NaN), as their places. A rule that failed for more than `max_failed` of
    the pairs is left out; then every pair with a failure left is."""
    failed = np.isnan(scores).any(axis=1)
    rules = np.flatnonzero(failed.mean(axis=0) <= max_failed)
    return np.flatnonzero(~failed[:, rules].any(axis=1)), rules


def seed_pairs(prompts: Sequence[str], margins: Sequence[float], count: int) -> list[int]:
    """Pairs that are clear and unlike each other, in the order in which they are taken. Each next one has the largest
    `margin * (1 - J)`, J the largest overlap of its prompt's words with a prompt taken before (Jaccard). Margins are
    those of another reward, and 1 where there are none."""
    words = [words_of(prompt) for prompt in prompts]
    overlap = np.zeros(len(words))
    value = np.asarray(margins, dtype=np.float64)
    free = np.ones(len(words), dtype=bool)
    taken: list[int] = []
    while len(taken) < min(count, len(words)):
        best = int(np.argmax(np.where(free, value * (1.0 - overlap), -np.inf)))
        taken.append(best)
        free[best] = False
        overlap = np.maximum(overlap, [jaccard(words[best], other) for other in words])
    return taken


def distinct_rules(rules: Sequence[str], known: Sequence[str], *, similarity: float, limit: int) -> list[str]:
    """The rules that say something new, those proposed most often first, at most `limit`. Two rules are the same if
    their words overlap by `similarity` or more (Jaccard). The first of its like stands for them."""
    old = [words_of(rule) for rule in known]
    alike: dict[frozenset[str], list[str]] = {}  # by the words of the first
    for rule in rules:
        words = words_of(rule)
        if words and all(jaccard(words, other) < similarity for other in old):
            first = next((other for other in alike if jaccard(words, other) >= similarity), words)
            alike.setdefault(first, []).append(rule)
    return [group[0] for group in sorted(alike.values(), key=lambda group: -len(group))[:limit]]


def words_of(text: str) -> frozenset[str]:
    """The words of a text, case ignored."""
    return frozenset(re.findall(r"\w+", text.casefold()))


def jaccard(a: frozenset[str], b: frozenset[str]) -> float:
    """Shared words over all words; 0 where there are none."""
    return len(a & b) / len(a | b) if a | b else 0.0
