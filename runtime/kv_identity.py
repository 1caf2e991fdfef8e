"""What KV that outlives the process depends on, besides tokens and adapters."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

from .. import _core


def kv_identity(engine_checksum: str) -> str:
    """The same text for the same bits of KV.

    Of the engine's file; of this build, whose kernels may sum in another order than another build's; of the C library,
    whose cosines turn queries and keys; and of the CPU's features, by which that library chooses among its own.
    """
    library = hashlib.sha256(Path(_core.__file__).read_bytes()).hexdigest()
    return " ".join([engine_checksum, library, *platform.libc_ver(), *_core.cpu_kernels()])
