"""Loading the plugin: what it costs, what it touches, and what happens when it fails."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from verl_fixtures import child

from verl_covgrpo import MethodError, seams
from verl_covgrpo.seams import SEAMS, Seam, mismatch, on_import, replace_function, require_all

pytestmark = pytest.mark.verl

IMPORT_VERL = """
import json, sys
import verl
from verl_covgrpo.verl_hooks import plugin
loaded = [name for name in sys.modules if name.startswith("verl_covgrpo.cpu.")]
from verl.plugin.platform import PlatformRegistry
platforms = list(PlatformRegistry.registered_names())
print(json.dumps([plugin.LOAD_SECONDS, loaded, platforms]))
"""


@pytest.fixture(scope="module")
def imports(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[Any], str]]:
    """What three processes that import verl found, and their stderr."""
    runs = [child("-c", IMPORT_VERL, cwd=tmp_path_factory.mktemp("verl")) for _ in range(3)]
    return [(json.loads(run.stdout), run.stderr) for run in runs]


def test_importing_verl_prints_nothing_of_ours(imports: list[tuple[list[Any], str]]) -> None:
    assert [stderr for _, stderr in imports if "covgrpo" in stderr] == []


def test_loading_takes_next_to_no_time(imports: list[tuple[list[Any], str]]) -> None:
    assert min(found[0] for found, _ in imports) <= 0.15


def test_nothing_of_the_cpu_backend_is_loaded_unasked(imports: list[tuple[list[Any], str]]) -> None:
    _, loaded, platforms = imports[0][0]
    assert loaded == []
    assert "cpu" not in platforms
    assert "nvidia" in platforms


def test_the_public_api_imports_neither_verl_nor_vllm(tmp_path: Path) -> None:
    code = (
        "import sys; from verl_covgrpo import Rollout, build; build('covgrpo');"
        "print([m for m in sys.modules if m.split('.')[0] in ('verl', 'vllm', 'ray', 'hydra')])"
    )
    assert child("-c", code, cwd=tmp_path).stdout == "[]\n"


def test_switched_off_it_leaves_verl_untouched(tmp_path: Path) -> None:
    code = """
import sys
import verl
from verl.trainer.ppo import core_algos
from verl.utils.config import validate_config
from verl.workers.utils.losses import ppo_loss
print([m for m in sys.modules if m.startswith("verl_covgrpo")])
print("covgrpo" in core_algos.ADV_ESTIMATOR_REGISTRY, "covgrpo" in core_algos.POLICY_LOSS_REGISTRY)
print(validate_config.__code__.co_filename.endswith("verl/utils/config.py"))
print(ppo_loss.__code__.co_filename.endswith("verl/workers/utils/losses.py"))
"""
    done = child("-c", code, cwd=tmp_path, VERL_USE_EXTERNAL_PLUGINS="none")
    assert done.stdout == "[]\nFalse False\nTrue\nTrue\n", done.stderr


def test_a_failing_load_is_printed_and_stops_our_runs_alone(tmp_path: Path) -> None:
    code = """
import verl_covgrpo.seams
def broken(*_, **__): raise RuntimeError("broken on purpose")
verl_covgrpo.seams.replace_function = broken
import verl
import hydra
from verl.utils.config import validate_config
with hydra.initialize_config_module("verl.trainer.config", version_base=None):
    for override in (
        "algorithm.adv_estimator=grpo",
        "algorithm.adv_estimator=covgrpo",
        "actor_rollout_ref.actor.policy_loss.loss_mode=covgrpo",
        "+algorithm.method=covgrpo_loss",
    ):
        config = hydra.compose(
            "ppo_trainer", overrides=["actor_rollout_ref.actor.use_dynamic_bsz=True", override]
        )
        try:
            validate_config(config=config, use_reference_policy=False, use_critic=False)
            print("goes on")
        except SystemExit as stop:
            print(stop.code)
