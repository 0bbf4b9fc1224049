"""ep_grpo: entropy-progress aligned GRPO, arXiv 2605.04960.

Over the valid tokens of a prompt's group, with H the entropy of the full softmax, l = log pi_old
and lref = log pi_ref of the sampled token, A the base advantage, z(x) = (x - mean) / (std + 1e-6):

    W  = sigmoid(gamma z(H))                         gates the outcome
    d  = sgn(A) where the group's rewards differ; else +1 for a right response, -1 for a wrong one
    s  = l - lref
    p  = sum_{k <= t} H_k / sum_k H_k                progress through the response's entropy
    A' = W A + eta z(d s) over the group's tokens in the same bucket floor(K p)

Where this comes from
    [paper] Three failures of GRPO: uniform granularity, uniform polarity, and the collapse of
    groups whose rewards are all equal.
    As described in secondary notes: W as in erpo with gamma = 5, d, p (t counts; 0 where the sum is
    0), the buckets, p = 1 falling into the last.
    Our choice: A', s, eta = 0.2 and K = 10; a response is right if its score is above
    `success_threshold`; the floors of z as in erpo.

Shape suffixes: B responses, r rows and w columns of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verl_covgrpo import groups, signals, stats
from verl_covgrpo.registry import Method, parameter, register
from verl_covgrpo.rollout import Reweighted, Rollout


@register("ep_grpo")
@dataclass(frozen=True, kw_only=True)
class EPGRPO(Method):
    """Gate the outcome by entropy, and add a signal that groups of equal rewards have too.

    Metrics
        gate, gate_std: mean and std of W over the valid tokens.
        process_rms: root mean square of what is added, eta z(d s).
        process_share: tokens to which anything is added.
        revived_share: tokens in groups of equal rewards to which anything is added.
        tokens: valid tokens. seconds: the time taken.
    """

    needs = ("entropy", "old_log_probs", "ref_log_probs")
    adv_estimator = "ep_grpo"

    gamma: float = parameter(5.0, low=0.0)
    """Steepness of the gate; 0 makes W 1/2 everywhere."""
    buckets: int = parameter(10, low=1, high=signals.MOST_BUCKETS)
    """K, the parts into which each response's entropy is cut."""
    eta: float = parameter(0.2, low=0.0)
    """Weight of the progress term."""
    success_threshold: float = 0.5
    """A response is right if its raw score is greater."""
    signal_floor: float = parameter(signals.SIGNAL_FLOOR, low=0.0)
    """Nats; a bucket whose d s varies less adds nothing."""

    def reweight(self, rollout: Rollout) -> Reweighted:
        """Return A' = W A + eta z(d s)."""
        A, tokens = self.base_advantages(rollout), rollout.tokens
        differ_B = rewards_differ(rollout)
        outcome_B = torch.where(groups.right(rollout, self.success_threshold), 1.0, -1.0)
        W = signals.entropy_gate(rollout, self.gamma)
        ds = signals.log_ratios(rollout)
        for chunk, s_rw in zip(tokens.chunks, ds, strict=True):
            differ_r1, outcome_r1 = differ_B[chunk.rows, None], outcome_B[chunk.rows, None]
            d = torch.where(differ_r1, chunk.take(A).sign(), outcome_r1)
            chunk.mask_(s_rw.mul_(d), 0.0)
        by_progress = signals.buckets_by_progress(rollout, self.buckets)
        signals.standardise_(rollout, ds, by_progress, self.signal_floor)
        process = [z_rw.mul_(self.eta) for z_rw in ds]
        metrics = signals.signal_metrics(rollout, W, process)
        counter = stats.Counter(differ_B.device)
        revived = [
            counter.nonzero(process_rw[~differ_B[chunk.rows]])
            for chunk, process_rw in zip(tokens.chunks, process, strict=True)
        ]
        metrics["revived_share"] = sum(revived) / metrics["tokens"]
        return Reweighted(advantages=tokens.weigh_(W, A, process), metrics=metrics)


def rewards_differ(rollout: Rollout) -> torch.Tensor:
    """Return whether the rewards of each row's group differ, (B,) bool.

    All its responses count, also one without a valid token, as in the base.
    """
    rewards_B = rollout.rewards[rollout.final_row].double()
    constant_G = groups.of(rollout).constant(rewards_B, rewards_B)
    return ~constant_G[rollout.group_index]
