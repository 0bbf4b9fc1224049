"""Makes +method=NAME work on the stock command, from any directory."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from verl_covgrpo.errors import did_you_mean
from verl_covgrpo.seams import on_import

CONFIGS = "pkg://verl_covgrpo.conf"


def _extend(_: ModuleType) -> None:
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.plugins import Plugins
    from hydra.errors import MissingConfigException
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class MethodsSearchPath(SearchPathPlugin):
        """Adds the package's own config group `method`."""

        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            search_path.append(provider="verl-covgrpo", path=CONFIGS)

    Plugins.instance().register(MethodsSearchPath)

    original = ConfigLoaderImpl.load_configuration

    @functools.wraps(original)
    def load_configuration(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except MissingConfigException as error:
            group, _, name = (error.missing_cfg_file or "").rpartition("/")
            if group != "method":
                raise
            known = [str(option) for option in error.options or ()]
            raise SystemExit(
                f"verl-covgrpo: unknown method {name!r}{did_you_mean(name, known)}; "
                f"+method= takes one of: {', '.join(known)}"
            ) from None

    ConfigLoaderImpl.load_configuration = load_configuration  # type: ignore[method-assign]


def install() -> None:
    on_import("hydra", "plugins", _extend)
