"""Selecting a method with verl's own Hydra configuration."""

from __future__ import annotations

from pathlib import Path

import hydra
import pytest
from omegaconf import OmegaConf
from verl_fixtures import compose, flat, validate

from verl_covgrpo import methods, registry
from verl_covgrpo.verl_hooks import selection

ROOT = Path(__file__).parents[1]
YAMLS = ROOT / "verl_covgrpo" / "conf" / "method"
RECIPE = ROOT / "recipes" / "cpu_demo"

SETTINGS = {"dagrpo": ["algorithm.dagrpo.score_key=judge"]}
"""What a method needs besides its key."""
BASELINES = ("grpo", "dr_grpo", "dapo_clip_higher", "clip_cov", "kl_cov")

pytestmark = pytest.mark.verl


@pytest.mark.parametrize("method", methods())
def test_a_method_yaml_sets_what_it_says_and_nothing_else(method: str) -> None:
    plain, chosen = flat(compose()), flat(compose(f"+method={method}"))
    changed = {key: chosen[key] for key in chosen if plain.get(key, "absent") != chosen[key]}
    yaml = flat(OmegaConf.load(YAMLS / f"{method}.yaml"))
    assert changed == {k: v for k, v in yaml.items() if plain.get(k, "absent") != v}
    assert all(chosen[key] == value for key, value in yaml.items())
    assert plain.keys() <= chosen.keys()


def test_composing_without_a_method_leaves_no_trace() -> None:
    assert not [key for key in flat(compose()) if "covgrpo" in key or key == "algorithm.method"]


def test_the_estimator_alone_selects_the_method() -> None:
    config = compose("algorithm.adv_estimator=covgrpo")
    validate(config)
    selected = selection.selection(config)
    assert (selected.estimator, selected.loss) == (registry.get("covgrpo"), None)
    assert selection.build(registry.get("covgrpo"), config) == registry.build("covgrpo")


def test_parameters_reach_the_method() -> None:
    config = compose(
        "algorithm.adv_estimator=covgrpo",
        "+algorithm.covgrpo.scope=group",
        "+algorithm.covgrpo.base=rloo",
        "algorithm.norm_adv_by_std_in_grpo=False",
    )
    validate(config)
    assert selection.build(registry.get("covgrpo"), config) == registry.build(
        "covgrpo", scope="group", base="rloo", norm_adv_by_std_in_grpo=False
    )


def test_parameters_of_the_loss_reach_the_method() -> None:
    config = compose("+method=covgrpo_loss", "actor_rollout_ref.actor.policy_loss.scope=group")
    validate(config)
    assert selection.build(registry.get("covgrpo_loss"), config) == registry.build(
        "covgrpo_loss", scope="group"
    )


def test_a_configuration_of_ones_own_in_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("mine.yaml").write_text(
        "hydra:\n  searchpath:\n    - pkg://verl.trainer.config\n"
        "defaults:\n  - ppo_trainer\n  - _self_\n"
    )
    with hydra.initialize_config_dir(str(tmp_path), version_base=None):
        config = hydra.compose("mine", overrides=["+method=covgrpo"])
    assert config.algorithm.adv_estimator == "covgrpo"


@pytest.mark.parametrize("method", ["", *methods()])
def test_the_recipe_passes_verls_own_validation(
    method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with hydra.initialize_config_dir(str(RECIPE), version_base=None):
        chosen = [f"+method={method}", *SETTINGS.get(method, ())] if method else []
        config = hydra.compose("cpu_demo", overrides=chosen)
    validate(config)
    assert "All configuration checks passed" in capsys.readouterr().out
    assert config.algorithm.get("method", "") == method
    assert config.actor_rollout_ref.actor.strategy == "fsdp2"


def test_every_method_has_a_yaml_of_its_name() -> None:
    assert {path.stem for path in YAMLS.glob("*.yaml")} == {*methods(), *BASELINES}


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_is_verls_own(name: str) -> None:
    config = compose(f"+method={name}")
    validate(config)
    assert not selection.selection(config)
    assert config.algorithm.adv_estimator == "grpo"
    assert "method" not in config.algorithm


@pytest.mark.parametrize("name", methods())
def test_a_method_yaml_shows_the_defaults_of_the_method(name: str) -> None:
    yaml, method = OmegaConf.load(YAMLS / f"{name}.yaml"), registry.get(name)
    of_advantages = OmegaConf.select(yaml, f"algorithm.{name}") or {}
    assert dict(of_advantages) == registry.advantage_parameters(name)
    of_loss = dict(OmegaConf.select(yaml, selection.POLICY_LOSS) or {})
    if method.loss_mode:
        assert of_loss.pop("_target_") == selection.target(method)
        assert of_loss.pop("loss_mode") == method.loss_mode
    assert of_loss == registry.loss_parameters(name)
    assert yaml.algorithm.method == name
    assert yaml.algorithm.get("adv_estimator") == method.adv_estimator
    assert YAMLS.joinpath(f"{name}.yaml").read_text().startswith("# @package _global_\n")


@pytest.mark.parametrize("name", methods())
def test_a_method_yaml_provides_what_the_method_needs(name: str) -> None:
    config = compose(f"+method={name}", *SETTINGS.get(name, ()))
    validate(config)
    if "ref_log_probs" in registry.get(name).needs:
        assert config.actor_rollout_ref.actor.use_kl_loss
        assert config.actor_rollout_ref.actor.kl_loss_coef == 0.0
