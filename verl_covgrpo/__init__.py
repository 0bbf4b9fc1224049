"""Covariance-aware GRPO and its family of token-level repairs, as a plugin for verl.

The public API. A method never sees verl: it turns a `Rollout` into a `Reweighted`.

    rollout = Rollout(rewards=..., response_mask=..., group=..., old_log_probs=...)
    method = build("covgrpo", scope="batch")
    result = method(rollout)
    result.advantages, result.metrics, result.loss_fields

Everything is loaded on first use, so that importing the package alone does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from verl_covgrpo.errors import MethodError

if TYPE_CHECKING:
    from verl_covgrpo.registry import build
    from verl_covgrpo.registry import names as methods
    from verl_covgrpo.rollout import Reweighted, Rollout

    __version__: str

__all__ = ["MethodError", "Reweighted", "Rollout", "__version__", "build", "methods"]

_PUBLIC = {
    "Reweighted": ("verl_covgrpo.rollout", "Reweighted"),
    "Rollout": ("verl_covgrpo.rollout", "Rollout"),
    "build": ("verl_covgrpo.registry", "build"),
    "methods": ("verl_covgrpo.registry", "names"),
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    if name in _PUBLIC:
        module, attribute = _PUBLIC[name]
        return getattr(import_module(module), attribute)
    if name == "__version__":
        return _version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("verl-covgrpo")
    except PackageNotFoundError:
        return "0.0.0+unknown"
