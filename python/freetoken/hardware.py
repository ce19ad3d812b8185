"""Facts about this machine that decide defaults, found without importing torch."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from dataclasses import dataclass

_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of the driver's interface."""


@dataclass(frozen=True)
class Facts:
    """``gpu_count`` CUDA devices seen by the driver; whether the installed torch has CUDA; bytes of system memory."""

    gpu_count: int
    torch_has_cuda: bool
    cpu_count: int
    memory_bytes: int

    @property
    def usable_gpu(self) -> bool:
        return self.gpu_count > 0 and self.torch_has_cuda

    @property
    def device_reason(self) -> str:
        if self.gpu_count == 0:
            return "no NVIDIA GPU is visible"
        if not self.torch_has_cuda:
            return "a GPU is visible, but the installed torch has no CUDA"
        return f"{self.gpu_count} GPU(s) visible"


def _driver_gpu_count() -> int:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def capability(index: int = 0) -> tuple[int, int] | None:
    """Compute capability of a CUDA device as the driver gives it, ``(9, 0)`` say; ``None`` without a driver or a device."""
    if _driver_gpu_count() <= index:
        return None
    driver, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
    found = [ctypes.c_int(0), ctypes.c_int(0)]
    if driver.cuDeviceGet(ctypes.byref(device), index) != 0:
        return None
    for value, attribute in zip(found, (_CAPABILITY_MAJOR, _CAPABILITY_MINOR)):
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device) != 0:
            return None
    return found[0].value, found[1].value


def _torch_has_cuda() -> bool:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    return os.path.exists(os.path.join(os.path.dirname(spec.origin), "lib", "libtorch_cuda.so"))


def probe() -> Facts:
    """Look at the driver, the installed torch and the system memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Facts(_driver_gpu_count(), _torch_has_cuda(), len(os.sched_getaffinity(0)), memory)
