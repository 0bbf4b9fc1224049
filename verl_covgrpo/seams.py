"""The places where verl lets a plugin in, wrapped by name and checked before they are touched.

A seam is one function of one verl module. It is wrapped when verl first imports that module, so
that loading the plugin imports nothing. Where the function is gone or takes other arguments than
those this package was written for, it is left alone and the seam says so: runs that select none of
our methods go on as before, runs that select one are refused (`require_all`).
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from wrapt import when_imported

from verl_covgrpo.errors import MethodError


@dataclass
class Seam:
    """One wrapped function, or registry that we add to.

    `error` is empty while all is well; `installed` once it is wrapped, or added to.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    installed: bool = False
    error: str = ""

    @property
    def state(self) -> str:
        return self.error or ("in place" if self.installed else "waits for verl to import it")


SEAMS: dict[str, Seam] = {}


def verl_version() -> str:
    try:
        return version("verl")
    except PackageNotFoundError:
        return "(version unknown)"


def replace_function(
    module: str,
    name: str,
    make_wrapper: Callable[[Callable[..., Any]], Callable[..., Any]],
    parameters: tuple[str, ...],
) -> Seam:
    """Wrap `module.name` (a function, or Class.method) as soon as `module` is imported.

    Args:
        make_wrapper: gets the original, returns what stands in its place.
        parameters: the names that the original must take, in order, and no others without default.
    """
    seam = SEAMS.setdefault(f"{module}.{name}", Seam(module, name, parameters))

    def wrap(imported: ModuleType) -> None:
        owner: Any = imported
        *path, attribute = name.split(".")
        for part in path:
            owner = getattr(owner, part, None)
        original = getattr(owner, attribute, None)
        seam.error = mismatch(original, seam)
        if not seam.error:
            setattr(owner, attribute, functools.wraps(original)(make_wrapper(original)))  # type: ignore[arg-type]
            seam.installed = True

    when_imported(module)(wrap)
    return seam


def on_import(module: str, name: str, act: Callable[[ModuleType], None]) -> Seam:
    """Call `act` with `module` as soon as it is imported; `name` is what `act` relies on in there.

    What goes wrong in `act` is the seam's error, and reaches no launch that selects none of ours.
    """
    seam = SEAMS.setdefault(f"{module}.{name}", Seam(module, name, ()))

    def run(imported: ModuleType) -> None:
        try:
            act(imported)
            seam.installed = True
        except Exception as error:
            seam.error = f"verl {verl_version()}: {module}.{name} is not as expected ({error!r})"

    when_imported(module)(run)
    return seam


def mismatch(original: Any, seam: Seam) -> str:
    """What is wrong with the function found at a seam; empty if it is the one expected."""
    where = f"{seam.module}.{seam.name}"
    if not callable(original):
        return f"verl {verl_version()} has no {where}"
    found = inspect.signature(original).parameters
    known = tuple(found)[: len(seam.parameters)] == seam.parameters
    more = [
        parameter.name
        for parameter in list(found.values())[len(seam.parameters) :]
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ]
    if known and not more:
        return ""
    expected = ", ".join(seam.parameters)
    return f"verl {verl_version()}: {where} takes ({', '.join(found)}), expected ({expected})"


def require_all() -> None:
    """Import every seam's module and raise MethodError if one of them is not as expected."""
    for seam in list(SEAMS.values()):
        try:
            importlib.import_module(seam.module)
        except ImportError as error:
            seam.error = (
                seam.error or f"verl {verl_version()}: cannot import {seam.module} ({error})"
            )
        if seam.error:
            raise MethodError(
                f"{seam.error}. This release of verl-covgrpo was written for verl 0.9.1: install "
                "that one, or a release of verl-covgrpo that knows yours."
            )
