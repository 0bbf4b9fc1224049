"""Which of our methods a launch selects, read from verl's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_covgrpo import registry
from verl_covgrpo.errors import MethodError
from verl_covgrpo.registry import Method

MARKER = "method"
"""`algorithm.method`, set by each method YAML: tells an override that beat the YAML."""


@cache
def baselines() -> frozenset[str]:
    """The values of `+method=` that stand for settings of verl's own."""
    yamls = files("verl_covgrpo.conf").joinpath("method").iterdir()
    stems = {path.name.removesuffix(".yaml") for path in yamls if path.name.endswith(".yaml")}
    return frozenset(stems - set(registry.names()))


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


POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"
CONFIG_CLASSES = "verl_covgrpo.verl_hooks.loss_config"


def loss_only(method: type[Method]) -> bool:
    return method.adv_estimator is None


def section(method: type[Method]) -> str:
    """Where a launch sets the parameters of the advantages; of the loss, where it has no others."""
    return POLICY_LOSS if loss_only(method) else f"algorithm.{method.name}"


def target(method: type[Method]) -> str:
    """The value of `policy_loss._target_` that lets verl take the method's loss parameters."""
    return f"{CONFIG_CLASSES}.{method.name}"


def build(method: type[Method], config: DictConfig) -> Method:
    """Return the method with the parameters that `config` gives it.

    Raises:
        MethodError: an unknown parameter, a wrong type or a value out of range.
    """
    given: dict[str, Any] = {}
    if not loss_only(method):
        settable = registry.advantage_parameters(method.name)
        given_config = config.algorithm.get(method.name)
        if given_config is not None and not OmegaConf.is_dict(given_config):
            raise MethodError(
                f"{section(method)} is {given_config!r}: it holds the method's parameters, "
                f"for example +{section(method)}.{next(iter(settable))}=VALUE"
            )
        given = dict(given_config or {})
        for key in set(given) - set(settable):
            if key in registry.loss_parameters(method.name):
                raise MethodError(
                    f"{section(method)}.{key} is read by the loss: set {POLICY_LOSS}.{key}"
                )
            registry.build(method.name, **{str(key): given[key]})  # raises, with the nearest name
            raise MethodError(f"{section(method)}.{key} cannot be set: use algorithm.{key}")
    norm_by_std = bool(config.algorithm.get("norm_adv_by_std_in_grpo", True))
    given.update(given_to_loss(method, policy_loss_config(config)))
    return registry.build(method.name, norm_adv_by_std_in_grpo=norm_by_std, **given)


def given_to_loss(method: type[Method], policy_loss: Any) -> dict[str, Any]:
    """Return the method's loss parameters as verl's `policy_loss` configuration has them."""
    if policy_loss.get("loss_mode") != method.loss_mode:
        return {}
    absent = object()
    values = {key: policy_loss.get(key, absent) for key in registry.loss_parameters(method.name)}
    return {key: value for key, value in values.items() if value is not absent}
