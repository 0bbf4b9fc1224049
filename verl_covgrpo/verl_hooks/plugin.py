"""What verl loads at `import verl`, through the entry point group `verl.plugins`.

Importing this module installs the hooks. verl swallows whatever goes wrong here, so a failure is
printed, and any run that selects one of our methods is stopped by it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from verl_covgrpo import verl_hooks


def install() -> None:
    """Install every hook; none of them imports anything of verl that is not imported yet."""
    from verl_covgrpo import cpu
    from verl_covgrpo.verl_hooks import advantage, agent_loops, checks, hydra_path, loss, memory

    checks.install()
    hydra_path.install()
    advantage.install()
    loss.install()
    memory.install()
    agent_loops.install()
    if cpu.requested():
        cpu.install()


def _stop_runs_that_select_us(error: BaseException) -> None:
    """Refuse, in the driver, what would otherwise fail after the model is loaded, or not at all."""
    from verl.utils import config as verl_config

    original = verl_config.validate_config
    yamls = (Path(__file__).parents[1] / "conf" / "method").glob("*.yaml")
    # Those of the baselines set no marker: they select nothing of ours.
    ours = {path.stem for path in yamls if f"  method: {path.stem}\n" in path.read_text()}

    def validate_config(config: Any, *args: Any, **kwargs: Any) -> Any:
        policy_loss = config.actor_rollout_ref.actor.get("policy_loss") or {}
        selected = {
            config.algorithm.get("method"),
            config.algorithm.adv_estimator,
            policy_loss.get("loss_mode"),
        }
        if selected & ours:
            raise SystemExit(f"verl-covgrpo could not be loaded: {error!r}")
        return original(config, *args, **kwargs)

    verl_config.validate_config = validate_config


_start = time.perf_counter()
try:
    install()
except BaseException as error:
    verl_hooks.LOAD_ERROR = error
    print(f"verl-covgrpo could not be loaded: {error!r}", file=sys.stderr, flush=True)
    _stop_runs_that_select_us(error)
    raise
LOAD_SECONDS = time.perf_counter() - _start
