"""Devices: _core's interface, the modules that add a device to it, and _cuda's errors on a machine without a GPU."""

from __future__ import annotations

import ctypes
import importlib.util

import adaptrt_cuda_emulated
import pytest

from adaptrt import ConfigError, _core

needs_cuda_module = pytest.mark.skipif(
    importlib.util.find_spec("adaptrt._cuda") is None, reason="adaptrt._cuda was not built"
)


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def test_a_device_of_another_module_is_a_device_of_core() -> None:
    device = adaptrt_cuda_emulated.CudaDevice()
    assert isinstance(device, _core.Device)
    assert device.info.name == "host memory"
    assert device.info.compute_capability == (8, 0)
    free = device.memory().free_bytes
    memory = device.allocate(1000)
    assert memory.address % 256 == 0
    assert device.memory().free_bytes == free - 1000
    del memory
    assert device.memory().free_bytes == free


def test_exceptions_of_another_module_are_errors_of_core() -> None:
    with pytest.raises(ConfigError, match="there is no GPU 3"):
        adaptrt_cuda_emulated.CudaDevice(3)
    # The other module throws these errors within calls of methods that _core binds.
    device = adaptrt_cuda_emulated.CudaDevice(total_bytes=10)
    with pytest.raises(ConfigError, match="gives no 11 bytes; 10 of 10 bytes are free"):
        device.allocate(11)
    device.fail("make_stream", for_good=True)
    with pytest.raises(_core.EngineError, match="cannot be used any more"):
        device.make_stream()


def test_devices_need_a_vendors_module() -> None:
    with pytest.raises(TypeError, match="No constructor"):
        _core.Device()


@needs_cuda_module
@pytest.mark.skipif(has_driver(), reason="there is an NVIDIA driver")
def test_without_a_driver_the_device_says_so() -> None:
    from adaptrt import _cuda

    with pytest.raises(ConfigError, match=r"no NVIDIA driver .*libcuda\.so\.1.* needs one for CUDA \d+\.\d+ or newer"):
        _cuda.CudaDevice()
    assert issubclass(_cuda.CudaDevice, _core.Device)
