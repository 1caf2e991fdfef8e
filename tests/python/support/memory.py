"""Measures the memory that a process uses."""

from __future__ import annotations

import ctypes
import gc
import sys
from dataclasses import dataclass

LIBC = ctypes.CDLL(None)
CAN_MEASURE = hasattr(LIBC, "mallinfo2")
"""True with glibc 2.33 or later."""


class _HeapInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    ))  # fmt: skip


@dataclass(frozen=True)
class Held:
    """Memory in use: bytes of the C heap, and Python's memory blocks and objects."""

    heap: int
    blocks: int
    objects: int

    def __sub__(self, other: Held) -> Held:
        return Held(self.heap - other.heap, self.blocks - other.blocks, self.objects - other.objects)


def held() -> Held:
    """Measures now, after garbage collection.

    The heap's number covers all of its arenas. Resident memory is not used, because it includes free memory of arenas,
    whose amount depends on what ran before.
    """
    gc.collect()
    mallinfo = LIBC.mallinfo2
    mallinfo.restype = _HeapInfo
    info = mallinfo()
    return Held(int(info.uordblks + info.hblkhd), sys.getallocatedblocks(), len(gc.get_objects()))
