"""verl's device abstraction for a plain CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

from verl_covgrpo.seams import replace_function


def _cpu_device_module() -> ModuleType:
    """`torch.cpu` with the memory and seed functions that an accelerator's module has."""
    module = ModuleType("torch_cpu_as_device")
    module.__dict__.update(
        {name: value for name, value in vars(torch.cpu).items() if not name.startswith("__")}
    )

    def memory_bytes(*_: Any, **__: Any) -> int:
        return 0

    def nothing(*_: Any, **__: Any) -> None:
        return None

    def mem_get_info(*_: Any, **__: Any) -> tuple[int, int]:
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")

    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
        setattr(module, name, memory_bytes)
    module.max_memory_reserved = memory_bytes  # type: ignore[attr-defined]
    for name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "set_device"):
        setattr(module, name, nothing)
    module.set_per_process_memory_fraction = nothing  # type: ignore[attr-defined]
    module.mem_get_info = mem_get_info  # type: ignore[attr-defined]
    module.get_device_name = lambda *_: "cpu"  # type: ignore[attr-defined]
    module.manual_seed = torch.manual_seed  # type: ignore[attr-defined]
    module.manual_seed_all = torch.manual_seed  # type: ignore[attr-defined]
    module.get_rng_state = lambda *_: torch.get_rng_state()  # type: ignore[attr-defined]
    module.set_rng_state = lambda state, *_: torch.set_rng_state(state)  # type: ignore[attr-defined]
    return module


class PlatformCPU(PlatformBase):
    """One CPU "device" per rank; ranks talk over gloo, weights travel through shared memory."""

    _device_module = _cpu_device_module()

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return self._device_module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # never chosen by detection, only by VERL_PLATFORM=cpu

    def current_device(self) -> torch.device:
        return torch.device(
            "cpu"
        )  # verl passes this to `.to(...)`; an index would mean an accelerator

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"  # what Ray sets for its resource "GPU"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"  # logical ones: ray_kwargs.ray_init.num_gpus says how many ranks fit

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def _gloo_by_default(original: Any) -> Any:
    def initialize_global_process_group_ray(
        timeout_second: int | None = None, backend: str | None = None
    ) -> Any:
        # verl's own default names the device twice ("cpu:gloo,cpu:gloo"), which torch refuses.
        return original(timeout_second=timeout_second, backend=backend or "gloo")

    return initialize_global_process_group_ray


def install() -> None:
    PlatformRegistry.register(platform="cpu")(PlatformCPU)
    replace_function(
        "verl.utils.distributed",
        "initialize_global_process_group_ray",
        _gloo_by_default,
        parameters=("timeout_second", "backend"),
    )
