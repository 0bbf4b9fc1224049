"""ha_dw: history-aware difficulty weighting, arXiv 2601.08521 v2.

With y_t the share of right responses in batch t, p_g that of a prompt's group, A the base
advantage, and an anchor C that remembers earlier batches:

    D_i   = -sgn(A_i) sgn(p_g - C)
    Phi_i = lambda exp(D_i |p_g - C|)
    A'    = Phi A

    anchor hard    C_t = mean of the last h values of y before this batch; y_1 for the first
    anchor kalman  C_1 = y_1,  C_{t+1} = (1 - eta_t) C_t + eta_t y_t,
                   eta_t = clip(eta std(the last m values of C), floor, 1)

Where this comes from
    [paper] Phi, D, lambda = 1.3, the hard anchor over h = 10 batches, the form of the other.
    Our choice: the anchor is the one before this batch, and the first batch's own y; eta = 1,
    m = 10, the population std of the anchors so far, this batch's included, with fewer than two of
    them eta_t = 1; the floor, 0.05: without it a constant anchor never moves again.

The method remembers y (hard) or C (kalman); its state is saved with verl's checkpoint.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from verl_covgrpo import groups, stats
from verl_covgrpo.errors import MethodError
from verl_covgrpo.registry import Method, parameter, register
from verl_covgrpo.rollout import Reweighted, Rollout


@register("ha_dw")
@dataclass(frozen=True, kw_only=True)
class HADW(Method):
    """Weight responses by how their group's difficulty stands to the history of training.

    Metrics
        right_share: y. anchor: C.
        weight: mean Phi of the valid tokens; weight_std: its std.
        positive_weight, negative_weight: mean Phi of the tokens with A > 0 and with A < 0; 1 where
            there are none.
        tokens: valid tokens. seconds: the time taken.
    """

    needs = ("scores",)
    adv_estimator = "ha_dw"
    memory = True

    scale: float = parameter(1.3, low=0.0)
    """lambda."""
    anchor: Literal["hard", "kalman"] = "hard"
    """Mean of the last batches, or a running mean with a gain of its own."""
    window: int = parameter(10, low=1)
    """h or m, in batches."""
    gain: float = parameter(1.0, low=0.0)
    """eta, kalman alone."""
    floor: float = parameter(0.05, low=0.0, high=1.0)
    """The least eta_t, kalman alone."""
    success_threshold: float = 0.5
    """A response is right if its raw score is greater."""

    history: list[float] = field(default_factory=list, init=False, repr=False, compare=False)
    """hard: the last y; kalman: the last C, the next one included."""

    def reweight(self, rollout: Rollout) -> Reweighted:
        """Return A' = Phi A, and remember the batch."""
        A = self.base_advantages(rollout)
        p_G, y = groups.share_right(rollout, self.success_threshold)
        C = self.current_anchor(y)
        self.remember(y, C)
        gap_B1 = (p_G - C)[rollout.group_index].unsqueeze(1)
        D = -A.double().sign() * gap_B1.sign()
        Phi = self.scale * torch.exp(D * gap_B1.abs())
        metrics = {
            "right_share": y,
            "anchor": C,
            **stats.weight_metrics(rollout.tokens, Phi, A),
            "tokens": float(rollout.lengths.sum()),
        }
        return Reweighted(advantages=rollout.tokens.spread(Phi * A), metrics=metrics)

    def current_anchor(self, y: float) -> float:
        """Return C for a batch in which the share y was right."""
        if not self.history:
            return y
        if self.anchor == "hard":
            return statistics.fmean(self.history[-self.window :])
        return self.history[-1]

    def remember(self, y: float, C: float) -> None:
        """Take up a batch."""
        if self.anchor == "hard":
            self.history.append(y)
        else:
            anchors = self.history or [C]
            recent = anchors[-self.window :]
            eta = 1.0
            if len(recent) >= 2:
                eta = min(max(self.gain * statistics.pstdev(recent), self.floor), 1.0)
            self.history[:] = [*anchors, (1 - eta) * C + eta * y]
        del self.history[: -self.window - 1]

    def state_dict(self) -> dict[str, Any]:
        """Return the anchor's kind and what it remembers."""
        return {"anchor": self.anchor, "history": list(self.history)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state.

        Raises:
            MethodError: it is not one of ha_dw, or that of the other anchor.
        """
        if set(state) != {"anchor", "history"}:
            raise MethodError(f"the state of ha_dw has anchor and history, not {sorted(state)}")
        if state["anchor"] != self.anchor:
            raise MethodError(
                f"the saved anchor of ha_dw is {state['anchor']!r}, this launch has "
                f"{self.anchor!r}: set algorithm.ha_dw.anchor={state['anchor']}"
            )
        self.history[:] = [float(value) for value in state["history"]]
