"""Rows of images, kept within a budget of bytes, and each computed once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

from .image_model import FloatArray


class RowCache:
    """Rows by the image's content and the adapter that changes them. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: maximum size of all kept rows; the newest are kept even if they are larger."""
        self.num_hits = 0
        """Number of calls whose rows were kept, or computed by a call that ran at the same time."""
        self.num_misses = 0
        self._max_bytes = max_bytes
        self._rows: OrderedDict[Hashable, FloatArray] = OrderedDict()
        self._num_bytes = 0
        self._running: dict[Hashable, threading.Event] = {}
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Size of all kept rows."""
        return self._num_bytes

    def rows(self, key: Hashable, make: Callable[[], FloatArray]) -> FloatArray:
        """Returns the rows of a key, and calls make() if they are not there.

        A call waits while another one makes the same rows. If that one fails, the call tries itself. Raises the errors
        of make().
        """
        while True:
            with self._lock:
                if key in self._rows:
                    self.num_hits += 1
                    self._rows.move_to_end(key)
                    return self._rows[key]
                other = self._running.get(key)
                if other is None:
                    self.num_misses += 1
                    ended = self._running[key] = threading.Event()
                    break
            other.wait()
        try:
            made = make()
            with self._lock:
                self._keep(key, made)
            return made
        finally:
            with self._lock:
                del self._running[key]
            ended.set()

    def _keep(self, key: Hashable, rows: FloatArray) -> None:
        self._rows[key] = rows
        self._num_bytes += rows.nbytes
        while len(self._rows) > 1 and self._num_bytes > self._max_bytes:
            self._num_bytes -= self._rows.popitem(last=False)[1].nbytes
