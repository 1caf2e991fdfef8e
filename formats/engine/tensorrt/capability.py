"""Compute capabilities: their names here and in TensorRT, and that of this machine's GPU."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable
from typing import Any, Final

from ...._core import ConfigError

CURRENT: Final = "current"
"""Name for the capability of this machine's first GPU."""

# The plugins' kernels need its asynchronous copies to shared memory and its matrix instructions.
SMALLEST: Final = (8, 0)

_NAME: Final = re.compile(r"([1-9][0-9]*)\.([0-9])")
_TENSORRT_NAME: Final = re.compile(r"SM([1-9][0-9]*)([0-9])")

_DRIVER: Final = "libcuda.so.1"
# CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of cuda.h.
_MAJOR, _MINOR = 75, 76


def parse_capability(name: str) -> tuple[int, int] | None:
    """Returns (8, 6) for 8.6; None if `name` is not a compute capability."""
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2]))


def name_in_file(name: str) -> str:
    """Returns sm86 for 8.6, the form in file names."""
    return "sm" + name.replace(".", "")


def offered(members: Iterable[str]) -> tuple[str, ...]:
    """Names of the supported compute capabilities among TensorRT's members, in ascending order."""
    found = []
    for member in members:
        match = _TENSORRT_NAME.fullmatch(member)
        if match is not None:
            found.append((int(match[1]), int(match[2])))
    return tuple(f"{major}.{minor}" for major, minor in sorted(found) if (major, minor) >= SMALLEST)


def tensorrt_name(name: str) -> str:
    """Returns SM86 for 8.6: the member of TensorRT's ComputeCapability."""
    return name_in_file(name).upper()


def current_capability() -> str:
    """Compute capability of the first GPU, from the driver. Raises ConfigError that says what is missing."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        raise ConfigError(_without_gpu(f"there is no NVIDIA driver ({_DRIVER} is not found)")) from None
    _call(driver, "cuInit", ctypes.c_uint(0))
    count = ctypes.c_int()
    _call(driver, "cuDeviceGetCount", ctypes.byref(count))
    if count.value == 0:
        raise ConfigError(_without_gpu("the driver finds no GPU"))
    device = ctypes.c_int()
    _call(driver, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
    numbers = []
    for attribute in (_MAJOR, _MINOR):
        value = ctypes.c_int()
        _call(driver, "cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), device)
        numbers.append(value.value)
    return f"{numbers[0]}.{numbers[1]}"


def _call(driver: Any, function: str, *arguments: Any) -> None:
    status = getattr(driver, function)(*arguments)
    if status == 0:
        return
    name = ctypes.c_char_p()
    known = driver.cuGetErrorName(ctypes.c_int(status), ctypes.byref(name)) == 0
    text = name.value.decode() if known and name.value else f"error {status}"
    raise ConfigError(_without_gpu(f"the NVIDIA driver's {function} says {text}"))


def _without_gpu(reason: str) -> str:
    return f"compute_capability {CURRENT} needs a GPU in this machine: {reason}"
