"""Counts the work that an event loop does while other tasks wait. It reads no clock: all machines count alike."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from types import FrameType, SimpleNamespace, TracebackType
from typing import Any, Final

import pytest

from adaptrt.runtime.adapter_tokenizers import TextTokenizer
from adaptrt.serve import time_slices

JSON_CHARACTERS: Final = 16
"""Characters of JSON that count as one step. Each character that is tokenised counts as one."""
STEPS_PER_SECOND: Final = 1e6
"""Rate of the clock that time slices read."""


class LoopWork:
    """Counts the most steps of one iteration of the running loop, within its `async with`. Ready tasks wait as long.

    A step is one call of a function on the loop's thread. For tokenizers and JSON, their characters count in addition.
    Time slices end after a number of steps, too.
    """

    def __init__(self) -> None:
        self.longest = 0
        """Most steps of one iteration."""
        self._thread = 0
        self._steps = 0
        self._patch = pytest.MonkeyPatch()

    async def __aenter__(self) -> LoopWork:
        self._thread = threading.get_ident()
        self._patch.setattr(time_slices, "time", SimpleNamespace(perf_counter=lambda: self._steps / STEPS_PER_SECOND))
        self._weigh(TextTokenizer, "encode", lambda args, result: len(args[1]))
        self._weigh(json.JSONDecoder, "decode", lambda args, result: len(args[1]) // JSON_CHARACTERS)
        self._weigh(json.JSONEncoder, "encode", lambda args, result: len(result) // JSON_CHARACTERS)
        loop: Any = asyncio.get_running_loop()
        run_once = loop._run_once

        def measured() -> None:
            begin = self._steps
            run_once()
            self.longest = max(self.longest, self._steps - begin)

        self._patch.setattr(loop, "_run_once", measured)
        await asyncio.sleep(0)
        sys.setprofile(self._count)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.sleep(0)  # counts this iteration
        sys.setprofile(None)
        self._patch.undo()

    def _count(self, frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            self._steps += 1

    def _weigh(self, owner: type, name: str, steps: Callable[[tuple[Any, ...], Any], int]) -> None:
        """Adds steps to each call of a method on the loop's thread."""
        method = getattr(owner, name)

        def weighed(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            if threading.get_ident() == self._thread:
                self._steps += steps(args, result)
            return result

        self._patch.setattr(owner, name, weighed)
