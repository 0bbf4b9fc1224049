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


def ah_weights(
    H: Rows,
    A: Rows,
    vocab_size: int,
    alpha: float,
    inclusive: bool = True,
    normalize: bool = False,
    sign_aware: bool = False,
    control: str = "none",
) -> list[list[float]]:
    """Return the weight of each token under the adaptive horizon, or its sign-aware form."""
    weights = []
    for entropies, advantages in zip(H, A, strict=True):
        row, product = [], 1.0
        for entropy, advantage in zip(entropies, advantages, strict=True):
            before = product
            product *= 1 - alpha * entropy / math.log(vocab_size)
            discount = product if inclusive else before
            row.append(1.0 if sign_aware and advantage >= 0 else discount)
        weights.append(row)
    negative = [(i, t) for i, row in enumerate(A) for t, a in enumerate(row) if a < 0]
    if control != "none" and negative:
        held = {where: weights[where[0]][where[1]] for where in negative}
        for i, t in negative:
            alike = [w for (_, rank), w in held.items() if control == "neg_scale" or rank == t]
            weights[i][t] = math.fsum(alike) / len(alike)
    if normalize:
        flat = [w for row in weights for w in row]
        mean = math.fsum(flat) / len(flat)
        weights = [[w / mean for w in row] for row in weights]
    return weights


def z_scores(x: dict[Hashable, float], floor: float) -> dict[Hashable, float]:
    """Return (x - mean) / (std + 1e-6) of one population, 0 where the std is below the floor."""
    mean = math.fsum(x.values()) / len(x)
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in x.values()) / len(x))
    return {key: 0.0 if std < floor else (v - mean) / (std + 1e-6) for key, v in x.items()}


def z_within(x: Rows, population: Sequence[Sequence[Hashable]], floor: float) -> list[list[float]]:
    """Return the z-score of each value among those with its own label."""
    found = [[0.0] * len(row) for row in x]
    labels = {label for row in population for label in row}
    for label in labels:
        where = {
            (i, t): x[i][t]
            for i, row in enumerate(population)
            for t, own in enumerate(row)
            if own == label
        }
        for (i, t), z in z_scores(where, floor).items():  # type: ignore[misc]
            found[i][t] = z
    return found


def entropy_gate(H: Rows, group: Sequence[Hashable], gamma: float) -> list[list[float]]:
    """Return sigmoid(gamma z(H)), z over all tokens of the prompt's group."""
    labels = [[g] * len(row) for row, g in zip(H, group, strict=True)]
    return [[1 / (1 + math.exp(-gamma * z)) for z in row] for row in z_within(H, labels, 1e-6)]


def sign(x: float) -> float:
    return (x > 0) - (x < 0)


