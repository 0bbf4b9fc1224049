"""What a launch is refused for, by verl's own `validate_config`, before Ray starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl_fixtures import RUNNABLE, child, compose, validate

from verl_covgrpo import registry
from verl_covgrpo.registry import Method
from verl_covgrpo.seams import SEAMS
from verl_covgrpo.verl_hooks import checks

pytestmark = pytest.mark.verl

YAMLS = sorted(path.stem for path in Path(checks.__file__).parents[1].glob("conf/method/*.yaml"))
LOSS = "actor_rollout_ref.actor.policy_loss"
TARGET = "verl_covgrpo.verl_hooks.loss_config.covgrpo_loss"


def refusal(*overrides: str) -> str:
    """Return the one line with which a launch is refused."""
    with pytest.raises(SystemExit) as exit_info:
        validate(compose(*overrides))
    message = str(exit_info.value.code)
    assert message.startswith("verl-covgrpo: ")
    assert "\n" not in message
    return message


REFUSED: dict[str, tuple[list[str], list[str]]] = {
    "estimator near ours": (
        ["algorithm.adv_estimator=covgrop"],
        ["algorithm.adv_estimator=covgrop is unknown", "did you mean 'covgrpo'"],
    ),
    "loss near ours": (
        [f"{LOSS}.loss_mode=cov_grpo"],
        [f"{LOSS}.loss_mode=cov_grpo is unknown", "did you mean 'covgrpo'"],
    ),
    "estimator that is only a key": (
        ["algorithm.adv_estimator=covgrpo_loss"],
        ["algorithm.adv_estimator=covgrpo_loss is no value", "use +method=covgrpo_loss"],
    ),
    "estimator that is a loss": (
        ["algorithm.adv_estimator=kl_cov_exact"],
        ["algorithm.adv_estimator=kl_cov_exact is no value", "use +method=kl_cov_exact"],
    ),
    "loss that is only a key": (
        [f"{LOSS}.loss_mode=covgrpo_loss"],
        [f"{LOSS}.loss_mode=covgrpo_loss is no value", "use +method=covgrpo_loss"],
    ),
    "loss that is an estimator": (
        [f"{LOSS}.loss_mode=ARM"],
        [f"{LOSS}.loss_mode=ARM is no value", "use +method=arm"],
    ),
    "estimator in capitals": (
        ["algorithm.adv_estimator=COVGRPO"],
        ["algorithm.adv_estimator=COVGRPO is unknown", "did you mean 'covgrpo'"],
    ),
    "loss in capitals": (
        [f"{LOSS}.loss_mode=CovGRPO"],
        [f"{LOSS}.loss_mode=CovGRPO is unknown", "did you mean 'covgrpo'"],
    ),
    "class of a loss that is not selected": (
        [f"{LOSS}._target_={TARGET}", f"+{LOSS}.scope=group"],
        [f"{LOSS}._target_ is that of covgrpo_loss", f"set {LOSS}.loss_mode=covgrpo"],
    ),
    "class of another loss": (
        [
            f"{LOSS}._target_={TARGET.replace('covgrpo_loss', 'sent')}",
            f"{LOSS}.loss_mode=covgrpo",
        ],
        [f"{LOSS}._target_ is that of sent", f"set {LOSS}.loss_mode=sent"],
    ),
    "marker near ours": (
        ["+algorithm.method=covgrop"],
        ["unknown method 'covgrop'", "did you mean 'covgrpo'"],
    ),
    "unknown parameter": (
        ["+method=covgrpo", "+algorithm.covgrpo.scop=group"],
        ["covgrpo has no parameter 'scop'", "did you mean 'scope'"],
    ),
    "parameter that is verl's": (
        ["+method=covgrpo", "+algorithm.covgrpo.norm_adv_by_std_in_grpo=False"],
        ["algorithm.covgrpo.norm_adv_by_std_in_grpo", "use algorithm.norm_adv_by_std_in_grpo"],
    ),
    "section that is no section": (
        ["algorithm.adv_estimator=covgrpo", "+algorithm.covgrpo=group"],
        ["algorithm.covgrpo is 'group'", "+algorithm.covgrpo.base=VALUE"],
    ),
    "wrong type": (
        ["+method=covgrpo", "algorithm.covgrpo.base=3"],
        ["covgrpo.base is 3 (int)", "must be str"],
    ),
    "wrong choice": (
        ["+method=covgrpo", "algorithm.covgrpo.scope=grup"],
        ["covgrpo.scope is 'grup'", "did you mean 'group'", "choose one of: 'batch', 'group'"],
    ),
    "wrong choice of the loss": (
        ["+method=covgrpo_loss", f"{LOSS}.scope=prompt"],
        ["covgrpo_loss.scope is 'prompt'", "choose one of: 'batch', 'group'"],
    ),
    "unknown parameter of the loss": (
        ["+method=covgrpo_loss", f"+{LOSS}.scpe=group"],
        [f"{LOSS}.scpe is unknown", "did you mean 'scope'"],
    ),
    "loss parameter without its class": (
        [f"{LOSS}.loss_mode=covgrpo", f"+{LOSS}.scope=group"],
        [f"{LOSS}.scope is a parameter of covgrpo_loss", f"{LOSS}._target_={TARGET}"],
    ),
    "estimator beats the YAML": (
        ["+method=covgrpo", "algorithm.adv_estimator=grpo"],
        ["+method=covgrpo sets", "delete algorithm.adv_estimator=grpo"],
    ),
    "estimator beats the YAML, other order": (
        ["algorithm.adv_estimator=grpo", "+method=covgrpo"],
        ["+method=covgrpo sets", "delete algorithm.adv_estimator=grpo"],
    ),
    "loss beats the YAML": (
        ["+method=covgrpo_loss", f"{LOSS}.loss_mode=gspo"],
        ["+method=covgrpo_loss sets", f"delete {LOSS}.loss_mode=gspo"],
    ),
    "V0 trainer": (
        ["+method=covgrpo", "trainer.use_v1=False"],
        ["covgrpo needs the V1 trainer", "set trainer.use_v1=True"],
    ),
    "V0 trainer, loss": (
        ["+method=covgrpo_loss", "trainer.use_v1=False"],
        ["covgrpo_loss needs the V1 trainer", "set trainer.use_v1=True"],
    ),
    "bypass mode": (
        ["+method=covgrpo", "algorithm.rollout_correction.bypass_mode=True"],
        ["bypass mode", "set algorithm.rollout_correction.bypass_mode=False"],
    ),
    "bypass mode, loss": (
        ["+method=covgrpo_loss", "algorithm.rollout_correction.bypass_mode=True"],
        ["bypass mode", "set algorithm.rollout_correction.bypass_mode=False"],
    ),
    "both forms": (
        ["algorithm.adv_estimator=covgrpo", f"{LOSS}.loss_mode=covgrpo"],
        ["weight every token twice", "algorithm.adv_estimator=grpo"],
    ),
    "both YAMLs": (
        ["+method=[covgrpo,covgrpo_loss]"],
        ["weight every token twice", "algorithm.adv_estimator=grpo"],
    ),
    "parameters that nothing selects": (
        ["algorithm.adv_estimator=grpo", "+algorithm.covgrpo.scope=group"],
        ["nothing selects covgrpo", "add +method=covgrpo"],
    ),
    "misspelt section": (
        ["algorithm.adv_estimator=covgrpo", "+algorithm.covgrop.scope=group"],
        ["algorithm.covgrop is unknown", "did you mean 'covgrpo'"],
    ),
    "unknown base": (
        ["+method=covgrpo", "algorithm.covgrpo.base=rlooo"],
        ["algorithm.covgrpo.base=rlooo", "did you mean 'rloo'"],
    ),
    "one half of a method beats the YAML": (
        ["+method=reco", f"{LOSS}.loss_mode=vanilla"],
        ["+method=reco sets", f"delete {LOSS}.loss_mode=vanilla"],
    ),
    "reference policy switched off": (
        ["+method=erpo", "actor_rollout_ref.actor.use_kl_loss=False"],
        ["erpo needs a reference policy", "use_kl_loss=True"],
    ),
    "reference policy not switched on": (
        ["algorithm.adv_estimator=ep_grpo"],
        ["ep_grpo needs a reference policy", "use_kl_loss=True", "kl_loss_coef=0"],
    ),
    "bypass mode, entropy": (
        ["+method=ah_grpo", "algorithm.rollout_correction.bypass_mode=True"],
        ["bypass mode", "set algorithm.rollout_correction.bypass_mode=False"],
    ),
    "loss parameter among those of the advantages": (
        ["+method=reco", "+algorithm.reco.ratio_low=0.9"],
        ["algorithm.reco.ratio_low is read by the loss", f"set {LOSS}.ratio_low"],
    ),
    "advantage parameter among those of the loss": (
        ["+method=reco", f"+{LOSS}.cap=3.0"],
        [f"{LOSS}.cap is unknown"],
    ),
    "parameter of another loss": (
        ["+method=kl_cov_exact", f"+{LOSS}.scope=group"],
        [f"{LOSS}.scope is unknown"],
    ),
    "loss parameter out of range": (
        ["+method=reco", f"{LOSS}.ratio_low=1.5"],
        ["reco.ratio_low is 1.5", "must lie in [0.0, 1.0]"],
    ),
    "parameters that exclude each other": (
        ["+method=clip_cov_exact", "algorithm.clip_cov_exact.low=6.0"],
        ["clip_cov_exact.low is 6.0, above high, 5.0"],
    ),
    "demonstrations and rollout correction": (
        [
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.rollout.agent.default_agent_loop=demonstration_agent",
            "algorithm.rollout_correction.rollout_is=token",
        ],
        ["rollout_correction.rollout_is=token needs the rollout's log-probs", "delete it"],
    ),
    "no judge score": (
        ["+method=dagrpo"],
        ["algorithm.dagrpo.score_key is not set", "algorithm.dagrpo.score_key=KEY"],
    ),
    "a second KL term": (
        ["+method=sent", "actor_rollout_ref.actor.kl_loss_coef=0.01"],
        ["sent has a KL term of its own", "kl_loss_coef=0"],
    ),
    "base is ours": (
        ["+method=covgrpo", "algorithm.covgrpo.base=covgrpo"],
        ["algorithm.covgrpo.base=covgrpo", "one of verl's own", "grpo or rloo"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_reason_and_what_mends_it(case: str) -> None:
    overrides, words = REFUSED[case]
    message = refusal(*overrides)
    assert [word for word in words if word not in message] == [], message


@pytest.mark.parametrize("base", ["gae", "remax", "grpo_passk", "gdpo"])
def test_a_base_that_needs_more_is_refused(base: str) -> None:
    message = refusal("+method=covgrpo", f"algorithm.covgrpo.base={base}")
    assert f"algorithm.covgrpo.base={base} needs" in message
    assert "use for example grpo, rloo or opo" in message


@pytest.mark.parametrize("base", ["grpo", "rloo", "opo", "grpo_vectorized", "rloo_vectorized"])
def test_a_base_of_the_rewards_alone_is_accepted(base: str) -> None:
    validate(compose("+method=covgrpo", f"algorithm.covgrpo.base={base}"))


@pytest.fixture
def needs_reference() -> Iterator[str]:
    """A method that reads the reference policy's log-probs, for the time of one test."""

    @registry.register("zz_reference")
    @dataclass(frozen=True, kw_only=True)
    class NeedsReference(Method):
        needs = ("ref_log_probs",)
        adv_estimator = "zz_reference"

    yield NeedsReference.name
    del registry._METHODS[NeedsReference.name]


