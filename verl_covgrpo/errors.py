"""The one error class of the package, and the hint it carries for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MethodError(ValueError):
    """A method, parameter or rollout that cannot be used; says what is wrong and what to change."""


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ` (did you mean 'covgrpo'?)` for the known name closest to `name`, else ``""``."""
    nearest = difflib.get_close_matches(str(name), list(known), n=1, cutoff=cutoff)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""
