"""The methods once more, in plain Python numbers and loops, as slow and as obvious as possible.

Inputs are lists of lists that hold the valid tokens only; nothing here comes from the package.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

Rows = Sequence[Sequence[float]]


def covgrpo_weights(l: Rows, A: Rows, scope: Sequence[Hashable]) -> list[list[float]]:  # noqa: E741
    """Return the weight of each token; rows with the same `scope` are pooled."""
    weights = [[1.0] * len(row) for row in l]
    for one in set(scope):
        rows = [i for i, s in enumerate(scope) if s == one]
        where = [(i, t) for i in rows for t in range(len(l[i]))]
        if not where:
            continue
        count = len(where)
        advantages = [A[i][t] for i, t in where]
        mean_l = math.fsum(l[i][t] for i, t in where) / count
        mean_A = math.fsum(advantages) / count
        c = [(l[i][t] - mean_l) * (A[i][t] - mean_A) for i, t in where]
        mean_c = math.fsum(c) / count
        std = math.sqrt(math.fsum((x - mean_c) ** 2 for x in c) / count)
        if max(advantages) == min(advantages) or std < 1e-12:
            continue
        w = [math.exp(-(x**2) / (2 * std**2)) for x in c]
        if math.fsum(w) < 1e-30 * count:
            continue
        norm = count / math.fsum(w)
        for (i, t), x in zip(where, w, strict=True):
            weights[i][t] = x * norm
    return weights


def covgrpo_metrics(
    l: Rows,  # noqa: E741
    A: Rows,
    scope: Sequence[Hashable],
) -> dict[str, float]:
    """Return the metrics of covgrpo but the time, for scopes that have a kernel."""
    weights = covgrpo_weights(l, A, scope)
    flat = [(i, t) for i, row in enumerate(l) for t in range(len(row))]
    count = len(flat)
    std, u = {}, {}
    for one in set(scope):
        where = [(i, t) for i, t in flat if scope[i] == one]
        if not where:
            continue
        n = len(where)
        mean_l = math.fsum(l[i][t] for i, t in where) / n
        mean_A = math.fsum(A[i][t] for i, t in where) / n
        c = {(i, t): (l[i][t] - mean_l) * (A[i][t] - mean_A) for i, t in where}
        mean_c = math.fsum(c.values()) / n
        s = math.sqrt(math.fsum((x - mean_c) ** 2 for x in c.values()) / n)
        varies = max(A[i][t] for i, t in where) > min(A[i][t] for i, t in where)
        std[one] = s if varies else 0.0
        u |= {where: x / s if varies and s >= 1e-12 else 0.0 for where, x in c.items()}
    values = [weights[i][t] for i, t in flat]
    square = math.fsum(w * w for w in values) / count

    def mean_where(keep: list[bool]) -> float:
        kept = [w for w, k in zip(values, keep, strict=True) if k]
        return math.fsum(kept) / len(kept) if kept else 1.0

    return {
        "weight_std": math.sqrt(max(square - (math.fsum(values) / count) ** 2, 0.0)),
        "effective_share": (math.fsum(values) / count) ** 2 / square,
        "suppressed_share": sum(math.exp(-(x**2) / 2) < 0.1 for x in u.values()) / count,
        "covariance_std": math.fsum(std[scope[i]] for i, _ in flat) / count,
        "high_covariance_share": sum(x > 2 for x in u.values()) / count,
        "low_covariance_share": sum(x < -2 for x in u.values()) / count,
        "positive_weight_mean": mean_where([A[i][t] > 0 for i, t in flat]),
        "negative_weight_mean": mean_where([A[i][t] < 0 for i, t in flat]),
        "tokens": float(count),
    }


def grpo(rewards: Sequence[float], group: Sequence[Hashable], by_std: bool = True) -> list[float]:
    """Return the GRPO advantage of each response in float64."""
    advantages = []
    for reward, own in zip(rewards, group, strict=True):
        others = [r for r, g in zip(rewards, group, strict=True) if g == own]
        if len(others) == 1:
            advantages.append(reward / (1 + 1e-6) if by_std else reward)
            continue
        if max(others) == min(others):
            advantages.append(0.0)
            continue
        mean = math.fsum(others) / len(others)
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in others) / (len(others) - 1))
        advantages.append((reward - mean) / (std + 1e-6) if by_std else reward - mean)
    return advantages
