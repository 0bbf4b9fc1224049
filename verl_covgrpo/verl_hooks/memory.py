"""What a method remembers is saved with verl's checkpoint, and restored with it.

Saved first, as one file in the checkpoint's folder, whole or not at all: verl writes its own parts
and then its tracker file, so that no checkpoint that verl takes for complete lacks it. Restored
after verl has loaded; a checkpoint without it, or with another's, stops the run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl_covgrpo.errors import MethodError
from verl_covgrpo.registry import Method
from verl_covgrpo.seams import replace_function
from verl_covgrpo.verl_hooks import selection

FILE = "verl_covgrpo.json"
FORMAT = 1


def save(folder: Path, methods: list[Method]) -> None:
    """Write the memory of methods into a checkpoint's folder, atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    states = {method.name: method.state_dict() for method in methods}
    unfinished = folder / f"{FILE}.{os.getpid()}.part"
    with unfinished.open("w") as file:
        json.dump({"format": FORMAT, "states": states}, file, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(folder / FILE)


def load(folder: Path, methods: list[Method]) -> None:
    """Restore the memory of methods from a checkpoint's folder.

    Raises:
        MethodError: the file is missing or damaged, of another format, or holds the memory of
            other methods.
    """
    names = ", ".join(method.name for method in methods)
    path = folder / FILE
    anew = "or start anew with trainer.resume_mode=disable"
    if not path.is_file():
        raise MethodError(
            f"{folder} holds no memory of {names} ({FILE} is missing): it was saved without that "
            f"method; resume with the method it was saved with, {anew}"
        )
    try:
        saved = json.loads(path.read_text())
        found_format, states = saved["format"], dict(saved["states"])
    except (ValueError, KeyError, TypeError) as error:
        raise MethodError(f"{path} is damaged ({error!r}): take another checkpoint") from error
    if found_format != FORMAT:
        raise MethodError(
            f"{path} has format {found_format}, this release of verl-covgrpo reads {FORMAT}: "
            f"install the release that saved it, {anew}"
        )
    if set(states) != {method.name for method in methods}:
        raise MethodError(
            f"{path} holds the memory of {', '.join(sorted(states)) or 'no method'}, but this "
            f"launch selects {names}: resume with the method it was saved with, {anew}"
        )
    for method in methods:
        method.load_state_dict(states[method.name])


def remembering(trainer: Any) -> list[Method]:
    """The trainer's own instances of the selected methods that have a memory."""
    from verl_covgrpo.verl_hooks.advantage import methods_of

    selected = selection.selection(trainer.config)
    held = methods_of(trainer, selected)
    return [held[method] for method in selected.methods if method.memory]


def _folder(trainer: Any) -> Path:
    """The folder of the checkpoint of the trainer's current step."""
    config = trainer.config.trainer
    if config.resume_mode == "resume_path" and config.resume_from_path:
        resumed = Path(str(config.resume_from_path))
        if resumed.name == f"global_step_{trainer.global_steps}":
            return resumed
    return Path(str(config.default_local_dir)) / f"global_step_{trainer.global_steps}"


def _wrap_save(original: Callable[..., Any]) -> Callable[..., Any]:
    def _save_checkpoint(self: Any) -> Any:
        if methods := remembering(self):
            root = Path(str(self.config.trainer.default_local_dir))
            save(root / f"global_step_{self.global_steps}", methods)
        return original(self)

    return _save_checkpoint


def _wrap_load(original: Callable[..., Any]) -> Callable[..., Any]:
    def _load_checkpoint(self: Any) -> Any:
        result = original(self)
        if self.global_steps and (methods := remembering(self)):
            load(_folder(self), methods)
        return result

    return _load_checkpoint


def install() -> None:
    for name, wrap in (("_save_checkpoint", _wrap_save), ("_load_checkpoint", _wrap_load)):
        replace_function(
            "verl.trainer.ppo.v1.trainer_base",
            f"PPOTrainer.{name}",
            wrap,
            parameters=("self",),
        )
