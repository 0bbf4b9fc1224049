"""covgrpo_loss: the kernel of covgrpo inside the policy loss, arXiv 2605.11538.

For runs with several mini-batches per rollout. `advantages/covgrpo.py` has the equations and their
sources; this form is our choice throughout. With l = log pi_theta, detached, of the policy as it is
now:

    c  = (l - mean l) (A - mean A)
    w~ = exp(-c^2 / (2 s^2)) N / sum(w)

and mean l, mean A, s and N / sum(w) frozen when the rollout was made, from the whole batch or from
each row's group. A micro-batch reads them and computes no statistic: its size cannot matter.
w~ multiplies the advantage in verl's vanilla loss. Its mean is 1 before the first update and may
drift afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verl_covgrpo.advantages.covgrpo import Scope, kernel_, standardised_covariance_, weigh
from verl_covgrpo.micro_batch import Loss, MicroBatch
from verl_covgrpo.registry import Method, register
from verl_covgrpo.rollout import Reweighted, Rollout

FROZEN = "covgrpo_frozen"


@register("covgrpo_loss")
@dataclass(frozen=True, kw_only=True)
class CovGRPOLoss(Method):
    """Leave the advantages alone, and weight the loss of each token.

    The metrics are those of covgrpo, for the policy that made the rollout.
    """

    needs = ("old_log_probs",)
    loss_mode = "covgrpo"

    scope: Scope = "batch"
    """What the moments are taken over: the whole batch, or each prompt's group."""

    def reweight(self, rollout: Rollout) -> Reweighted:
        """Return the base's advantages, and (B, 4) what the loss needs of each row's scope."""
        weighting = weigh(rollout, self.base_advantages(rollout), self.scope)
        return Reweighted(
            advantages=rollout.tokens.spread(weighting.A),
            metrics=weighting.metrics(),
            loss_fields={FROZEN: weighting.frozen},
        )

    def policy_loss(self, micro: MicroBatch) -> Loss:
        """Return verl's clipped loss of w~ A.

        The metric `covgrpo_loss_weight` is the mean w~ of the micro-batch, 1 without a token.
        """
        w_BT = weights(micro.log_probs, micro.advantages, micro.response_mask, micro.fields[FROZEN])
        loss, metrics = micro.clipped_loss(micro.advantages * w_BT)
        return loss, {**metrics, "covgrpo_loss_weight": 1.0 + micro.mean(w_BT - 1.0)}


@torch.no_grad()
def weights(
    log_probs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    response_mask_BT: torch.Tensor,
    frozen_B4: torch.Tensor,
) -> torch.Tensor:
    """Return w~ of each token, (B, T) float32, detached.

    It is 1 where the mask is 0, and in rows whose scope has no kernel (1/s = 0); nan for a log-prob
    that is nan where the mask is 1.

    Args:
        log_probs_BT: log pi_theta of the sampled tokens, in nats.
        advantages_BT: the base's advantages.
        response_mask_BT: bool or 0/1.
        frozen_B4: mean l, mean A, 1/s and N / sum(w) of each row's scope.
    """
    mean_l_B1, mean_A_B1, inv_s_B1, norm_B1 = frozen_B4.double().split(1, dim=1)
    u_BT = standardised_covariance_(
        log_probs_BT.to(torch.float64, copy=True), mean_l_B1, advantages_BT, mean_A_B1, inv_s_B1
    )
    # c is 0 where A equals its mean, also for a log-prob of minus infinity.
    u_BT.masked_fill_((advantages_BT == mean_A_B1) & ~log_probs_BT.isnan(), 0.0)
    counts_BT = response_mask_BT.bool() & (inv_s_B1 > 0)
    return torch.where(counts_BT, kernel_(u_BT) * norm_B1, 1.0).float()
