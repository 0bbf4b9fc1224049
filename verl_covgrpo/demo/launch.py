"""Runs the stock trainer for the demo, follows it, and leaves no process behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from verl_covgrpo.demo.settings import RECIPE, Demo, recipes_folder

MARK = "VERL_COVGRPO_RUN"
"""Environment variable that every process of a run inherits, Ray's and vLLM's included."""

QUIET = {
    "HYDRA_FULL_ERROR": "0",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
    "RAY_COLOR_PREFIX": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TQ_LOGGING_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "VERL_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Keeps the log readable: no usage reports, no wall of third-party warnings."""


class RunFailed(RuntimeError):
    """The trainer ended with an error; the message has the last lines that say why."""


def command(
    demo: Demo,
    method: str,
    model: Path,
    train: Path,
    validation: Path,
    out: Path,
    steps: int,
    seed: int,
    ranks: int,
    ray_dir: str,
    overrides: Sequence[str] = (),
) -> list[str]:
    """The stock launch with the demo's recipe; `overrides` come last."""
    return [
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        "--config-path",
        str(recipes_folder() / RECIPE),
        "--config-name",
        RECIPE,
        *demo.overrides,
        *(
            f"+reward.custom_reward_function.reward_kwargs.{key}={value}"
            for key, value in demo.task.reward_kwargs.items()
        ),
        *([] if method == "grpo" else [f"+method={method}"]),
        f"actor_rollout_ref.model.path={model.resolve()}",
        f"data.train_files={train.resolve()}",
        f"data.val_files={validation.resolve()}",
        f"data.seed={seed}",
        f"actor_rollout_ref.rollout.seed={seed}",
        f"actor_rollout_ref.actor.data_loader_seed={seed}",
        f"trainer.n_gpus_per_node={ranks}",
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={steps}",
        f"trainer.save_freq={steps}",
        f"trainer.default_local_dir={out.resolve() / 'checkpoint'}",
        f"trainer.experiment_name={out.name}",
        f"hydra.run.dir={out.resolve() / 'hydra'}",
        f"+ray_kwargs.ray_init._temp_dir={ray_dir}",
        *overrides,
    ]


def environment(metrics: Path, mark: str, tmp: str) -> dict[str, str]:
    """The environment of a run; settings the user made for the quiet ones are kept."""
    env = {**QUIET, **os.environ}
    env.pop("RAY_ADDRESS", None)  # never join a cluster that happens to be there
    env.update(
        {
            MARK: mark,
            "TMPDIR": tmp,
            "VERL_PLATFORM": "cpu",
            "VERL_FILE_LOGGER_PATH": str(metrics.resolve()),
            "VLLM_CPU_KVCACHE_SPACE": env.get("VLLM_CPU_KVCACHE_SPACE", "1"),
        }
    )
    return env


class Run:
    """A launched trainer. Use as a context manager: leaving it ends every process of the run."""

    def __init__(self, out: Path, **launch: Any) -> None:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        self.log = out / "train.log"
        self.metrics = out / "metrics.jsonl"
        self.checkpoint = out / "checkpoint"
        self._mark = uuid.uuid4().hex
        # In /tmp and short: Ray puts sockets there, whose paths may have 107 characters.
        self._tmp = tempfile.mkdtemp(prefix="cov-", dir="/tmp")
        self._shared_memory: set[Path] = set()
        self._log_file = self.log.open("w")
        self.process = subprocess.Popen(
            command(out=out, ray_dir=self._tmp, **launch),
            env=environment(self.metrics, self._mark, self._tmp),
            cwd=out,
            stdout=self._log_file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is ours to handle
        )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._shared_memory |= shared_memory(self._mark)
        end_processes(self._mark)
        self.process.wait()
        self._log_file.close()
        shutil.rmtree(self._tmp, ignore_errors=True)
        for path in self._shared_memory:
            path.unlink(missing_ok=True)

    def rows(self, poll_seconds: float = 0.5) -> Iterator[dict[str, Any] | None]:
        """Yield each row of metrics as it is written, None while there is nothing new.

        Raises:
            RunFailed: the trainer ended with an error.
        """
        offset = 0
        while True:
            ended = self.process.poll() is not None
            if self.metrics.exists():
                with self.metrics.open("rb") as file:
                    file.seek(offset)
                    for line in file:
                        if not line.endswith(b"\n"):
                            break
                        if offset == 0:
                            # By now all is mapped; Ray kills its workers without letting them tidy.
                            self._shared_memory |= shared_memory(self._mark)
                        offset += len(line)
                        yield json.loads(line)
            if ended:
                break
            yield None
            time.sleep(poll_seconds)
        if self.process.returncode != 0:
            raise RunFailed(
                f"the trainer ended with status {self.process.returncode}; its last words:\n"
                f"{last_words(self.log)}\nthe whole log: {self.log}"
            )


def last_words(log: Path, lines: int = 12) -> str:
    """The lines of a log that say why it ended: the last error, else its tail."""
    text = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in log.read_text().splitlines()]
    errors = [
        line
        for line in text
        if re.match(r"(\(.*?\) )?\s*([\w.]+(Error|Exception)\b|verl-covgrpo: )", line)
    ]
    return "\n".join(errors[-3:] if errors else text[-lines:])


def processes_with(variable: str, value: str) -> list[Any]:
    """The processes whose environment has this value of a variable."""
    import psutil

    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(variable) == value:
                found.append(process)
    return found


def shared_memory(mark: str) -> set[Path]:
    """The shared memory that the processes of a run have mapped."""
    import psutil

    found = set()
    for process in processes_with(MARK, mark):
        with contextlib.suppress(psutil.Error, OSError, AttributeError):
            paths = (Path(region.path) for region in process.memory_maps())
            found |= {path for path in paths if path.parent == Path("/dev/shm")}
    return found


def end_processes(mark: str, patience: float = 10.0) -> None:
    """End every process of a run."""
    import psutil

    processes = processes_with(MARK, mark)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    psutil.wait_procs(processes, timeout=patience)
    for process in processes_with(MARK, mark):  # the deaf, and those started since
        with contextlib.suppress(psutil.Error):
            process.kill()