def erpo_advantages(
    H: Rows,
    s: Rows,
    A: Rows,
    group: Sequence[Hashable],
    gamma: float,
    K: int,
    eta: float,
    gate_outcome: bool,
    floor: float,
) -> list[list[float]]:
    W = entropy_gate(H, group, gamma)
    labels = [
        [(g, K * rank // len(row)) for rank in range(len(row))]
        for row, g in zip(s, group, strict=True)
    ]
    z = z_within(s, labels, floor)
    return [
        [
            (W[i][t] if gate_outcome else 1.0) * a + eta * W[i][t] * sign(a) * z[i][t]
            for t, a in enumerate(row)
        ]
        for i, row in enumerate(A)
    ]


def progress(H: Rows) -> list[list[float]]:
    """Return the share of the response's entropy spent up to and including each token."""
    return [
        [
            math.fsum(row[: t + 1]) / math.fsum(row) if math.fsum(row) else 0.0
            for t in range(len(row))
        ]
        for row in H
    ]


def ep_grpo_advantages(
    H: Rows,
    s: Rows,
    A: Rows,
    rewards: Sequence[float],
    scores: Sequence[float],
    group: Sequence[Hashable],
    gamma: float,
    K: int,
    eta: float,
    threshold: float,
    floor: float,
) -> list[list[float]]:
    W = entropy_gate(H, group, gamma)
    labels = [
        [(g, min(math.floor(K * p), K - 1)) for p in row]
        for row, g in zip(progress(H), group, strict=True)
    ]
    signal = []
    for i, row in enumerate(s):
        own = [r for r, g in zip(rewards, group, strict=True) if g == group[i]]
        outcome = 1.0 if scores[i] > threshold else -1.0
        differ = max(own) > min(own)
        signal.append([(sign(A[i][t]) if differ else outcome) * x for t, x in enumerate(row)])
    z = z_within(signal, labels, floor)
    return [[W[i][t] * a + eta * z[i][t] for t, a in enumerate(row)] for i, row in enumerate(A)]


def reco_weights(l: Rows, group: Sequence[Hashable], cap: float) -> list[float]:  # noqa: E741
    """Return the weight of each response; 1 for one without a token."""
    weights = []
    for row, own in zip(l, group, strict=True):
        if not row:
            weights.append(1.0)
            continue
        others = [r for r, g in zip(l, group, strict=True) if g == own and r]
        inverse = [1 / math.exp(math.fsum(r) / len(r)) for r in others]
        rarity = 1 / math.exp(math.fsum(row) / len(row))
        weights.append(min(rarity / (math.fsum(inverse) / len(inverse)), cap))
    return weights


def covariances(l: Rows, A: Rows) -> list[list[float]]:  # noqa: E741
    """Return c over the whole batch."""
    flat_l = [x for row in l for x in row]
    flat_A = [x for row in A for x in row]
    mean_l, mean_A = math.fsum(flat_l) / len(flat_l), math.fsum(flat_A) / len(flat_A)
    return [
        [(x - mean_l) * (a - mean_A) for x, a in zip(ls, As, strict=True)]
        for ls, As in zip(l, A, strict=True)
    ]


def how_many(share: float, count: int) -> int:
    return max(1, math.floor(share * count))


def clip_cov_candidates(c: Rows, low: float, high: float) -> set[tuple[int, int]]:
    """Return the tokens among which Clip-Cov draws."""
    return {(i, t) for i, row in enumerate(c) for t, x in enumerate(row) if low <= x <= high}


def kl_cov_selected(c: Rows, share: float) -> set[tuple[int, int]]:
    """Return the tokens of the largest c; which of those with equal c is left open."""
    flat = [(x, i, t) for i, row in enumerate(c) for t, x in enumerate(row)]
    flat.sort(key=lambda token: -token[0])
    return {(i, t) for _, i, t in flat[: how_many(share, len(flat))]}


def kl_cov_losses(
    l: Rows,  # noqa: E741
    old: Rows,
    A: Rows,
    selected: set[tuple[int, int]],
    coef: float,
) -> tuple[list[list[float]], list[list[float]]]:
    """Return the loss of each token, and its derivative with respect to the log-prob."""
    losses, slopes = [], []
    for i, row in enumerate(l):
        losses.append([0.0] * len(row))
        slopes.append([0.0] * len(row))
        for t, now in enumerate(row):
            r = math.exp(now - old[i][t])
            losses[i][t] = slopes[i][t] = -A[i][t] * r
            if (i, t) in selected:
                losses[i][t] += coef * abs(now - old[i][t])
                slopes[i][t] += coef * sign(now - old[i][t])
    return losses, slopes


def reco_ratio(l: float, old: float) -> float:  # noqa: E741
    """Return p (1 - p) / (p_old (1 - p_old)), each 1 - p at least 1e-6."""
    p, p_old = math.exp(l), math.exp(old)
    return p * max(1 - p, 1e-6) / (p_old * max(1 - p_old, 1e-6))


def reco_losses(
    l: Rows,  # noqa: E741
    old: Rows,
    A: Rows,
    low: float,
    high: float,
) -> tuple[list[list[float]], list[list[float]]]:
    """Return the loss of each token, and its derivative with the ratio held fixed."""
    losses, slopes = [], []
    for ls, olds, advantages in zip(l, old, A, strict=True):
        ratios = [min(max(reco_ratio(x, y), low), high) for x, y in zip(ls, olds, strict=True)]
        slopes.append([-r * a for r, a in zip(ratios, advantages, strict=True)])
        losses.append([slope * x for slope, x in zip(slopes[-1], ls, strict=True)])
    return losses, slopes


def confidence(l: Sequence[float], share: float) -> float:  # noqa: E741
    """Return exp of the mean of the lowest ceil(share n) log-probs."""
    lowest = sorted(l)[: max(1, math.ceil(share * len(l) - 1e-9))]
    return math.exp(math.fsum(lowest) / len(lowest))


def arm_shifts(
    l: Rows,  # noqa: E741
    scores: Sequence[float],
    group: Sequence[Hashable],
    alpha: float,
    share: float,
    threshold: float,
) -> list[float]:
    """Return what each response's advantage is shifted by."""
    c = [confidence(row, share) if row else None for row in l]
    shifts = []
    for own, mine in zip(group, c, strict=True):
        others = [x for x, g in zip(c, group, strict=True) if g == own and x is not None]
        solved = any(s > threshold for s, g in zip(scores, group, strict=True) if g == own)
        if mine is None or not solved:
            shifts.append(0.0)
        else:
            shifts.append(alpha * (math.fsum(others) / len(others) - mine))
    return shifts


def ha_dw_weight(a: float, p: float, C: float, scale: float) -> float:
    """Return Phi of one advantage."""
    return scale * math.exp(-sign(a) * sign(p - C) * abs(p - C))


def dagrpo_kept(
    A: Sequence[float],
    J: Sequence[float],
    group: Sequence[Hashable],
    empty: Sequence[bool],
    delta: float,
) -> list[bool]:
    """Return which responses keep their advantage."""
    kept = []
    for i, own in enumerate(group):
        peers = [k for k, g in enumerate(group) if g == own and not empty[k]]
        negatives = [J[k] for k in peers if A[k] < 0]
        positives = [J[k] for k in peers if A[k] > 0]
        if A[i] > 0 and negatives:
            kept.append(J[i] - max(negatives) >= delta)
        elif A[i] < 0 and positives:
            kept.append(min(positives) - J[i] >= delta)
        else:
            kept.append(True)
    return kept


def linear_quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def sent_betas(
    H: Rows,
    c: Rows,
    q_entropy: float,
    q_covariance: float,
    high: float,
    low: float,
) -> list[list[float]]:
    """Return the KL coefficient of every token."""
    below = linear_quantile([x for row in H for x in row], q_entropy)
    among = [
        x for hs, cs in zip(H, c, strict=True) for h, x in zip(hs, cs, strict=True) if h < below
    ]
    above = linear_quantile(among, q_covariance) if among else 0.0
    return [
        [0.0 if h >= below else high if x > above else low for h, x in zip(hs, cs, strict=True)]
        for hs, cs in zip(H, c, strict=True)
    ]
