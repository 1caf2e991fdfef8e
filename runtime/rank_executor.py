"""What an executor is on the ranks that do not lead: requests are rank 0's."""

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
    """Runs a rank's share of an engine until rank 0's executor is shut down, as TensorRT-LLM's leader mode has it."""

    def __init__(self, engine: _core.Engine, ranks: Ranks) -> None:
        """Begins to do what rank 0 says, in a thread of its own."""
        self._ranks: Final = ranks
        self._failure: Exception | None = None
        self._thread: Final = threading.Thread(target=self._serve, args=(engine,), name="adaptrt-rank", daemon=True)
        self._thread.start()
        atexit.register(_wait_for, weakref.ref(self))

    def can_enqueue_requests(self) -> bool:
        """False: requests are rank 0's."""
        return False

    def is_alive(self) -> bool:
        """Whether it still does what rank 0 says."""
        return self._thread.is_alive()

    def shutdown(self) -> None:
        """Returns when rank 0's executor was shut down. Raises EngineError where a rank was lost."""
        while self._thread.is_alive():
            self._thread.join(timeout=1.0)  # so that Ctrl-C is seen
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
        except Exception as error:  # which shutdown() raises
            self._failure = error


def _wait_for(executor: weakref.ref[RankExecutor]) -> None:
    """Scripts of TensorRT-LLM's end on ranks that do not lead while rank 0 still has requests."""
    alive = executor()
    if alive is not None:
        alive.shutdown()
