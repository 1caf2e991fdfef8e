"""Identity of everything that KV values depend on besides tokens and adapters, for KV that outlives the process."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

from .. import _core


def kv_identity(engine_checksum: str) -> str:
    """Returns a text that is equal only if KV has equal bits.

    It depends on the engine file; on this build, because another build's kernels may sum in another order; on the C
    library, whose cosines rotate queries and keys; and on the CPU's features, by which that library chooses among its
    functions.
    """
    library = hashlib.sha256(Path(_core.__file__).read_bytes()).hexdigest()
    return " ".join([engine_checksum, library, *platform.libc_ver(), *_core.cpu_kernels()])
