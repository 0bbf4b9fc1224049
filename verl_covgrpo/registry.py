"""Name -> method: its parameters, the fields it needs, and the settings of verl it occupies.

A method is one file in `verl_covgrpo.advantages` (it reweights advantages) or `verl_covgrpo.losses`
(it changes the policy loss). The file defines a frozen dataclass, registered under its name:

    @register("halve")
    @dataclass(frozen=True, kw_only=True)
    class Halve(Method):
        adv_estimator = "halve"
        factor: float = parameter(0.5, low=0.0, high=1.0)

        def reweight(self, rollout: Rollout) -> Reweighted: ...
"""

from __future__ import annotations

import dataclasses
import math
import pkgutil
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from verl_covgrpo.base import grpo
from verl_covgrpo.errors import MethodError, did_you_mean
from verl_covgrpo.micro_batch import Loss, MicroBatch
from verl_covgrpo.rollout import Reweighted, Rollout
from verl_covgrpo.stats import one_thread

_PACKAGES = ("verl_covgrpo.advantages", "verl_covgrpo.losses")
_METHODS: dict[str, type[Method]] = {}
_M = TypeVar("_M", bound="type[Method]")


def parameter(
    default: Any, *, low: float | None = None, high: float | None = None, of_loss: bool = False
) -> Any:
    """Declare a numeric parameter that must lie in [low, high].

    `of_loss` marks one that the policy loss reads, in a method that changes the advantages too.
    """
    metadata = {"low": low, "high": high, "of_loss": of_loss}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Method:
    """Turn a `Rollout` into advantages, metrics and the fields a loss needs later.

    The dataclass fields are the parameters. A method without memory depends on the rollout alone.
    """

    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()
    """The optional `Rollout` fields the method reads."""
    adv_estimator: ClassVar[str | None] = None
    """The value of `algorithm.adv_estimator` that selects the method; None where it has none."""
    loss_mode: ClassVar[str | None] = None
    """The value of `policy_loss.loss_mode` that selects the method; None where it has none."""
    memory: ClassVar[bool] = False
    """Whether `state_dict` has to be saved with a checkpoint."""
    own_kl: ClassVar[bool] = False
    """Whether the loss has a KL term of its own, beside which verl's is refused."""

    base: str = "grpo"
    """The advantage estimator under the weighting."""
    norm_adv_by_std_in_grpo: bool = dataclasses.field(default=True, metadata={"from_verl": True})
    """verl's own setting of the same name (False: Dr. GRPO), passed in, not set per method."""

    @torch.no_grad()
    def __call__(self, rollout: Rollout) -> Reweighted:
        """Return what the method makes of the rollout.

        The metric `seconds` is the time this took, the base included.

        Raises:
            MethodError: a field the method needs is missing, or its base is not computed here.
        """
        start = time.perf_counter()
        for field in self.needs:
            rollout.require(field)
        with one_thread():
            result = self.reweight(rollout)
        result.metrics["seconds"] = time.perf_counter() - start
        return result

    def reweight(self, rollout: Rollout) -> Reweighted:
        """Compute the method. Each method implements this."""
        raise NotImplementedError

    def policy_loss(self, micro: MicroBatch) -> Loss:
        """Compute the loss of a micro-batch. Each method with a `loss_mode` implements this."""
        raise NotImplementedError

    def base_advantages(self, rollout: Rollout) -> torch.Tensor:
        """Return the advantages under the weighting: (B, 1), one per response, or (B, T).

        Those of the rollout are used where it has any. A response without a valid token has 0 in
        (B, 1); in (B, T) there may be anything where the mask is 0.

        Raises:
            MethodError: the base is not `grpo` and the rollout has no base advantages.
        """
        A = rollout.base_advantages
        if A is None:
            if self.base != "grpo":
                raise MethodError(
                    f"{self.name}: the base {self.base!r} is computed by verl and filled in by the "
                    "verl hook; outside a run pass base_advantages to the Rollout, or use "
                    "base='grpo'"
                )
            A = _grpo_of_final_outputs(rollout, self.norm_adv_by_std_in_grpo)
        if A.ndim == 2 and A.shape[1] > 1:
            return A
        return torch.where(rollout.lengths > 0, A.flatten(), 0).unsqueeze(1)

    def state_dict(self) -> dict[str, Any]:
        """Return what the method remembers between batches; {} for one without memory."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state that `state_dict` returned.

        Raises:
            MethodError: the method has no memory and the state is not empty.
        """
        if state:
            raise MethodError(
                f"{self.name} has no memory, but the saved state has {sorted(state)}: it was saved "
                "by another method"
            )


