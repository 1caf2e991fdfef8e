"""The GPU's maximum rates, measured in the same run as the kernels."""

from __future__ import annotations

import torch
from machine import Machine

_COPIED_ELEMENTS = 1 << 29
_PRODUCT_SIZE = 8192
# Larger than the cache of any GPU.
_BYTES_IN_A_ROW = 400e6


def measure_rates(machine: Machine) -> dict[str, float]:
    """Returns the bytes per second that the fastest operation moves, and the operations per second of a bfloat16 matrix
    product.
    """
    source = torch.randn(_COPIED_ELEMENTS, device=machine.device).bfloat16()
    destination = torch.empty_like(source)
    # A copy does not reach the maximum: kernels that read more than they write are faster.
    rates = {
        "copied": 2.0 * source.nbytes / machine.seconds(lambda: destination.copy_(source), 5),
        "doubled": 2.0 * source.nbytes / machine.seconds(lambda: torch.mul(source, 2, out=destination), 5),
        "read": source.nbytes / machine.seconds(lambda: source.amax(), 5),
    }
    return {
        **{f"bytes_{name}_per_second": rate for name, rate in rates.items()},
        "bytes_per_second": max(rates.values()),
        "flops_per_second": _product_flops(machine),
    }


def limit_microseconds(rates: dict[str, float], bytes_moved: float, flops: float) -> float:
    """Returns the minimum time: the longer of the times for the bytes and for the operations."""
    return 1e6 * max(bytes_moved / rates["bytes_per_second"], flops / rates["flops_per_second"])


def steps_in_a_row(bytes_moved: float, most: int) -> int:
    """Returns the number of different steps to time one after another, so that no step finds its data in the cache."""
    return max(1, min(most, round(_BYTES_IN_A_ROW / bytes_moved)))


def _product_flops(machine: Machine) -> float:
    a, b = (torch.randn(_PRODUCT_SIZE, _PRODUCT_SIZE, device=machine.device).bfloat16() for _ in range(2))
    product = torch.empty_like(a)

    def multiply() -> None:
        torch.matmul(a, b, out=product)

    return 2.0 * _PRODUCT_SIZE**3 / machine.seconds(multiply, 5)
