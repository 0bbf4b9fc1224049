"""What a method may look at (`Rollout`), and what it returns (`Reweighted`).

Shape suffixes: B responses, T columns. A method never sees verl's batch, only this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from verl_covgrpo import stats
from verl_covgrpo.errors import MethodError

_PROVIDED_BY = {
    "old_log_probs": (
        "verl's V1 trainer computes them: set algorithm.rollout_correction.bypass_mode=False"
    ),
    "ref_log_probs": (
        "set actor_rollout_ref.actor.use_kl_loss=True (with kl_loss_coef=0 where no KL is wanted)"
    ),
    "entropy": (
        "it comes with the old log-probs: set algorithm.rollout_correction.bypass_mode=False"
    ),
    "vocab_size": "the verl hook takes it from the model's hf_config",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """One whole batch of responses, checked when it is made.

    Floating fields may be bfloat16, half, float32 or float64. Where the mask is 0 they may hold
    anything, nan included. A group without any valid token is legal. Nothing is repaired, and no
    field is copied: leave the tensors alone as long as the rollout is in use.

    Raises:
        MethodError: shapes that disagree, a mask that is not boolean or 0/1, no valid token
            anywhere, None or nan in `group`, nan or inf in a reward or at a valid position.
    """

    rewards: torch.Tensor
    """(B,) summed token reward of each response."""
    response_mask: torch.Tensor
    """(B, T) boolean or 0/1: the valid tokens; boolean once the rollout is made."""
    group: Any
    """(B,) prompt ids, any hashable."""
    scores: torch.Tensor | None = None
    """(B,) raw score; the rewards where none is given."""
    old_log_probs: torch.Tensor | None = None
    """(B, T) log-prob of each token under the policy that is about to be updated, in nats."""
    ref_log_probs: torch.Tensor | None = None
    """(B, T) log-prob of each token under the reference policy, in nats."""
    entropy: torch.Tensor | None = None
    """(B, T) entropy of the full softmax, in nats."""
    base_advantages: torch.Tensor | None = None
    """(B, T) or (B,) advantages of a base that is not computed here."""
    vocab_size: int | None = None
    step: int = 0
    progress: float = 0.0
    """Share of the training steps already made, 0 to 1."""
    epoch: int = 0
    epochs: int = 1
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Named (B,) or (B, T) fields, e.g. a judge score."""
    final_output: torch.Tensor | None = None
    """(B,) row of the last output of each row's session; None where every row is its own."""

    tokens: stats.Tokens = field(init=False, repr=False)
    """Where the valid tokens are."""
    group_index: torch.Tensor = field(init=False, repr=False)
    """(B,) int64 code of each row's group, numbered in the order of first appearance."""
    num_groups: int = field(init=False)
    """Number of groups, those without a valid token included."""

    def __post_init__(self) -> None:
        mask_BT = _tensor("response_mask", self.response_mask)
        if mask_BT.ndim != 2:
            raise MethodError(f"response_mask must be (B, T), but its shape is {_shape(mask_BT)}")
        try:
            with stats.one_thread():
                tokens = stats.tokens_of(mask_BT)
        except stats.NotBoolean as error:
            raise MethodError(f"response_mask must be boolean or 0/1, but has {error}") from None
        if not bool(tokens.count.any()):
            raise MethodError(
                "response_mask has no valid token anywhere: there is nothing to learn from; check "
                "that the mask marks response tokens with 1"
            )
        self._set(response_mask=tokens.mask, tokens=tokens)

        self._set(rewards=self._per_response("rewards", self.rewards))
        scores = self.rewards if self.scores is None else self.scores
        self._set(scores=self._per_response("scores", scores))
        for name in ("old_log_probs", "ref_log_probs", "entropy"):
            if getattr(self, name) is not None:
                self._set(**{name: self._field(name, getattr(self, name), ndims=(2,))})
        if self.base_advantages is not None:
            self._set(base_advantages=self._field("base_advantages", self.base_advantages))
        extras = {
            name: self._field(f"extras[{name!r}]", value) for name, value in self.extras.items()
        }
        self._set(extras=extras)

        group_index_B, num_groups = _group_codes(self.group, self.rewards.shape[0])
        self._set(group_index=group_index_B.to(mask_BT.device), num_groups=num_groups)
        if self.final_output is not None:
            self._set(final_output=self._checked_final_output(self.final_output))

    @property
    def lengths(self) -> torch.Tensor:
        """(B,) int64 number of valid tokens of each row."""
        return self.tokens.count

    @property
    def final_row(self) -> torch.Tensor:
        """(B,) row of the last output of each row's session: it carries the session's reward."""
        if self.final_output is None:
            return torch.arange(self.rewards.shape[0], device=self.rewards.device)
        return self.final_output

    @cached_property
    def sessions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of the last outputs, (S,), and each row's session, (B,).

        Sessions are numbered in the order in which they first appear.
        """
        session_B, final_rows = _codes(self.final_row.tolist())
        device = self.rewards.device
        return torch.tensor(final_rows, device=device), session_B.to(device)

    def require(self, name: str) -> torch.Tensor:
        """Return a field.

        Raises:
            MethodError: the rollout lacks it; names the setting of verl that provides it.
        """
        value = getattr(self, name, None)
        if value is None:
            hint = _PROVIDED_BY.get(name, "pass it to the Rollout")
            raise MethodError(f"this method needs {name}, which the rollout lacks: {hint}")
        return value

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _per_response(self, name: str, value: Any) -> torch.Tensor:
        """Check a (B,) field that counts for every row, also for rows without a valid token."""
        value_B = _floating(_tensor(name, value))
        self._check_shape(name, value_B, ndims=(1,))
        if not bool(value_B.isfinite().all()):
            row = int(value_B.isfinite().logical_not().nonzero()[0])
            raise MethodError(f"{name} has {float(value_B[row])} in row {row}; it must be finite")
        return value_B

    def _field(self, name: str, value: Any, ndims: tuple[int, ...] = (1, 2)) -> torch.Tensor:
        """Check a (B,) or (B, T) field, whose values must be finite where there are tokens."""
        value = _floating(_tensor(name, value))
        self._check_shape(name, value, ndims)
        where = _first_not_finite(value, self.tokens)
        if where is not None:
            place = f"row {where[0]}" + (f", column {where[1]}" if len(where) == 2 else "")
            raise MethodError(
                f"{name} has {float(value[where])} at {place}, which holds a valid token; "
                "it must be finite there"
            )
        return value

    def _check_shape(self, name: str, value: torch.Tensor, ndims: tuple[int, ...]) -> None:
        shape = tuple(self.response_mask.shape)
        if value.ndim not in ndims or tuple(value.shape) != shape[: value.ndim]:
            expected = " or ".join("(B,)" if ndim == 1 else "(B, T)" for ndim in ndims)
            raise MethodError(
                f"{name} must be {expected}, but its shape is {_shape(value)} while the shape of "
                f"response_mask is {shape}"
            )

    def _checked_final_output(self, value: Any) -> torch.Tensor:
        final_B = _tensor("final_output", value)
        self._check_shape("final_output", final_B, ndims=(1,))
        size = final_B.shape[0]
        if final_B.is_floating_point() or not bool(((final_B >= 0) & (final_B < size)).all()):
            raise MethodError(f"final_output must hold row numbers from 0 to {size - 1}")
        final_B = final_B.to(torch.int64)
        wrong = (final_B[final_B] != final_B) | (self.group_index[final_B] != self.group_index)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise MethodError(
                f"final_output of row {row} is row {int(final_B[row])}, which is no last output of "
                "the same group: a last output names itself and shares the group of its rows"
            )
        return final_B


@dataclass(frozen=True, kw_only=True, eq=False)
class Reweighted:
    """What a method returns."""

    advantages: torch.Tensor
    """(B, T) float32, 0 where the mask is 0."""
    metrics: dict[str, float]
    """The same keys at every call of a method, always finite."""
    loss_fields: dict[str, torch.Tensor] = field(default_factory=dict)
    """Fields that a registered loss needs later; their first dimension is B."""


def _tensor(name: str, value: Any) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise MethodError(f"{name} is not numeric: {error}") from error
    if tensor.is_complex():
        raise MethodError(f"{name} is complex; it must be real")
    return tensor


def _floating(value: torch.Tensor) -> torch.Tensor:
    """Whole numbers and booleans are values too."""
    return value if value.is_floating_point() else value.to(torch.get_default_dtype())


def _shape(value: torch.Tensor) -> tuple[int, ...]:
    return tuple(value.shape)


def _first_not_finite(value: torch.Tensor, tokens: stats.Tokens) -> tuple[int, ...] | None:
    """Return the index of the first nan or inf at a valid position; None where there is none."""
    # One number tells whether to look closer, without a temporary of the field's size.
    if bool(value.sum().isfinite()):
        return None
    if value.ndim == 1:
        wrong_B = (tokens.count > 0) & ~value.isfinite()
        return (int(wrong_B.nonzero()[0]),) if bool(wrong_B.any()) else None
    for rows in stats.row_slices(value):
        wrong_rT = tokens.mask[rows] & ~value[rows].isfinite()
        if bool(wrong_rT.any()):
            row, column = (int(i) for i in wrong_rT.nonzero()[0])
            return rows.start + row, column
    return None


def _group_codes(group: Any, size: int) -> tuple[torch.Tensor, int]:
    """Return the (B,) codes of the groups, in the order of first appearance, and their number."""
    try:
        ids = list(group.tolist() if isinstance(group, torch.Tensor | np.ndarray) else group)
    except TypeError as error:
        raise MethodError(f"group must hold a prompt id for every row: {error}") from error
    if len(ids) != size:
        raise MethodError(f"group has {len(ids)} entries, but rewards has {size}")
    try:
        codes_B, prompts = _codes(ids)
    except TypeError as error:
        raise MethodError(f"group must hold hashable prompt ids: {error}") from error
    for code, prompt in enumerate(prompts):
        if prompt is None or not _equals_itself(prompt):
            row = int((codes_B == code).nonzero()[0])
            raise MethodError(f"group has {prompt} in row {row}; every row needs a prompt id")
    return codes_B, len(prompts)


def _equals_itself(value: Any) -> bool:
    """False for nan, and for pandas' NA, whose comparison has no truth value."""
    try:
        return bool(value == value)
    except TypeError:
        return False


def _codes(ids: Iterable[Any]) -> tuple[torch.Tensor, list[Any]]:
    """Number the distinct ids in the order of first appearance: (B,) int64, and those ids."""
    code: dict[Any, int] = {}
    codes_B = torch.tensor([code.setdefault(i, len(code)) for i in ids], dtype=torch.int64)
    return codes_B, list(code)
