"""Which member beats which: rates, ranks and rewards of a group from comparisons of two members at a time.

A tournament is a generator: it yields the matches of a round, receives their scores, and returns one number per member,
greater is better. `hold` plays several side by side, so the matches of a round are judged at the same time:

    keys = hold([swiss(8), swiss(8)], play)       # play: the matches of each tournament -> their scores

NaN is a match without a verdict. It counts for neither side. A member without any verdict has no place (NaN).

Letters: N members of a group, numbered from 0; n matches. Arithmetic is float64 on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Literal

import numpy as np

from flowrl.runtime.shapes import Float64, Int64

Matches = Int64[np.ndarray, " n 2"]
Scores = Float64[np.ndarray, " n 2"]
Keys = Float64[np.ndarray, " members"]
Play = Generator[Matches, Scores, Keys]
Byes = Literal["top_seeds", "published"]
Ties = Literal["average", "order", "best"]

_NOBODY = -1  # a slot of a bracket that no member fills


def win_rate(first_wins_NN: Float64[np.ndarray, " N N"], *, min_comparisons: int = 1) -> Keys:
    """Share of a member's comparisons that it won, a tie being half a win (Pref-GRPO, arXiv 2508.20751).

    If all pairs are judged, the rates of a group sum to N / 2, whatever the verdicts.

    Args:
        first_wins_NN: Entry [i, j] is the probability that i beats j when i is shown first; NaN if that was not
            asked or failed. A pair asked in both orders counts once, with the mean of `v[i, j]` and `1 - v[j, i]`.
        min_comparisons: A member with fewer comparisons has no rate (NaN).
    """
    wins_NN = _merge_orders(first_wins_NN)
    count_N = (~np.isnan(wins_NN)).sum(1)
    rate_N = np.nansum(wins_NN, axis=1) / np.maximum(count_N, 1)
    return np.where(count_N >= max(min_comparisons, 1), rate_N, np.nan)


def bradley_terry(
    first_wins_NN: Float64[np.ndarray, " N N"], *, penalty: float = 0.01, min_comparisons: int = 1
) -> Keys:
    """Strengths theta of the Bradley-Terry model, P(i beats j) = sigmoid(theta_i - theta_j), by Newton's method.

    They maximise `sum_ij w_ij log sigmoid(theta_i - theta_j) - penalty / 2 |theta|^2` with w_ij the wins of i over j,
    a tie being half a win for each. Unlike win rates they account for the opponents met, so some of all pairs
    are enough. They sum to 0. `first_wins_NN` is as in `win_rate`; the penalty is positive, and keeps the strength of a
    member that wins every comparison finite.

    A member with fewer than `min_comparisons` has no strength (NaN), though its comparisons count. Nor have members
    that no chain of comparisons connects with the largest part of the group: strengths of two parts cannot be compared.
    """
    wins_NN = np.nan_to_num(_merge_orders(first_wins_NN))
    count_NN = wins_NN + wins_NN.T
    theta_N = np.zeros(len(wins_NN))

    def objective(theta_N: Keys) -> float:
        return float(
            -(wins_NN * np.logaddexp(0.0, theta_N[None] - theta_N[:, None])).sum() - penalty / 2 * (theta_N**2).sum()
        )

    for _ in range(100):
        expected_NN = 1 / (1 + np.exp(theta_N[None] - theta_N[:, None]))
        gradient_N = (wins_NN - count_NN * expected_NN).sum(1) - penalty * theta_N
        curvature_NN = count_NN * expected_NN * (1 - expected_NN)
        step_N = np.linalg.solve(np.diag(curvature_NN.sum(1) + penalty) - curvature_NN, gradient_N)
        length, before = 1.0, objective(theta_N)
        while length > 1e-6 and objective(theta_N + length * step_N) < before:  # far from the maximum Newton overshoots
            length /= 2
        theta_N = theta_N + length * step_N
        if np.abs(gradient_N).max(initial=0.0) < 1e-12 * max(1.0, count_NN.sum()):
            break
    # The largest set that comparisons connect; of several, the one of the lowest member.
    reach_NN = (count_NN > 0) | np.eye(len(count_NN), dtype=bool)
    for _ in range(max(len(count_NN), 1).bit_length()):
        reach_NN = reach_NN @ reach_NN
    part_N = reach_NN[int(np.argmax(reach_NN.sum(1)))]
    known_N = part_N & (part_N.sum() > 1) & ((count_NN > 0).sum(1) >= max(min_comparisons, 1))
    return np.where(known_N, theta_N, np.nan)


def rank_reward(value_N: Keys, *, ties: Ties = "average", denominator: Literal["n-1", "n"] = "n-1") -> Keys:
    """Ranks as rewards in [0, 1]: 0 for the lowest value, and 1, or (n-1)/n with denominator n, for the highest.

    Args:
        value_N: Greater is better. NaN has no rank and is not counted among the n.
        ties: `average`: equal values share the mean of their ranks, so the group's mean is the same for all
            values. `order`: the earlier of two equal values ranks lower. `best`: equal values share the better place r
            (1 is best), and the reward is (R - r) / (R - 1) with R the worst place that occurs, 0 if all are equal
            (ArenaRL's for round robin and anchor); it takes no denominator but the default.
        denominator: n-1 (PaCo), or n (Flow-Factory).

    Returns [N]; all NaN if fewer than two values are known.
    """
    assert ties != "best" or denominator == "n-1", "best ranks by the worst place that occurs"
    known_N = ~np.isnan(value_N)
    value = value_N[known_N]
    reward_N = np.full(len(value_N), np.nan)
    if len(value) < 2:
        return reward_N
    below = (value[None] < value[:, None]).sum(1)
    equal = (value[None] == value[:, None]).sum(1)
    if ties == "best":
        place = len(value) - below - equal + 1
        reward_N[known_N] = (place.max() - place) / max(place.max() - 1, 1)
        return reward_N
    rank = below + (equal - 1) / 2 if ties == "average" else np.argsort(np.argsort(value, kind="stable"))
    reward_N[known_N] = rank / (len(value) - (denominator == "n-1"))
    return reward_N


def all_pairs(num_members: int) -> Matches:
    """Every pair (i, j) with i < j, N (N - 1) / 2 of them."""
    return np.stack(np.triu_indices(num_members, k=1), axis=1).astype(np.int64)


def ring_pairs(order: Sequence[int], opponents: int) -> Matches:
    """Pairs in which everyone meets the same number of others: the nearest on a ring in the given order.

    All members are connected by chains of comparisons. With at least as many opponents as others, every pair.

    Args:
        order: [N] the members, in the order of the ring; draw it at random.
        opponents: Even, at least 2: N opponents / 2 pairs.
    """
    members = len(order)
    if opponents >= members - 1:
        return all_pairs(members)
    pairs = [(order[k], order[(k + d) % members]) for d in range(1, opponents // 2 + 1) for k in range(members)]
    return np.array([sorted(pair) for pair in pairs], dtype=np.int64)


def bracket(num_members: int) -> list[int]:
    """Seeds (0 is best) in a knock-out bracket's slots, filled up to a power of two: neighbours meet, then the winners
    of neighbouring pairs; the best two meet last. Seeds from num_members on are byes. 8 members: 0 7 3 4 1 6 2 5."""
    slots = [0]
    while len(slots) < num_members:
        size = 2 * len(slots)
        slots = [slot for seed in slots for slot in (seed, size - 1 - seed)]
    return slots


def round_robin(num_members: int) -> Play:
    """Everyone meets everyone, in one round; the key is the share of matches won, a tie being half."""
    table = yield from _play(all_pairs(num_members), num_members)
    return table.rate(table.points)


def anchor(num_members: int) -> Play:
    """Everyone meets member 0, in one round; the key is a member's score there (for member 0 the mean)."""
    table = yield from _play(_against_anchor(num_members), num_members)
    return table.rate(table.score)


def single_elimination(num_members: int, *, byes: Byes = "top_seeds") -> Play:
    """A knock-out tournament, seeded by a round against member 0 (ArenaRL, arXiv 2601.06487): 2 (N - 1) matches.

    The champion is first. Then those who lost later come before those who lost earlier; within a round the higher mean
    score over all matches comes first. After a tie the first slot of the pair goes on. Without a verdict, the member
    with more verdicts before goes on (if equal, the first slot), and the other has no place.

    Args:
        num_members: N, at least 2.
        byes: `top_seeds`: if N is not a power of two, the best seeds skip the first round. `published`: the missing
            seeds are removed before neighbours are paired, and the last slot of an odd round waits; the best seeds
            then have no byes, and may meet early.
    """
    table = yield from _play(_against_anchor(num_members), num_members)
    strength_N = np.nan_to_num(table.rate(table.score), nan=-np.inf)
    seeded = sorted(range(num_members), key=lambda i: -strength_N[i])
    slots = [seeded[seed] if seed < num_members else _NOBODY for seed in bracket(num_members)]
    if byes == "published":
        slots = [slot for slot in slots if slot != _NOBODY]
    round_N, number = np.zeros(num_members), 0
    while len(slots) > 1:
        number += 1
        pairs = list(zip(slots[::2], slots[1::2], strict=False))
        matches = np.array([pair for pair in pairs if _NOBODY not in pair], dtype=np.int64).reshape(-1, 2)
        scores = yield matches
        table.add(matches, scores)
        failed = np.isnan(scores).any(1)
        first, second = matches.T
        first_out = np.where(failed, table.games[first] < table.games[second], scores[:, 1] > scores[:, 0])
        losers = np.where(first_out, first, second)
        round_N[losers] = np.where(failed, np.nan, number)
        beaten = set(losers.tolist()) | {_NOBODY}
        slots = [slot for slot in slots if slot not in beaten]
    round_N[slots[0]] = number + 1
    return _lexicographic(round_N, table.rate(table.score))


def swiss(num_members: int) -> Play:
    """ceil(log2 N) rounds of floor(N / 2) matches between members with equal points that have not met. The order is by
    points (win 1, tie half, sitting out 1, at most once; scaled up for matches without verdict), then by Buchholz's sum
    of the opponents' points; members equal in both are tied."""
    table = _Table(num_members)
    bye_N, due_N = np.zeros(num_members), np.zeros(num_members)
    met: set[frozenset[int]] = set()

    def standing() -> tuple[Keys, Keys]:
        points_N = (table.points + bye_N) * due_N / np.maximum(table.games + bye_N, 1)
        buchholz_N = np.zeros(num_members)
        for i, j in map(sorted, met):
            buchholz_N[i] += points_N[j]
            buchholz_N[j] += points_N[i]
        return points_N, buchholz_N

    for _ in range((num_members - 1).bit_length()):
        points_N, buchholz_N = standing()
        order = sorted(range(num_members), key=lambda i: (-points_N[i], -buchholz_N[i]))
        due_N += 1
        if num_members % 2:
            idle = next(i for i in reversed(order) if not bye_N[i])
            bye_N[idle] = 1
            order.remove(idle)
        paired = _pairing(order, met)
        assert paired is not None, "so few rounds always leave new opponents"
        met |= {frozenset(pair) for pair in paired}
        matches = np.array(paired, dtype=np.int64).reshape(-1, 2)
        table.add(matches, (yield matches))
    points_N, buchholz_N = standing()
    return _lexicographic(np.where(table.games > 0, points_N, np.nan), buchholz_N)


def hold(tournaments: Sequence[Play], play: Callable[[list[Matches]], list[Scores]]) -> list[Keys]:
    """Plays tournaments side by side, a round of all of them at a time.

    Args:
        tournaments: Of any kinds and sizes.
        play: Given the next matches [n, 2] of each tournament, (first, second), with n = 0 for one that is over;
            returns the scores [n, 2] of both sides, NaN without a verdict.

    Returns what each tournament returned.
    """
    waiting: dict[int, Matches] = {k: next(tournament) for k, tournament in enumerate(tournaments)}
    keys: dict[int, Keys] = {}
    nothing = np.zeros((0, 2), dtype=np.int64)
    while waiting:
        scores = play([waiting.get(k, nothing) for k in range(len(tournaments))])
        for k in list(waiting):
            try:
                waiting[k] = tournaments[k].send(scores[k])
            except StopIteration as over:
                keys[k] = over.value
                del waiting[k]
    return [keys[k] for k in range(len(tournaments))]


class _Table:
    """What members have reached so far: matches with a verdict, points (a win 1, a tie half) and sums of scores."""

    def __init__(self, num_members: int) -> None:
        self.games, self.points, self.score = (np.zeros(num_members) for _ in range(3))

    def add(self, matches: Matches, scores: Scores) -> None:
        assert scores.shape == matches.shape, (scores.shape, matches.shape)
        known = ~np.isnan(scores).any(1)
        for side in (0, 1):
            own, other, members = scores[known, side], scores[known, 1 - side], matches[known, side]
            np.add.at(self.games, members, 1)
            np.add.at(self.score, members, own)
            np.add.at(self.points, members, (own > other) + 0.5 * (own == other))

    def rate(self, total_N: Keys) -> Keys:
        """A total per match; NaN for members without one."""
        return np.where(self.games > 0, total_N / np.maximum(self.games, 1), np.nan)


def _play(matches: Matches, num_members: int) -> Generator[Matches, Scores, _Table]:
    """The table after a first round."""
    table = _Table(num_members)
    table.add(matches, (yield matches))
    return table


def _pairing(order: list[int], met: set[frozenset[int]]) -> list[tuple[int, int]] | None:
    """Pairs the first with the next one it has not met, and so on; backtracks if that leaves two that have met."""
    if not order:
        return []
    first, rest = order[0], order[1:]
    for second in rest:
        if frozenset((first, second)) not in met:
            others = _pairing([i for i in rest if i != second], met)
            if others is not None:
                return [(first, second), *others]
    return None


def _against_anchor(num_members: int) -> Matches:
    return np.array([(0, i) for i in range(1, num_members)], dtype=np.int64)


def _lexicographic(first_N: Keys, second_N: Keys) -> Keys:
    """One number per member, in the order of (first, second), equal if both are; NaN if one is NaN."""
    known = ~(np.isnan(first_N) | np.isnan(second_N))
    key_N = np.full(len(first_N), np.nan)
    columns = np.stack([first_N[known], second_N[known].round(12)], axis=1)  # rounded: order of summation is no win
    key_N[known] = np.unique(columns, axis=0, return_inverse=True)[1].reshape(-1)
    return key_N


def _merge_orders(first_wins_NN: Float64[np.ndarray, " N N"]) -> Float64[np.ndarray, " N N"]:
    """P(i beats j) from both orders, NaN if neither is known, and on the diagonal."""
    both = np.stack([first_wins_NN, 1 - first_wins_NN.T])
    known = ~np.isnan(both)
    merged = np.where(known, both, 0.0).sum(0) / np.maximum(known.sum(0), 1)
    return np.where(known.any(0) & ~np.eye(len(first_wins_NN), dtype=bool), merged, np.nan)
