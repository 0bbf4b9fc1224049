"""dagrpo: distinctiveness-aware GRPO, arXiv 2512.06337 v2.

With A the base advantage of a response, J its score from a judge, and over its prompt's group N the
responses with A < 0 and P those with A > 0:

    lambda = 1[J - max_N J >= delta]   where A > 0
             1[min_P J - J >= delta]   where A < 0
    A'     = lambda A;  the denominator of the loss keeps all tokens

Where this comes from
    [paper] All of it, with J in 1..10 and delta = 3; the base without division by the std, without
    length normalisation, no KL.
    Our choice: without a response on the other side nothing is masked; a response without a valid
    token takes part in no comparison.

J arrives as an extra key of the reward function, `score_key`.

Shape suffixes: B responses, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verl_covgrpo import groups
from verl_covgrpo.errors import MethodError
from verl_covgrpo.registry import Method, parameter, register
from verl_covgrpo.rollout import Reweighted, Rollout


@register("dagrpo")
@dataclass(frozen=True, kw_only=True)
class DaGRPO(Method):
    """Keep the responses that a judge can tell from those of the other outcome.

    Metrics
        kept_share: responses that keep their advantage, as a share of those with one.
        kept_positive_share, kept_negative_share: the same of A > 0 and of A < 0; 1 where there
            are none.
        judge_gap: mean J of the right side less that of the wrong side, over the whole batch; 0
            where one is empty.
        tokens: valid tokens. seconds: the time taken.
    """

    adv_estimator = "dagrpo"

    score_key: str | None = None
    """The extra key of the reward function that holds J."""
    delta: float = parameter(3.0, low=0.0)
    """How far apart the sides must be."""

    def reweight(self, rollout: Rollout) -> Reweighted:
        """Return A' = lambda A."""
        if self.score_key is None:
            raise MethodError(f"dagrpo.score_key is not set: {UNSET}")
        if self.score_key not in rollout.extras:
            raise MethodError(
                f"dagrpo reads the judge's score from extras[{self.score_key!r}], but the rollout "
                f"has {sorted(rollout.extras) or 'none'}"
            )
        A = self.base_advantages(rollout)
        J_B = rollout.extras[self.score_key][rollout.final_row].double()
        sign_B = rollout.tokens.at_first(A.expand(rollout.response_mask.shape)).sign()
        scopes = groups.of(rollout)
        best_negative_B = scopes.greatest(torch.where(sign_B < 0, J_B, -torch.inf))[scopes.index]
        worst_positive_B = -scopes.greatest(torch.where(sign_B > 0, -J_B, -torch.inf))[scopes.index]
        # Without the other side these are infinite, and nothing is masked.
        kept_B = torch.where(
            sign_B > 0, J_B - best_negative_B >= self.delta, worst_positive_B - J_B >= self.delta
        )
        A_BT = rollout.tokens.spread(torch.where(kept_B.unsqueeze(1), A, 0.0))
        positive_B, negative_B = sign_B > 0, sign_B < 0
        both = bool(positive_B.any()) and bool(negative_B.any())
        gap = float(J_B[positive_B].mean() - J_B[negative_B].mean()) if both else 0.0
        metrics = {
            "kept_share": _share(kept_B, positive_B | negative_B),
            "kept_positive_share": _share(kept_B, positive_B),
            "kept_negative_share": _share(kept_B, negative_B),
            "judge_gap": gap,
            "tokens": float(rollout.lengths.sum()),
        }
        return Reweighted(advantages=A_BT, metrics=metrics)


UNSET = (
    "name the key of your reward function's result that holds the judge's score, "
    "algorithm.dagrpo.score_key=KEY"
)


def _share(kept_B: torch.Tensor, of_B: torch.Tensor) -> float:
    """Return the share that is kept; 1 where there are none."""
    count = int(of_B.sum())
    return int((kept_B & of_B).sum()) / count if count else 1.0
