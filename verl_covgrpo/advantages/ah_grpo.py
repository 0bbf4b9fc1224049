"""ah_grpo and sa_ah_grpo: adaptive horizon, arXiv 2606.05434.

With H the entropy of the full softmax in nats, V the size of the vocabulary, and products over the
valid tokens of a response up to and including t:

    Hbar = H / log V
    D_t  = prod_{k <= t} (1 - alpha Hbar_k)
    ah_grpo      A' = D A
    sa_ah_grpo   A' = D A where A < 0, else A          sign-aware

Where this comes from
    [paper] A discount by the entropy gone through so far; the sign-aware form discounts the
    responses with a negative advantage alone; alpha = 0 is GRPO, alpha = 0.5 the paper's value.
    As described in secondary notes: the entropy is normalised. (With H in place of Hbar hardly any
    weight is left after 250 tokens.)
    Our choice: the product, and that t itself counts (`inclusive`); `normalize`; Hbar is clamped to
    [0, 1], for rounding alone: what lies further out is an error.

Shape suffixes: B responses, T columns, r rows and w columns of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from verl_covgrpo import stats
from verl_covgrpo.errors import MethodError
from verl_covgrpo.registry import Method, parameter, register
from verl_covgrpo.rollout import Reweighted, Rollout

ROUNDING = 0.01
"""How far beyond [0, log V], as a share of log V, a bfloat16 entropy may lie."""
ERASED = 0.1


@register("ah_grpo")
@dataclass(frozen=True, kw_only=True)
class AHGRPO(Method):
    """Discount each token's advantage by the entropy its response has gone through.

    Metrics
        discount: mean D over the valid tokens. final_discount: its mean over the last tokens.
        erased_share: tokens whose weight is below 0.1.
        weight: mean weight of the valid tokens; negative_weight: of those with A < 0, 1 where there
            are none.
        normalized_entropy: mean Hbar. tokens: valid tokens. seconds: the time taken.
    """

    needs = ("entropy", "vocab_size")
    adv_estimator = "ah_grpo"

    alpha: float = parameter(0.5, low=0.0, high=1.0)
    """Strength of the discount; 0 is the base."""
    inclusive: bool = True
    """Whether a token's own entropy counts in its discount."""
    normalize: bool = False
    """Divide the weights by their mean over all valid tokens of the batch."""

    def reweight(self, rollout: Rollout) -> Reweighted:
        """Return A' = D A."""
        A = self.base_advantages(rollout)
        D = discounts(rollout, self.alpha, self.inclusive)
        return self.weighted(rollout, A, D, [D_rw.clone() for D_rw in D])

    def weighted(
        self, rollout: Rollout, A: torch.Tensor, D: list[torch.Tensor], w: list[torch.Tensor]
    ) -> Reweighted:
        """Return A' = w A and the metrics; D and w are chunks, w is used up."""
        tokens = rollout.tokens
        count = int(tokens.count.sum())
        if self.normalize:
            mean = stats.add_up(w) / count
            for w_rw in w:
                w_rw.div_(mean if mean > 0 else 1.0)  # 0 throughout stays 0
        metrics = {
            "discount": stats.add_up(D) / count,
            "final_discount": final_discount(rollout, D),
            "weight": stats.add_up(w) / count,
            "negative_weight": mean_where_negative(rollout, A, w),
            "erased_share": erased(rollout, w) / count,
            "normalized_entropy": stats.mean_of(tokens, rollout.require("entropy"))
            / log_vocabulary(rollout),
            "tokens": float(count),
        }
        return Reweighted(advantages=tokens.weigh_(w, A), metrics=metrics)


@register("sa_ah_grpo")
@dataclass(frozen=True, kw_only=True)
class SAAHGRPO(AHGRPO):
    """Discount the tokens with a negative advantage alone.

    The discount also shrinks the negative advantages as a whole; `control` keeps that and takes the
    rest away, for an experiment that is to tell the two apart. Metrics as for ah_grpo.
    """

    adv_estimator = "sa_ah_grpo"

    control: Literal["none", "neg_scale", "position_decay"] = "none"
    """neg_scale: each token with A < 0 gets the mean weight of all of them in the batch;
    position_decay: the mean weight of those that have its own place in their response."""

    def reweight(self, rollout: Rollout) -> Reweighted:
        """Return A' = D A where A < 0, else A."""
        A = self.base_advantages(rollout)
        D = discounts(rollout, self.alpha, self.inclusive)
        w = [
            torch.where(negative, D_rw, chunk.take(rollout.response_mask).double())
            for chunk, negative, D_rw in zip(
                rollout.tokens.chunks, negatives(rollout, A), D, strict=True
            )
        ]
        if self.control == "neg_scale":
            mean = mean_where_negative(rollout, A, w)
            for negative, w_rw in zip(negatives(rollout, A), w, strict=True):
                w_rw.masked_fill_(negative, mean)
        elif self.control == "position_decay":
            decay_by_position_(rollout, A, w)
        return self.weighted(rollout, A, D, w)


