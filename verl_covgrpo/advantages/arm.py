"""arm: advantage re-weighting by answer confidence (ProGRPO), arXiv 2602.05281.

With l = log pi_old of the sampled token, n_i the valid tokens of response i, and A its base
advantage:

    c_i = exp(mean of the lowest ceil(share n_i) of the response's l),  at least one of them
    A'  = A + alpha (c_q - c_i)   where any response of the group is right, else A

Where this comes from
    As described in secondary notes: c_i with a share of 0.2, the form of A', and that groups
    without a right response stay as they are.
    Our choice: alpha = 0.3; c_q is the mean of c_i over the group's responses that have a token
    (`prompt_confidence`; the paper uses the prompt's own confidence, and the trainer keeps no
    log-probs of prompts); right is a raw score above `success_threshold`.

Shape suffixes: B responses, r rows and w columns of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from verl_covgrpo import groups
from verl_covgrpo.registry import Method, parameter, register
from verl_covgrpo.rollout import Reweighted, Rollout


@register("arm")
@dataclass(frozen=True, kw_only=True)
class ARM(Method):
    """Add to each advantage how much less confident the response is than its group.

    Metrics
        confidence: mean c_i over the responses that have a token; confidence_std: its std.
        shift_rms: root mean square of alpha (c_q - c_i) over them, 0 in groups left alone.
        shifted_share: share of them in groups with a right response.
        tokens: valid tokens. seconds: the time taken.
    """

    needs = ("old_log_probs",)
    adv_estimator = "arm"

    alpha: float = parameter(0.3, low=0.0)
    """Weight of the shift."""
    share: float = parameter(0.2, low=0.0, high=1.0)
    """Share of a response's tokens, the least likely ones, that its confidence is taken from."""
    prompt_confidence: Literal["group"] = "group"
    """What c_q is: the mean confidence of the group."""
    success_threshold: float = 0.5
    """A response is right if its raw score is greater."""

    def reweight(self, rollout: Rollout) -> Reweighted:
        """Return A' = A + alpha (c_q - c_i)."""
        A = self.base_advantages(rollout)
        counts_B = rollout.lengths > 0
        c_B = confidences(rollout, self.share)
        scopes = groups.of(rollout)
        c_q = scopes.add(torch.where(counts_B, c_B, 0.0)) / scopes.add(counts_B).clamp(min=1)
        solved_G = scopes.add(groups.right(rollout, self.success_threshold)) > 0
        shift_B = self.alpha * (c_q[scopes.index] - c_B)
        shift_B = torch.where(solved_G[scopes.index] & counts_B, shift_B, 0.0)
        shift_B1 = shift_B.unsqueeze(1)
        shifted = torch.where(shift_B1 != 0, (A.double() + shift_B1).float(), A.float())
        metrics = {
            "confidence": float(c_B[counts_B].mean()),
            "confidence_std": float(c_B[counts_B].std(correction=0)),
            "shift_rms": float(shift_B[counts_B].square().mean().sqrt()),
            "shifted_share": float(solved_G[scopes.index][counts_B].double().mean()),
            "tokens": float(rollout.lengths.sum()),
        }
        return Reweighted(advantages=rollout.tokens.spread(shifted), metrics=metrics)


def confidences(rollout: Rollout, share: float) -> torch.Tensor:
    """Return c_i, (B,) float64; 0 for a response without a token."""
    l_BT, tokens = rollout.require("old_log_probs"), rollout.tokens
    means = []
    for chunk, l_rw in zip(tokens.chunks, tokens.pack(l_BT), strict=True):
        chunk.mask_(l_rw, torch.inf)
        count_r1 = torch.ceil(share * tokens.count[chunk.rows, None].double() - 1e-9).long()
        count_r1.clamp_(min=1)
        lowest_rw = _sorted(l_rw)[:, : int(count_r1.amax())].double()
        lowest_rw.masked_fill_(lowest_rw.isinf() & (lowest_rw > 0), 0.0)
        added_r1 = lowest_rw.cumsum(dim=1).gather(1, count_r1 - 1)
        means.append((added_r1 / count_r1).squeeze(1))
    return torch.where(tokens.count > 0, tokens.unpack_rows(means).exp(), 0.0)


def _sorted(x_rw: torch.Tensor) -> torch.Tensor:
    """Return the rows in ascending order."""
    if x_rw.device.type != "cpu":
        return x_rw.sort(dim=1).values
    x_rw.numpy().sort(axis=1)  # many times faster than torch on a CPU
    return x_rw
