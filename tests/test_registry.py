"""Names, parameters and their errors; and what the package costs to import."""

import subprocess
import sys
from dataclasses import dataclass
from typing import Literal

import pytest
import torch

import verl_covgrpo
from verl_covgrpo import MethodError, Reweighted, Rollout, build, registry
from verl_covgrpo.errors import did_you_mean
from verl_covgrpo.registry import Method, parameter, register


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> type[Method]:
    """A method with a parameter of every kind."""
    registry.load_all()
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))

    @register("plain")
    @dataclass(frozen=True, kw_only=True)
    class Plain(Method):
        needs = ("entropy",)
        adv_estimator = "plain"

        kind: Literal["hard", "soft"] = "hard"
        factor: float = parameter(0.5, low=0.0, high=1.0)
        steps: int = parameter(10, low=1)
        inclusive: bool = True
        key: str | None = None

        def reweight(self, rollout: Rollout) -> Reweighted:
            return Reweighted(advantages=rollout.require("entropy"), metrics={})

    return Plain


def rollout(**changes: object) -> Rollout:
    given = {"rewards": torch.zeros(2), "response_mask": torch.ones(2, 3), "group": [0, 0]}
    return Rollout(**given | changes)


def test_methods_are_found_in_their_files() -> None:
    assert {"covgrpo", "covgrpo_loss"} <= set(verl_covgrpo.methods())
    assert list(verl_covgrpo.methods()) == sorted(verl_covgrpo.methods())


def test_what_a_method_occupies() -> None:
    cov, loss = registry.get("covgrpo"), registry.get("covgrpo_loss")
    assert (cov.name, cov.adv_estimator, cov.loss_mode) == ("covgrpo", "covgrpo", None)
    assert (loss.name, loss.adv_estimator, loss.loss_mode) == ("covgrpo_loss", None, "covgrpo")
    assert cov.needs == loss.needs == ("old_log_probs",)
    assert not cov.memory and not loss.memory


def test_settable_parameters() -> None:
    assert registry.parameters("covgrpo") == {"base": "grpo", "scope": "batch"}
    assert build("covgrpo", norm_adv_by_std_in_grpo=False).norm_adv_by_std_in_grpo is False


def test_values_of_every_kind(plain: type[Method]) -> None:
    method = build("plain", kind="soft", factor=1, steps=3, inclusive=False, key="judge")
    assert method == plain(kind="soft", factor=1.0, steps=3, inclusive=False, key="judge")
    assert type(method.factor) is float
    assert build("plain", key=None) == plain()
    assert registry.parameters("plain") == {
        "base": "grpo",
        "kind": "hard",
        "factor": 0.5,
        "steps": 10,
        "inclusive": True,
        "key": None,
    }


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"scop": "group"}, "no parameter 'scop' .did you mean 'scope'"),
        ({"scope": "groups"}, "scope is 'groups' .did you mean 'group'.*'batch', 'group'"),
        ({"scope": True}, "choose one of"),
        ({"base": 1}, "base is 1 .int.*str"),
    ],
)
def test_wrong_parameters_of_covgrpo(params: dict, match: str) -> None:
    with pytest.raises(MethodError, match=match):
        build("covgrpo", **params)


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"factor": True}, "factor is True .bool.*float"),
        ({"factor": "0.5"}, "factor is '0.5' .str.*float"),
        ({"factor": 1.5}, r"factor is 1.5; it must lie in \[0.0, 1.0\]"),
        ({"factor": float("nan")}, "factor is nan"),
        ({"steps": True}, "steps is True .bool.*int"),
        ({"steps": 2.0}, "steps is 2.0 .float.*int"),
        ({"steps": 0}, "steps is 0; it must lie in"),
        ({"inclusive": 1}, "inclusive is 1 .int.*bool"),
        ({"key": 1}, "key is 1 .int.*str or None"),
    ],
)
def test_wrong_parameters(plain: type[Method], params: dict, match: str) -> None:
    with pytest.raises(MethodError, match=match):
        build("plain", **params)


def test_an_unknown_method_gets_the_nearest_name() -> None:
    with pytest.raises(MethodError, match=r"unknown method 'covgrop' .did you mean 'covgrpo'"):
        build("covgrop")
    assert did_you_mean("zzz", ["covgrpo"]) == ""


def test_two_methods_of_one_name(plain: type[Method]) -> None:
    class Other(Method):
        pass

    with pytest.raises(MethodError, match="two methods are named 'plain'"):
        register("plain")(Other)


def test_a_missing_field_stops_the_method(plain: type[Method]) -> None:
    with pytest.raises(MethodError, match="needs entropy"):
        build("plain")(rollout())
    result = build("plain")(rollout(entropy=torch.ones(2, 3)))
    assert result.metrics["seconds"] >= 0


def test_another_base_comes_from_outside() -> None:
    method = build("covgrpo", base="rloo")
    with pytest.raises(MethodError, match=r"'rloo'.*base_advantages"):
        method.base_advantages(rollout())
    given = torch.tensor([1.0, 2.0])
    found = method.base_advantages(rollout(base_advantages=given))
    assert torch.equal(found, given.unsqueeze(1))


def test_methods_without_memory_take_no_state() -> None:
    method = build("covgrpo")
    assert method.state_dict() == {}
    method.load_state_dict({})
    with pytest.raises(MethodError, match=r"no memory.*\['history'\]"):
        method.load_state_dict({"history": [0.5]})


def test_parameters_are_frozen() -> None:
    with pytest.raises(AttributeError):
        build("covgrpo").scope = "group"  # type: ignore[misc]


def test_importing_the_package_is_free_and_silent() -> None:
    code = (
        "import sys, verl_covgrpo; "
        "print([name for name in ('torch', 'verl', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n" and done.stderr == ""


def test_the_core_does_not_import_verl() -> None:
    code = (
        "import sys, verl_covgrpo; verl_covgrpo.build('covgrpo'); "
        "print(verl_covgrpo.methods() == verl_covgrpo.registry.names(), 'verl' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"


def test_public_names() -> None:
    assert set(dir(verl_covgrpo)) >= {"Rollout", "Reweighted", "build", "methods", "MethodError"}
    assert verl_covgrpo.__version__
    with pytest.raises(AttributeError, match="no attribute 'rolout'"):
        verl_covgrpo.rolout  # noqa: B018
