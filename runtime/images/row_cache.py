"""Rows of images, kept within a budget of bytes, and each computed once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

from .image_model import FloatArray


class RowCache:
    """Rows by the image's content and the adapter that changes them. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: maximum size of all kept rows; the newest are kept even if they are larger."""
        self.num_hits = 0
        """Number of keys whose rows were kept, or made for an equal key of the same time."""
        self.num_misses = 0
        """Number of keys whose rows were made."""
        self._max_bytes = max_bytes
        self._rows: OrderedDict[Hashable, FloatArray] = OrderedDict()
        self._num_bytes = 0
        self._running: dict[Hashable, threading.Event] = {}
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Size of all kept rows."""
        return self._num_bytes

    def rows(self, keys: Sequence[Hashable], make: Callable[[Sequence[int]], Sequence[FloatArray]]) -> list[FloatArray]:
        """Returns the rows of each key. make: returns those of the keys at these places, which are not there.

        A call first makes the rows that no other call makes, and then waits for the others. If these fail, it tries
        itself. Raises the errors of make().
        """
        found: dict[Hashable, FloatArray] = {}
        num_made = 0
        while True:
            mine: dict[Hashable, int] = {}
            others: list[threading.Event] = []
            with self._lock:
                for place, key in enumerate(keys):
                    if key in found or key in mine:
                        continue
                    if key in self._rows:
                        self._rows.move_to_end(key)
                        found[key] = self._rows[key]
                    elif (other := self._running.get(key)) is not None:
                        others.append(other)
                    else:
                        mine[key] = place
                ended = threading.Event()
                self._running.update(dict.fromkeys(mine, ended))
                self.num_misses += len(mine)
            if mine:
                try:
                    made = make(tuple(mine.values()))
                    num_made += len(mine)
                    with self._lock:
                        for key, rows in zip(mine, made, strict=True):
                            found[key] = rows
                            self._keep(key, rows)
                finally:
                    with self._lock:
                        for key in mine:
                            del self._running[key]
                    ended.set()
            for other in others:
                other.wait()
            if not others:
                break
        with self._lock:
            self.num_hits += len(keys) - num_made
        return [found[key] for key in keys]

    def _keep(self, key: Hashable, rows: FloatArray) -> None:
        self._rows[key] = rows
        self._num_bytes += rows.nbytes
        while len(self._rows) > 1 and self._num_bytes > self._max_bytes:
            self._num_bytes -= self._rows.popitem(last=False)[1].nbytes
