"""pos_adv: positive-advantage reweighting ("Revisiting Entropy"), arXiv 2511.05993.

With A the base advantage and lambda in [0, 1] on a schedule:

    A' = lambda A where A > 0, else A

    entropy  lambda_1 = 0; after each batch lambda moves by -step where the batch's mean token
             entropy is below target, else by +step, and stays in [0, 1]
    stage    0 for the first half of the training steps, then linear to 1
    epoch    (e - 1) / (E - 1) in epoch e of E; 1 where E = 1

Where this comes from
    As described in secondary notes: all of it, with step = 0.05 and target = 0.2 nats; `entropy`
    is the default and the best.
    Our choice: the mean is over all valid tokens of the batch.

The method remembers lambda; it is saved with verl's checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from verl_covgrpo import stats
from verl_covgrpo.errors import MethodError
from verl_covgrpo.registry import Method, parameter, register
from verl_covgrpo.rollout import Reweighted, Rollout


@register("pos_adv")
@dataclass(frozen=True, kw_only=True)
class PosAdv(Method):
    """Scale positive advantages by a weight that follows the course of training.

    Metrics
        scale: lambda of this batch. entropy: mean token entropy, in nats.
        positive_share: tokens with A > 0, as a share of all.
        tokens: valid tokens. seconds: the time taken.
    """

    needs = ("entropy",)
    adv_estimator = "pos_adv"
    memory = True

    schedule: Literal["entropy", "stage", "epoch"] = "entropy"
    step: float = parameter(0.05, low=0.0, high=1.0)
    """How far lambda moves after a batch, schedule entropy alone."""
    target: float = parameter(0.2, low=0.0)
    """Nats, schedule entropy alone."""

    remembered: dict[str, float] = field(
        default_factory=lambda: {"scale": 0.0}, init=False, repr=False, compare=False
    )

    def reweight(self, rollout: Rollout) -> Reweighted:
        """Return A' = lambda A where A > 0, and move lambda."""
        A, mask_BT = self.base_advantages(rollout), rollout.response_mask
        scale = self.scale_of(rollout)
        entropy = stats.mean_of(rollout.tokens, rollout.require("entropy"))
        if self.schedule == "entropy":
            moved = scale + (-self.step if entropy < self.target else self.step)
            self.remembered["scale"] = min(max(moved, 0.0), 1.0)
        A_BT = rollout.tokens.spread(torch.where(A > 0, scale * A, A))
        tokens = int(rollout.lengths.sum())
        metrics = {
            "scale": scale,
            "entropy": entropy,
            "positive_share": int(((A > 0) & mask_BT).sum()) / tokens,
            "tokens": float(tokens),
        }
        return Reweighted(advantages=A_BT, metrics=metrics)

    def scale_of(self, rollout: Rollout) -> float:
        """Return lambda of a batch."""
        if self.schedule == "stage":
            return min(max(2 * rollout.progress - 1, 0.0), 1.0)
        if self.schedule == "epoch":
            return rollout.epoch / (rollout.epochs - 1) if rollout.epochs > 1 else 1.0
        return self.remembered["scale"]

    def state_dict(self) -> dict[str, Any]:
        """Return lambda of the next batch."""
        return dict(self.remembered)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state.

        Raises:
            MethodError: it is not one of pos_adv.
        """
        if set(state) != {"scale"}:
            raise MethodError(f"the state of pos_adv has scale, not {sorted(state)}")
        self.remembered["scale"] = float(state["scale"])
