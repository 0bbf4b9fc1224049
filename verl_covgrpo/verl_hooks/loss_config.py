"""verl's PolicyLossConfig with the parameters of one of our losses.

`policy_loss._target_: verl_covgrpo.verl_hooks.loss_config.covgrpo_loss` names the class for the
method `covgrpo_loss`; it is made from the method's own parameters, so that each is declared once.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any


@cache
def _config_class(name: str) -> type[Any]:
    from verl.workers.config import PolicyLossConfig

    from verl_covgrpo import registry

    parameters = registry.loss_parameters(name)
    fields = [(key, Any, dataclasses.field(default=default)) for key, default in parameters.items()]
    return dataclasses.make_dataclass(
        name, fields, bases=(PolicyLossConfig,), namespace={"__module__": __name__}
    )


def __getattr__(name: str) -> type[Any]:
    if name.startswith("_"):
        raise AttributeError(name)
    from verl_covgrpo.errors import MethodError

    try:
        return _config_class(name)
    except MethodError as error:
        raise AttributeError(str(error)) from error
