"""What a process holds."""

from __future__ import annotations

import ctypes
import gc
import sys
from dataclasses import dataclass

LIBC = ctypes.CDLL(None)
CAN_MEASURE = hasattr(LIBC, "mallinfo2")
"""glibc 2.33 or later."""


class _HeapInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    ))  # fmt: skip


@dataclass(frozen=True)
class Held:
    """By the C heap, in bytes, and by Python, in blocks of its own allocator and in objects."""

    heap: int
    blocks: int
    objects: int

    def __sub__(self, other: Held) -> Held:
        return Held(self.heap - other.heap, self.blocks - other.blocks, self.objects - other.objects)


def held() -> Held:
    """Now, without garbage.

    The heap counts what is allocated in all of its arenas. Resident memory is not a measure: what is free in an
    arena, and how much of it there is, depends on what ran before.
    """
    gc.collect()
    mallinfo = LIBC.mallinfo2
    mallinfo.restype = _HeapInfo
    info = mallinfo()
    return Held(int(info.uordblks + info.hblkhd), sys.getallocatedblocks(), len(gc.get_objects()))
