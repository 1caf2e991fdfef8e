"""The executor on ranks other than 0: only rank 0 accepts requests."""

from __future__ import annotations

import atexit
import threading
import weakref
from typing import Any, Final

from .. import _core
from .._core import RequestError
from .executor import Executor, ExecutorType
from .ranks import Ranks

_HERE: Final = frozenset({"can_enqueue_requests", "is_alive", "refusal", "shutdown"})
"""Public attributes of executors that this one has too."""


class _RankExecutorType(ExecutorType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the object without pybind11's check that the class in C++ is initialised."""
        return type.__call__(self, *args, **kwargs)


class RankExecutor(Executor, metaclass=_RankExecutorType):
    """Runs a rank's share of an engine until rank 0's executor shuts down, as in TensorRT-LLM's leader mode.

    Other methods of executors raise RequestError.
    """

    def __init__(self, engine: _core.Engine, ranks: Ranks) -> None:
        """Starts to follow rank 0 in a new thread."""
        # The base class is not initialised: its executor in C++ would take the engine.
        self._ranks: Final = ranks
        self._failure: Exception | None = None
        self._thread: Final = threading.Thread(target=self._serve, args=(engine,), name="adaptrt-rank", daemon=True)
        self._thread.start()
        atexit.register(_wait_for, weakref.ref(self))

    def can_enqueue_requests(self) -> bool:
        """False: only rank 0 accepts requests."""
        return False

    @property
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

    def refusal(self, name: str) -> RequestError:
        """Returns the error for a method that only rank 0 has."""
        return RequestError(
            f"{name} is called on rank {self._ranks.rank} of {self._ranks.size}; accepted: on rank 0, where "
            "can_enqueue_requests() is True"
        )

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name not in _HERE and hasattr(Executor, name):
            raise self.refusal(name)
        return super().__getattribute__(name)

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
