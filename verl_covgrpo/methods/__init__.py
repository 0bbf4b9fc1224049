"""Methods that reweight advantages: one file per paper, pure torch, no verl.

The package bears the name of the public function `verl_covgrpo.methods()`, and Python binds a
subpackage to its name in the parent on import. So this module is that function: it can be called.
"""

import sys
from types import ModuleType


class _Methods(ModuleType):
    def __call__(self) -> tuple[str, ...]:
        """Return the names of all methods, sorted."""
        from verl_covgrpo.registry import names

        return names()


sys.modules[__name__].__class__ = _Methods