"""
    done = child("-c", code, cwd=tmp_path)
    reason = "verl-covgrpo could not be loaded: RuntimeError('broken on purpose')"
    assert done.stderr.count(reason) == 1
    lines = [line for line in done.stdout.splitlines() if "validate_config" not in line]
    assert lines == ["goes on", reason, reason, reason]


def test_the_cpu_backend_is_there_when_asked_for(tmp_path: Path) -> None:
    code = """
import os, sys
import verl
print(sorted(m for m in sys.modules if m.startswith("verl_covgrpo.cpu.")))
import torch
from verl.plugin.platform import get_platform
print(type(get_platform()).__name__, get_platform().current_device(), get_platform().is_available())
from verl.utils.distributed import initialize_global_process_group_ray
store = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
os.environ.update(store)
initialize_global_process_group_ray()
print(torch.distributed.get_backend())
torch.distributed.destroy_process_group()
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl
for kind in ("language_model", "value_model"):
    print(EngineRegistry.get_engine_cls(kind, "fsdp2").__name__)
print(transformer_impl.CPUOffloadPolicy(pin_memory=True).pin_memory)
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
import inspect
print(inspect.signature(ReplayBuffer.__init__).parameters["poll_interval"].default < 2)
import importlib.metadata
print(importlib.metadata.version("vllm").endswith("+cpu"))
"""
    done = child("-c", code, cwd=tmp_path, VERL_PLATFORM="cpu")
    assert done.stdout.splitlines() == [
        str(
            [f"verl_covgrpo.cpu.{name}" for name in ("engine", "platform", "replay", "vllm_reload")]
        ),
        "PlatformCPU cpu True",
        "gloo",
        "FSDPEngineWithLMHeadCPU",
        "FSDPEngineWithValueHeadCPU",
        "False",
        "True",
        "True",
    ], done.stderr


# Seams


def test_our_seams_are_wrapped_once_verl_has_imported_them() -> None:
    from verl.trainer.ppo.v1 import trainer_base
    from verl.utils import config
    from verl.workers.utils import losses

    wrapped = {
        "verl.utils.config.validate_config": config.validate_config,
        "verl.trainer.ppo.v1.trainer_base.PPOTrainer._compute_advantage": (
            trainer_base.PPOTrainer._compute_advantage
        ),
        "verl.workers.utils.losses.ppo_loss": losses.ppo_loss,
    }
    assert {where: SEAMS[where].state for where in wrapped} == dict.fromkeys(wrapped, "in place")
    for function in wrapped.values():
        assert function.__code__.co_filename.startswith(str(Path(seams.__file__).parent))
        assert function.__wrapped__.__name__ == function.__name__  # type: ignore[attr-defined]


def test_every_trainer_mode_goes_through_the_seam() -> None:
    from verl.trainer.ppo import v1

    for trainer in (v1.PPOTrainerSync, v1.PPOTrainerColocateAsync, v1.PPOTrainerSeparateAsync):
        assert trainer._compute_advantage is v1.PPOTrainer._compute_advantage


def test_the_loss_travels_to_workers_by_its_name() -> None:
    import cloudpickle
    from verl.workers.utils.losses import ppo_loss

    for module in (pickle, cloudpickle):
        sent = module.dumps(ppo_loss)
        assert b"verl.workers.utils.losses" in sent
        assert b"verl_covgrpo" not in sent
        assert pickle.loads(sent) is ppo_loss


def seam(*parameters: str) -> Seam:
    return Seam("some.module", "f", parameters)


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda a: 0, "takes (a), expected (a, b)"),
        (lambda b, a: 0, "takes (b, a), expected (a, b)"),
        (lambda a, c: 0, "takes (a, c), expected (a, b)"),
        (lambda a, b, c: 0, "takes (a, b, c), expected (a, b)"),
        (lambda *args, **kwargs: 0, "takes (args, kwargs), expected (a, b)"),
        (None, "has no some.module.f"),
        (3, "has no some.module.f"),
    ],
)
def test_a_function_with_other_parameters_is_noticed(function: Any, found: str) -> None:
    message = mismatch(function, seam("a", "b"))
    assert found in message
    assert message.startswith(f"verl {seams.verl_version()}")


@pytest.mark.parametrize(
    "function",
    [lambda a, b: 0, lambda a, b, c=1: 0, lambda a, b=2: 0, lambda a, b, *args, **kwargs: 0],
)
def test_more_parameters_with_defaults_are_fine(function: Any) -> None:
    assert mismatch(function, seam("a", "b")) == ""


@pytest.fixture
def write_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str], Callable[[], ModuleType]]:
    """Write a module to disk; return what imports it. Its seams are forgotten after the test."""
    monkeypatch.setattr(seams, "SEAMS", dict(SEAMS))
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, source: str) -> Callable[[], ModuleType]:
        tmp_path.joinpath(f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return lambda: __import__(name)

    return write


def twice(original: Callable[..., int]) -> Callable[..., int]:
    return lambda *args, **kwargs: 2 * original(*args, **kwargs)


def test_a_seam_waits_for_the_import(write_module: Callable[..., Any]) -> None:
    load = write_module("seam_as_known", "class C:\n    def f(self, a): return a\n")
    known = replace_function("seam_as_known", "C.f", twice, ("self", "a"))
    assert "seam_as_known" not in sys.modules
    assert known.state == "waits for verl to import it"
    assert load().C().f(a=4) == 8
    assert known.state == "in place"
    require_all()


def test_a_moved_seam_is_left_alone_and_refused(write_module: Callable[..., Any]) -> None:
    load = write_module("seam_moved", "def f(a, b): return a + b\n")
    moved = replace_function("seam_moved", "f", twice, ("a",))
    assert load().f(1, 2) == 3
    assert not moved.installed
    version = seams.verl_version()
    with pytest.raises(
        MethodError, match=rf"verl {version}: seam_moved\.f takes \(a, b\).*verl 0\.9\.1"
    ):
        require_all()


def test_a_seam_whose_class_is_gone_is_refused(write_module: Callable[..., Any]) -> None:
    load = write_module("seam_gone", "")
    replace_function("seam_gone", "C.f", twice, ("self",))
    load()
    with pytest.raises(MethodError, match=r"has no seam_gone\.C\.f"):
        require_all()


def test_a_registry_that_moved_breaks_no_import_and_is_refused(
    write_module: Callable[..., Any],
) -> None:
    load = write_module("seam_registry", "")
    seam = on_import("seam_registry", "NAMES", lambda module: module.NAMES.append("ours"))
    load()
    assert "seam_registry.NAMES is not as expected (AttributeError" in seam.state
    with pytest.raises(MethodError, match=r"seam_registry\.NAMES is not as expected"):
        require_all()


@pytest.mark.parametrize("name", ["ADV_ESTIMATOR_REGISTRY", "POLICY_LOSS_REGISTRY"])
def test_verl_without_its_registries_still_runs_what_is_not_ours(name: str, tmp_path: Path) -> None:
    code = f"""
