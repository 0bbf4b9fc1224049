"""erpo: token-level entropy-regulated policy optimisation, arXiv 2603.28204.

Over the valid tokens of a prompt's group, with H the entropy of the full softmax, l = log pi_old
and lref = log pi_ref of the sampled token, A the base advantage, z(x) = (x - mean) / (std + 1e-6):

    W   = sigmoid(gamma z(H))                       entropy-aware gating
    s   = l - lref
    s~  = z(s) over the group's tokens in the same bucket floor(K rank / n)
    Psi = W sgn(A) s~                               result-anchored process term
    A'  = W A + eta Psi

rank is the token's place, from 0 on, among the n valid tokens of its response.

Where this comes from
    [paper] Entropy-aware gating, bucket-based implicit normalisation, result-anchored synthesis.
    As described in secondary notes: W with gamma = 5, s (a factor beta in front of it would cancel
    in z), the buckets with K = 10, Psi.
    Our choice: A' and eta = 0.2; `gate_outcome`: false gives A' = A + eta Psi; z is 0 where the
    std is below a floor, 1e-6 for H and `signal_floor` for s, so that at pi = pi_ref the process
    term is 0 in bfloat16 too.

A group whose rewards are all equal has sgn(A) = 0: it gets nothing from either term.

Shape suffixes: r rows and w columns of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_covgrpo import signals
from verl_covgrpo.registry import Method, parameter, register
from verl_covgrpo.rollout import Reweighted, Rollout


@register("erpo")
@dataclass(frozen=True, kw_only=True)
class ERPO(Method):
    """Gate the outcome by entropy, and add a process term from the log-ratio to the reference.

    Metrics
        gate, gate_std: mean and std of W over the valid tokens.
        process_rms: root mean square of what the process term adds, eta Psi.
        process_share: tokens to which it adds anything.
        tokens: valid tokens. seconds: the time taken.
    """

    needs = ("entropy", "old_log_probs", "ref_log_probs")
    adv_estimator = "erpo"

    gamma: float = parameter(5.0, low=0.0)
    """Steepness of the gate; 0 makes W 1/2 everywhere."""
    buckets: int = parameter(10, low=1, high=signals.MOST_BUCKETS)
    """K, the parts into which each response is cut."""
    eta: float = parameter(0.2, low=0.0)
    """Weight of the process term."""
    gate_outcome: bool = True
    """Whether W multiplies the base advantage."""
    signal_floor: float = parameter(signals.SIGNAL_FLOOR, low=0.0)
    """Nats; a bucket whose s varies less has no process term."""

    def reweight(self, rollout: Rollout) -> Reweighted:
        """Return A' = W A + eta Psi."""
        A, tokens = self.base_advantages(rollout), rollout.tokens
        W = signals.entropy_gate(rollout, self.gamma)
        s = signals.log_ratios(rollout)
        by_rank = signals.buckets_by_rank(rollout, self.buckets)
        signals.standardise_(rollout, s, by_rank, self.signal_floor)
        process = s
        for chunk, process_rw, W_rw in zip(tokens.chunks, process, W, strict=True):
            process_rw.mul_(chunk.take(A).sign_()).mul_(W_rw).mul_(self.eta)
            if A.shape[1] > 1:  # then it may hold anything where the mask is 0
                chunk.mask_(process_rw, 0.0)
        metrics = signals.signal_metrics(rollout, W, process)
        if not self.gate_outcome:
            W = tokens.pack(tokens.mask)
        return Reweighted(advantages=tokens.weigh_(W, A, process), metrics=metrics)