def discounts(rollout: Rollout, alpha: float, inclusive: bool) -> list[torch.Tensor]:
    """Return D of every chunk, (r, w) float64, 0 where the mask is 0.

    Raises:
        MethodError: an entropy that no softmax over the vocabulary has.
    """
    tokens, log_V = rollout.tokens, log_vocabulary(rollout)
    D = []
    for chunk, H_rw in zip(tokens.chunks, tokens.pack(rollout.require("entropy")), strict=True):
        chunk.mask_(H_rw, 0.0)
        low, high = (float(x) for x in H_rw.aminmax())
        if low < -ROUNDING * log_V or high > (1 + ROUNDING) * log_V:
            raise MethodError(
                f"entropy goes from {low:.4g} to {high:.4g} nats, but over a vocabulary of "
                f"{rollout.vocab_size} it lies between 0 and {log_V:.4g}: check vocab_size, and "
                "that the entropy is that of the full softmax, in nats"
            )
        Hbar_rw = H_rw.double().div_(log_V).clamp_(0.0, 1.0)
        D_rw = torch.cumprod(Hbar_rw.mul_(-alpha).add_(1.0), dim=1)
        if not inclusive:
            D_rw = D_rw.roll(1, dims=1)
            D_rw[:, 0] = 1.0
        D.append(chunk.mask_(D_rw, 0.0))
    return D


def final_discount(rollout: Rollout, D: list[torch.Tensor]) -> float:
    """Return the mean of D over the last token of each response."""
    tokens = rollout.tokens
    last = [
        D_rw.gather(1, tokens.end[chunk.rows, None] - 1)
        for chunk, D_rw in zip(tokens.chunks, D, strict=True)
    ]
    return float(torch.cat(last).mean())


def log_vocabulary(rollout: Rollout) -> float:
    """Return log V.

    Raises:
        MethodError: the size of the vocabulary is missing, or below 2.
    """
    size = int(rollout.require("vocab_size"))
    if size < 2:
        raise MethodError(f"vocab_size is {size}; entropy needs at least two tokens to choose from")
    return math.log(size)


def negatives(rollout: Rollout, A: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield where A < 0 at a valid token, (r, w) bool, chunk by chunk."""
    for chunk in rollout.tokens.chunks:
        yield (chunk.take(A) < 0) & chunk.take(rollout.response_mask)


def mean_where_negative(rollout: Rollout, A: torch.Tensor, w: list[torch.Tensor]) -> float:
    """Return the mean weight of the valid tokens with A < 0; 1 where there are none."""
    added, count = 0.0, 0
    for negative, w_rw in zip(negatives(rollout, A), w, strict=True):
        added += float((w_rw * negative).sum())
        count += int(negative.sum())
    return added / count if count else 1.0


def decay_by_position_(rollout: Rollout, A: torch.Tensor, w: list[torch.Tensor]) -> None:
    """Give each token with A < 0 the mean weight of those of its own rank, in place."""
    tokens = rollout.tokens
    added_T = torch.zeros(tokens.mask.shape[1], dtype=torch.float64, device=tokens.mask.device)
    count_T = torch.zeros_like(added_T)
    places = [chunk.ranks.clamp_(min=0) for chunk in tokens.chunks]
    for rank, negative, w_rw in zip(places, negatives(rollout, A), w, strict=True):
        rank_rw = rank.expand(w_rw.shape)
        added_T.index_add_(0, rank_rw.flatten(), (w_rw * negative).flatten())
        count_T.index_add_(0, rank_rw.flatten(), negative.double().flatten())
    mean_T = added_T / count_T.clamp(min=1)
    for rank, negative, w_rw in zip(places, negatives(rollout, A), w, strict=True):
        w_rw.copy_(torch.where(negative, mean_T[rank], w_rw))


def erased(rollout: Rollout, w: list[torch.Tensor]) -> int:
    """Return how many valid tokens have a weight below 0.1."""
    count = stats.Counter(rollout.tokens.mask.device)
    masked = sum(w_rw.numel() for w_rw in w) - int(rollout.lengths.sum())
    return sum(count.below(w_rw, ERASED) for w_rw in w) - masked