def test_a_missing_reference_policy_is_refused(needs_reference: str) -> None:
    message = refusal(f"algorithm.adv_estimator={needs_reference}")
    assert "needs a reference policy: set actor_rollout_ref.actor.use_kl_loss=True" in message


def test_a_reference_policy_is_enough(needs_reference: str) -> None:
    for setting in ("actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward"):
        validate(compose(f"algorithm.adv_estimator={needs_reference}", f"{setting}=True"))


def test_old_log_probs_are_not_asked_of_methods_without_them(needs_reference: str) -> None:
    validate(
        compose(
            f"algorithm.adv_estimator={needs_reference}",
            "actor_rollout_ref.actor.use_kl_loss=True",
            "algorithm.rollout_correction.bypass_mode=True",
        )
    )


def test_a_moved_seam_stops_our_methods_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seam = SEAMS["verl.workers.utils.losses.ppo_loss"]
    monkeypatch.setattr(seam, "error", "verl 9.9.9: ppo_loss takes (everything)")
    for method in ("covgrpo", "covgrpo_loss"):
        message = refusal(f"+method={method}")
        assert "verl 9.9.9: ppo_loss takes (everything)" in message
        assert "written for verl 0.9.1: install that one" in message
    validate(compose("algorithm.adv_estimator=grpo"))


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.adv_estimator=somebodys_own"],
        ["algorithm.adv_estimator=dr_grpo"],
        [f"{LOSS}.loss_mode=somebodys_own"],
        ["+algorithm.somebodys_own.knob=1"],
        ["+algorithm.somebodys_own=???"],
        ["+algorithm.method=somebodys_own"],
        ["algorithm.adv_estimator=rloo", f"{LOSS}.loss_mode=gspo"],
        ["trainer.use_v1=False", "algorithm.adv_estimator=grpo"],
    ],
)
def test_what_is_not_ours_is_left_to_verl(
    overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    validate(compose(*overrides))
    assert "All configuration checks passed" in capsys.readouterr().out


@pytest.mark.parametrize("estimator", ["grpo", "covgrpo"])
def test_verls_own_validation_gets_the_same_arguments(estimator: str) -> None:
    config = compose(f"algorithm.adv_estimator={estimator}")
    before, calls, answer = OmegaConf.to_container(config), [], object()

    def verls_own(*arguments: Any) -> object:
        calls.append(arguments)
        return answer

    wrapped = checks._wrap_validate_config(verls_own)
    assert wrapped(config=config, use_reference_policy=True, use_critic=False) is answer
    [(given, *flags)] = calls
    assert given is config
    assert flags == [True, False]
    assert OmegaConf.to_container(config) == before


def test_a_loss_that_took_our_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry of verl overwrites a namesake without a word."""
    from verl.trainer.ppo import core_algos

    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "covgrpo", lambda **_: None)
    assert "another loss is registered as 'covgrpo'" in refusal("+method=covgrpo_loss")


def test_names_taken_before_the_plugin_loads_are_refused(tmp_path: Path) -> None:
    code = f"""
import verl, hydra
from verl.trainer.ppo import core_algos
core_algos.register_adv_est("covgrpo")(lambda **_: None)
core_algos.register_policy_loss("covgrpo")(lambda **_: None)
import verl_covgrpo.verl_hooks.plugin
from verl.utils.config import validate_config
with hydra.initialize_config_module("verl.trainer.config", version_base=None):
    for method in ("covgrpo", "covgrpo_loss"):
        config = hydra.compose("ppo_trainer", overrides=[*{RUNNABLE!r}, f"+method={{method}}"])
        try:
            validate_config(config=config, use_reference_policy=False, use_critic=False)
        except SystemExit as stop:
            print("refused:", "is registered as 'covgrpo'" in stop.code)
"""
    done = child("-c", code, cwd=tmp_path, VERL_USE_EXTERNAL_PLUGINS="none")
    assert done.stdout.splitlines() == ["refused: True"] * 2, done.stderr


def test_verls_own_refusals_still_come_through() -> None:
    with pytest.raises(Exception, match="ppo_micro_batch_size"):
        validate(compose("+method=covgrpo", "actor_rollout_ref.actor.use_dynamic_bsz=False"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["+method=covgrop"],
            "verl-covgrpo: unknown method 'covgrop' (did you mean 'covgrpo'?); "
            f"+method= takes one of: {', '.join(YAMLS)}",
        ),
        (
            ["+method=covgrpo", "algorithm.adv_estimator=grpo"],
            "verl-covgrpo: +method=covgrpo sets algorithm.adv_estimator=covgrpo, but this launch "
            "sets algorithm.adv_estimator=grpo, which beats it: "
            "delete algorithm.adv_estimator=grpo",
        ),
    ],
)
def test_the_stock_command_ends_with_one_line(
    overrides: list[str], message: str, tmp_path: Path
) -> None:
    done = child(
        "-m",
        "verl.trainer.main_ppo",
        *RUNNABLE,
        *overrides,
        cwd=tmp_path,
        RAY_TMPDIR=str(tmp_path),
        VERL_PLATFORM="cpu",
        VERL_LOGGING_LEVEL="ERROR",
    )
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if "INFO" not in line] == [message]
    assert done.stdout == ""
    assert not (tmp_path / "ray").exists()
