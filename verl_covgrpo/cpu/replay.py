"""A shorter wait between two looks at the replay buffer.

verl looks every 2 s, which is most of a step of the demo's size; only the constructor sets it.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from wrapt import when_imported

POLL_SECONDS = 0.05


def _poll_more_often(module: ModuleType) -> None:
    original = module.ReplayBuffer.__init__
    if "poll_interval" not in inspect.signature(original).parameters:
        return  # nothing breaks without it, steps are only slower

    def __init__(self: Any, *args: Any, poll_interval: float = POLL_SECONDS, **kwargs: Any) -> None:
        original(self, *args, poll_interval=poll_interval, **kwargs)

    module.ReplayBuffer.__init__ = __init__


def install() -> None:
    when_imported("verl.trainer.ppo.v1.replay_buffer")(_poll_more_often)