import verl
import hydra
from wrapt import when_imported
from verl_covgrpo.seams import SEAMS
import verl.trainer.ppo.core_algos as core_algos
SEAMS["verl.trainer.ppo.core_algos.{name}"].error = "moved"
del core_algos.{name}
from verl.utils.config import validate_config
with hydra.initialize_config_module("verl.trainer.config", version_base=None):
    for estimator in ("grpo", "covgrpo"):
        overrides = [
            "actor_rollout_ref.actor.use_dynamic_bsz=True", f"algorithm.adv_estimator={{estimator}}"
        ]
        config = hydra.compose("ppo_trainer", overrides=overrides)
        try:
            validate_config(config=config, use_reference_policy=False, use_critic=False)
            print("goes on")
        except SystemExit as stop:
            print(stop.code)
"""
    done = child("-c", code, cwd=tmp_path)
    lines = [line for line in done.stdout.splitlines() if "validate_config" not in line]
    assert lines[0] == "goes on", done.stderr
    assert lines[1].startswith("verl-covgrpo: moved.")


def test_a_module_that_is_gone_is_refused(write_module: Callable[..., Any]) -> None:
    replace_function("seam_never_there", "f", twice, ())
    with pytest.raises(MethodError, match="cannot import seam_never_there"):
        require_all()
