"""Identity of everything that KV values depend on besides tokens and adapters, for KV that outlives the process."""

from __future__ import annotations

import platform
from pathlib import Path

from .. import _core
from ..common.file_digest import sha256_of


def kv_identity(engine_checksum: str) -> str:
    """Returns a text that is equal only if KV has equal bits.

    It depends on the engine file; on this build, because another build's kernels may sum in another order; on the C
    library, whose cosines rotate queries and keys; and on the CPU's features, by which that library chooses among its
    functions.
    """
    return " ".join([engine_checksum, sha256_of(Path(_core.__file__)), *platform.libc_ver(), *_core.cpu_kernels()])
