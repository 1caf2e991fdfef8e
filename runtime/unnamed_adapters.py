"""Adapters that requests bring without a name: PEFT models and tensors in memory.

Their name is made from their content, so an adapter that has not changed is converted only once.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final

from .adapter_versions import VersionHold
from .executor import Executor
from .memory_adapters import MemoryAdapters
from .named_adapter import checksum_of

PREFIX: Final = "in-memory-"
"""Begins the names of these adapters."""
_MAX_UNUSED: Final = 8
"""Number of adapters without a running call that stay for later calls."""


class HeldAdapters:
    """Adapters of a call. Those without a name stay at least as long as this object."""

    def __init__(self) -> None:
        """Holds no adapter yet."""
        self.names: list[str | None] = []
        """Name for each prompt, with the digest of the version; None: the base model."""
        self.versions: list[VersionHold] = []
        """Keep the versions from ending."""
        self.unnamed: set[str] = set()
        """Names that hold() gave."""


class UnnamedAdapters:
    """Unnamed adapters of an executor. Thread-safe."""

    def __init__(self, executor: Executor, memory: MemoryAdapters) -> None:
        """memory: writes the adapters."""
        self._executor = executor
        self._memory = memory
        self._directories: OrderedDict[str, Path] = OrderedDict()
        self._held: weakref.WeakSet[HeldAdapters] = weakref.WeakSet()
        self._lock = threading.Lock()

    def hold(self, source: Any, held: HeldAdapters) -> str:
        """Adds the adapter as it is now, unless its content is known, and returns its name.

        The adapters that were used longest ago are removed, except those of calls that still run. Raises AdapterError,
        LoraCacheFullError and EngineError like LLM.load_lora(); nothing is added then.
        """
        with self._lock:
            self._held.add(held)
            directory = self._memory.write(source)
            try:
                name = PREFIX + checksum_of("in memory", directory)
                if name in self._directories and self._executor.adapters.knows(name):
                    self._memory.remove(directory)
                else:
                    self._executor.add_adapter(name, directory)
                    self._directories[name] = directory
            except BaseException:
                self._memory.remove(directory)
                raise
            self._directories.move_to_end(name)
            held.unnamed.add(name)
            self._remove_unused()
        return name

    def _remove_unused(self) -> None:
        in_use = {name for held in self._held for name in held.unnamed}
        unused = [name for name in self._directories if name not in in_use]
        for name in unused[: max(len(unused) - _MAX_UNUSED, 0)]:
            directory = self._directories.pop(name)
            if self._executor.adapters.knows(name):
                self._executor.remove_adapter(name)
            self._memory.remove(directory)
