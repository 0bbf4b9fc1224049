"""Which of our methods a launch selects, read from verl's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_covgrpo import registry
from verl_covgrpo.errors import MethodError
from verl_covgrpo.registry import Method

MARKER = "method"
"""`algorithm.method`, set by each method YAML: tells an override that beat the YAML."""


@dataclass(frozen=True)
class Selection:
    """The methods behind `algorithm.adv_estimator` and `policy_loss.loss_mode`, where ours."""

    estimator: type[Method] | None
    loss: type[Method] | None

    def __bool__(self) -> bool:
        return self.estimator is not None or self.loss is not None

    @property
    def methods(self) -> tuple[type[Method], ...]:
        """The selected methods, each once (one method may occupy both settings)."""
        chosen = (self.estimator, self.loss)
        return tuple(dict.fromkeys(method for method in chosen if method is not None))


def policy_loss_config(config: DictConfig) -> Any:
    return config.actor_rollout_ref.actor.get("policy_loss") or OmegaConf.create({})


def selection(config: DictConfig) -> Selection:
    """Return what `config`, verl's whole configuration, selects of ours."""
    estimator_name = str(config.algorithm.adv_estimator)
    loss_name = str(policy_loss_config(config).get("loss_mode"))
    return Selection(
        estimator=_occupying("adv_estimator", estimator_name),
        loss=_occupying("loss_mode", loss_name),
    )


def _occupying(setting: str, value: str) -> type[Method] | None:
    for name in registry.names():
        method = registry.get(name)
        if getattr(method, setting) == value:
            return method
    return None


def loss_only(method: type[Method]) -> bool:
    return method.adv_estimator is None


def parameters(method: type[Method]) -> dict[str, Any]:
    """The parameters a launch may set, with their defaults; a loss takes the launch's own base."""
    settable = registry.parameters(method.name)
    if loss_only(method):
        settable.pop("base")
    return settable


def section(method: type[Method]) -> str:
    """Where a launch sets the parameters."""
    if loss_only(method):
        return "actor_rollout_ref.actor.policy_loss"
    return f"algorithm.{method.name}"


def build(method: type[Method], config: DictConfig) -> Method:
    """Return the method with the parameters that `config` gives it.

    Raises:
        MethodError: an unknown parameter, a wrong type or a value out of range.
    """
    settable = parameters(method)
    if loss_only(method):
        given = {k: v for k, v in policy_loss_config(config).items() if k in settable}
    else:
        given_config = config.algorithm.get(method.name)
        if given_config is not None and not OmegaConf.is_dict(given_config):
            raise MethodError(
                f"{section(method)} is {given_config!r}: it holds the method's parameters, "
                f"for example +{section(method)}.{next(iter(settable))}=VALUE"
            )
        given = dict(given_config or {})
        for key in set(given) - set(settable):
            registry.build(method.name, **{str(key): given[key]})  # raises, with the nearest name
            raise MethodError(f"{section(method)}.{key} cannot be set: use algorithm.{key}")
    norm_by_std = bool(config.algorithm.get("norm_adv_by_std_in_grpo", True))
    return registry.build(method.name, norm_adv_by_std_in_grpo=norm_by_std, **given)
