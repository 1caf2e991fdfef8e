"""The executor on ranks other than 0: only rank 0 accepts requests."""

from __future__ import annotations

import atexit
import threading
import weakref
from types import TracebackType
from typing import Any, Final

from .. import _core
from .._core import RequestError
from .ranks import Ranks


class RankExecutor:
    """Runs a rank's share of an engine until rank 0's executor shuts down, as in TensorRT-LLM's leader mode."""

    def __init__(self, engine: _core.Engine, ranks: Ranks) -> None:
        """Starts to follow rank 0 in a new thread."""
        self._ranks: Final = ranks
        self._failure: Exception | None = None
        self._thread: Final = threading.Thread(target=self._serve, args=(engine,), name="adaptrt-rank", daemon=True)
        self._thread.start()
        atexit.register(_wait_for, weakref.ref(self))

    def can_enqueue_requests(self) -> bool:
        """False: only rank 0 accepts requests."""
        return False

    def is_alive(self) -> bool:
        """True while it follows rank 0."""
        return self._thread.is_alive()

    def shutdown(self) -> None:
        """Waits until rank 0's executor has shut down. Raises EngineError if a rank was lost."""
        while self._thread.is_alive():
            self._thread.join(timeout=1.0)  # a timeout lets Ctrl-C interrupt
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> RankExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(_core.Executor, name):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        raise RequestError(
            f"{name} is called on rank {self._ranks.rank} of {self._ranks.size}; accepted: on rank 0, where "
            "can_enqueue_requests() is True"
        )

    def _serve(self, engine: _core.Engine) -> None:
        try:
            _core.serve_rank(engine, self._ranks.communicator)
        except Exception as error:  # shutdown() raises it
            self._failure = error


def _wait_for(executor: weakref.ref[RankExecutor]) -> None:
    """Waits at exit: TensorRT-LLM's scripts end on ranks other than 0 while rank 0 still has requests."""
    alive = executor()
    if alive is not None:
        alive.shutdown()