def _grpo_of_final_outputs(rollout: Rollout, norm_by_std: bool) -> torch.Tensor:
    """Return verl's grpo, (B,): over each session's last output, given to all its outputs."""
    if rollout.final_output is None:
        return grpo(rollout.rewards, rollout.group_index, rollout.num_groups, norm_by_std)
    final_rows, session = rollout.sessions
    advantages = grpo(
        rollout.rewards[final_rows],
        rollout.group_index[final_rows],
        rollout.num_groups,
        norm_by_std,
    )
    # verl reads the session's value at a valid token of the last output: without one it is 0.
    advantages = torch.where(rollout.lengths[final_rows] > 0, advantages, 0)
    return advantages[session]


def register(name: str) -> Callable[[_M], _M]:
    """Class decorator: make a method available to `build` under `name`.

    Raises:
        MethodError: another class has that name.
    """

    def decorate(cls: _M) -> _M:
        taken = _METHODS.get(name)
        if taken is not None and (taken.__module__, taken.__qualname__) != (
            cls.__module__,
            cls.__qualname__,
        ):
            raise MethodError(f"two methods are named {name!r}: {taken!r} and {cls!r}")
        cls.name = name
        _METHODS[name] = cls
        return cls

    return decorate


@cache
def load_all() -> None:
    """Import every method file, once."""
    for package_name in _PACKAGES:
        package = import_module(package_name)
        for module in pkgutil.iter_modules(package.__path__):
            import_module(f"{package_name}.{module.name}")


def names() -> tuple[str, ...]:
    """Return the names of all methods, sorted."""
    load_all()
    return tuple(sorted(_METHODS))


def get(name: str) -> type[Method]:
    """Return the class of a method.

    Raises:
        MethodError: there is no such method; the nearest name is given.
    """
    load_all()
    if name not in _METHODS:
        hint = did_you_mean(name, _METHODS)
        raise MethodError(f"unknown method {name!r}{hint}; known: {', '.join(names())}")
    return _METHODS[name]


def parameters(name: str) -> dict[str, Any]:
    """Return the parameters a user may set, with their defaults."""
    return {
        field.name: _default(field)
        for field in _fields(get(name))
        if not field.metadata.get("from_verl")
    }


def loss_parameters(name: str) -> dict[str, Any]:
    """Return those that a launch sets in `policy_loss`, with their defaults.

    All of a method that changes the loss alone; it stands on the launch's own estimator.
    """
    method = get(name)
    of_loss = {field.name for field in _fields(method) if field.metadata.get("of_loss")}
    return {
        key: default
        for key, default in parameters(name).items()
        if key in of_loss or (method.adv_estimator is None and key != "base")
    }


def advantage_parameters(name: str) -> dict[str, Any]:
    """Return those that a launch sets in `algorithm.<name>`, with their defaults."""
    if get(name).adv_estimator is None:
        return {}
    of_loss = loss_parameters(name)
    return {key: value for key, value in parameters(name).items() if key not in of_loss}


def build(name: str, /, **params: Any) -> Method:
    """Return the method `name` with the given parameters.

    Raises:
        MethodError: unknown method or parameter (the nearest name is given), a value of the wrong
            type, outside its range or not among its choices.
    """
    cls = get(name)
    fields = {field.name: field for field in _fields(cls)}
    hints = get_type_hints(cls)
    for key in params:
        if key not in fields:
            raise MethodError(
                f"{name} has no parameter {key!r}{did_you_mean(key, fields)}; "
                f"it has: {', '.join(parameters(name))}"
            )
    checked = {
        key: _check(f"{name}.{key}", value, hints[key], fields[key].metadata)
        for key, value in params.items()
    }
    return cls(**checked)


def _fields(cls: type[Method]) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(cls) if field.init]


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _check(where: str, value: Any, hint: Any, metadata: Any) -> Any:
    """Return the value in the declared type, or raise."""
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            near = did_you_mean(str(value), [str(choice) for choice in choices])
            raise MethodError(
                f"{where} is {value!r}{near}; choose one of: {', '.join(map(repr, choices))}"
            )
        return value
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if float in kinds and type(value) is int:
        value = float(value)
    # type(), not isinstance(): True is an int to Python, and never meant as one here.
    if type(value) not in kinds:
        expected = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise MethodError(f"{where} is {value!r} ({type(value).__name__}); it must be {expected}")
    if isinstance(value, float) and math.isnan(value):
        raise MethodError(f"{where} is nan; it must be a number")
    low, high = metadata.get("low"), metadata.get("high")
    if value is not None and (
        (low is not None and value < low) or (high is not None and value > high)
    ):
        raise MethodError(f"{where} is {value!r}; it must lie in [{low}, {high}]")
    return value
