"""Refuses an impossible selection in the driver, before Ray starts: one line, and what mends it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_covgrpo import registry
from verl_covgrpo.advantages.dagrpo import UNSET
from verl_covgrpo.errors import MethodError, did_you_mean
from verl_covgrpo.registry import Method
from verl_covgrpo.seams import replace_function, require_all
from verl_covgrpo.verl_hooks import base, selection
from verl_covgrpo.verl_hooks.agent_loops import DEMONSTRATION
from verl_covgrpo.verl_hooks.selection import MARKER, policy_loss_config

ESTIMATOR = "algorithm.adv_estimator"
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"

REFUSED_FROM = 0.75
"""How alike (difflib's ratio) a name unknown to verl must be to one of ours to be taken for a slip:
covgrop is, sgrpo, which somebody may register later, is not."""


def check(config: DictConfig, use_reference_policy: bool) -> None:
    """Check a launch as far as our methods are concerned.

    Args:
        config: verl's whole configuration.
        use_reference_policy: what verl derived from it.

    Raises:
        MethodError: the first thing found wrong, and the setting that mends it.
    """
    _check_marker(config)
    _check_names(config)
    _check_demonstrations(config)
    selected = selection.selection(config)
    _check_sections(config, selected)
    if not selected:
        return
    require_all()
    _check_single_form(selected)
    for method in selected.methods:
        _check_registered(method)
        _check_trainer(config, method, use_reference_policy)
        instance = selection.build(method, config)
        if getattr(instance, "score_key", "set") is None:
            raise MethodError(f"{selection.section(method)}.score_key is not set: {UNSET}")
        if not selection.loss_only(method):
            base.check(instance.base, f"{selection.section(method)}.base")


def _check_marker(config: DictConfig) -> None:
    """A command-line value beats a method's YAML in any order; the YAML's marker tells."""
    marker = config.algorithm.get(MARKER)
    if marker is None:
        return
    if marker not in registry.names():
        if hint := did_you_mean(str(marker), registry.names(), cutoff=REFUSED_FROM):
            raise MethodError(f"algorithm.{MARKER}: unknown method {str(marker)!r}{hint}")
        return
    method = registry.get(str(marker))
    for setting, wanted, found in (
        (ESTIMATOR, method.adv_estimator, str(config.algorithm.adv_estimator)),
        (LOSS, method.loss_mode, str(policy_loss_config(config).get("loss_mode"))),
    ):
        if wanted is not None and found != wanted:
            raise MethodError(
                f"+method={marker} sets {setting}={wanted}, but this launch sets "
                f"{setting}={found}, which beats it: delete {setting}={found}"
            )


def _check_demonstrations(config: DictConfig) -> None:
    """A demonstration was not sampled: what corrects for sampling has nothing to go by."""
    agent = config.actor_rollout_ref.rollout.get("agent") or {}
    if agent.get("default_agent_loop") != DEMONSTRATION:
        return
    correction = config.algorithm.get("rollout_correction") or {}
    for setting in ("rollout_is", "rollout_rs", "bypass_mode"):
        if correction.get(setting):
            raise MethodError(
                f"algorithm.rollout_correction.{setting}={correction[setting]} needs the rollout's "
                f"log-probs, which a demonstration has not: delete it, or {DEMONSTRATION}"
            )


def _check_names(config: DictConfig) -> None:
    """A name close to one of ours and unknown to verl is a slip; any other is left to verl.

    So is the name of a method in a setting where it goes by another, or by none.
    """
    from verl.trainer.ppo import core_algos

    methods = [registry.get(name) for name in registry.names()]
    for setting, found, known, ours in (
        (
            ESTIMATOR,
            str(config.algorithm.adv_estimator),
            getattr(core_algos, "ADV_ESTIMATOR_REGISTRY", None),
            [m.adv_estimator for m in methods if m.adv_estimator],
        ),
        (
            LOSS,
            str(policy_loss_config(config).get("loss_mode")),
            getattr(core_algos, "POLICY_LOSS_REGISTRY", None),
            [m.loss_mode for m in methods if m.loss_mode],
        ),
    ):
        if known is None or found in known or found in ours or found in selection.baselines():
            continue
        key = found.lower()
        if key in registry.names() and key not in ours:
            raise MethodError(f"{setting}={found} is no value of that setting: use +method={key}")
        if hint := did_you_mean(key, ours, cutoff=REFUSED_FROM):
            raise MethodError(f"{setting}={found} is unknown{hint}")


def _check_sections(config: DictConfig, selected: selection.Selection) -> None:
    """Parameters of a method that nothing selects would be ignored."""
    algorithm: dict[Any, Any] = OmegaConf.to_container(config.algorithm, resolve=False)  # type: ignore[assignment]
    sections = [m for m in map(registry.get, registry.names()) if not selection.loss_only(m)]
    names = [method.name for method in sections]
    for method in sections:
        if method.name in config.algorithm and method not in selected.methods:
            raise MethodError(
                f"{selection.section(method)} is set, but nothing selects {method.name}: add "
                f"+method={method.name}, or delete it"
            )
    for key in set(algorithm) - set(names) - _algorithm_keys():
        hint = did_you_mean(str(key), names, cutoff=REFUSED_FROM)
        if isinstance(algorithm[key], dict) and hint:
            raise MethodError(f"algorithm.{key} is unknown{hint}")
    _check_loss_section(policy_loss_config(config))


def _check_loss_section(loss: Any) -> None:
    """A loss parameter reaches the loss only through the configuration class that declares it."""
    methods = [method for method in map(registry.get, registry.names()) if method.loss_mode]
    targets = {selection.target(method): method for method in methods}
    chosen = targets.get(str(loss.get("_target_")))
    if chosen is not None and loss.get("loss_mode") != chosen.loss_mode:
        raise MethodError(
            f"{selection.POLICY_LOSS}._target_ is that of {chosen.name}, but {LOSS}="
            f"{loss.get('loss_mode')}: set {LOSS}={chosen.loss_mode}, or delete _target_"
        )
    chosen_parameters = registry.loss_parameters(chosen.name) if chosen else {}
    for key in set(loss) - {"_target_"} - _policy_loss_keys() - set(chosen_parameters):
        owners = [method for method in methods if key in registry.loss_parameters(method.name)]
        if chosen is None and owners:
            method = next((m for m in owners if m.loss_mode == loss.get("loss_mode")), owners[0])
            raise MethodError(
                f"{selection.POLICY_LOSS}.{key} is a parameter of {method.name}: add "
                f"+method={method.name}, or set "
                f"{selection.POLICY_LOSS}._target_={selection.target(method)}"
            )
        if chosen is not None:
            raise MethodError(
                f"{selection.POLICY_LOSS}.{key} is unknown"
                f"{did_you_mean(str(key), chosen_parameters)}"
            )


def _algorithm_keys() -> set[str]:
    from verl.trainer.config import AlgoConfig

    return set(AlgoConfig.__dataclass_fields__)


def _policy_loss_keys() -> set[str]:
    from verl.workers.config import PolicyLossConfig

    return set(PolicyLossConfig.__dataclass_fields__)


def _check_single_form(selected: selection.Selection) -> None:
    estimator, loss = selected.estimator, selected.loss
    if estimator is None or loss is None or estimator is loss:
        return
    if estimator.adv_estimator == loss.loss_mode:
        raise MethodError(
            f"{ESTIMATOR}={estimator.adv_estimator} and {LOSS}={loss.loss_mode} together would "
            f"weight every token twice: keep one of them (for the loss, {ESTIMATOR}=grpo)"
        )


def _check_registered(method: type[Method]) -> None:
    """Verl overwrites a loss of the same name without a word, and another plugin may be faster."""
    from verl.trainer.ppo import core_algos

    for setting, kind, name, registered in (
        (ESTIMATOR, "estimator", method.adv_estimator, core_algos.ADV_ESTIMATOR_REGISTRY),
        (LOSS, "loss", method.loss_mode, core_algos.POLICY_LOSS_REGISTRY),
    ):
        if name is None:
            continue
        found = registered.get(name)
        if found is not None and getattr(found, "verl_covgrpo_method", None) != method.name:
            raise MethodError(
                f"{setting}={name}: another {kind} is registered as {name!r} (from "
                f"{found.__module__}): remove what registers it, or rename that one"
            )


def _check_trainer(config: DictConfig, method: type[Method], use_reference_policy: bool) -> None:
    if not config.trainer.get("use_v1", True):
        raise MethodError(
            f"{method.name} needs the V1 trainer, which hands over the whole batch: set "
            "trainer.use_v1=True"
        )
    correction = config.algorithm.get("rollout_correction") or {}
    if correction.get("bypass_mode", False) and {"old_log_probs", "entropy"} & set(method.needs):
        raise MethodError(
            f"{method.name} needs the trainer's own log-probs, which bypass mode replaces by the "
            "rollout's: set algorithm.rollout_correction.bypass_mode=False"
        )
    if method.own_kl and config.actor_rollout_ref.actor.kl_loss_coef > 0:
        raise MethodError(
            f"{method.name} has a KL term of its own: set actor_rollout_ref.actor.kl_loss_coef=0"
        )
    if "ref_log_probs" in method.needs and not use_reference_policy:
        raise MethodError(
            f"{method.name} needs a reference policy: set "
            "actor_rollout_ref.actor.use_kl_loss=True (and kl_loss_coef=0 where no KL is wanted)"
        )


def _wrap_validate_config(original: Callable[..., Any]) -> Callable[..., Any]:
    def validate_config(config: DictConfig, use_reference_policy: bool, use_critic: bool) -> Any:
        try:
            check(config, use_reference_policy)
        except MethodError as error:
            # SystemExit: Hydra prints a traceback around anything else.
            raise SystemExit(f"verl-covgrpo: {error}") from None
        return original(config, use_reference_policy, use_critic)

    return validate_config


def install() -> None:
    replace_function(
        "verl.utils.config",
        "validate_config",
        _wrap_validate_config,
        parameters=("config", "use_reference_policy", "use_critic"),
    )
