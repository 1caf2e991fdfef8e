"""The deployment that handles all changes of adapters, one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any, Final

from ray import serve

from ...runtime.adapter_versions import VersionLimits
from ..errors import UNAVAILABLE, ApiError
from .adapter_changes import AdapterChange, ChangeLog, Files, Outcome, Refusal, refusal_of
from .calls import call_all
from .shared_adapters import unknown_everywhere

CALL_SECONDS: Final = 300.0
"""Time for replicas to read and convert an adapter."""
RESTORE_SECONDS: Final = 10.0
_LOG: Final = logging.getLogger("adaptrt.coordinator")


class AdapterCoordinator:
    """A deployment with a single replica. If it is restarted, it gets its log back from the other replicas' copies."""

    def __init__(self, replicas: str, limits: VersionLimits) -> None:
        """replicas: name of the replicas' deployment in this application. limits: of old versions for new replicas."""
        self._replicas: Any = serve.get_deployment_handle(replicas)
        self._log = ChangeLog(limits)
        self._changing = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._restored: asyncio.Task[None] | None = None

    async def change(self, wanted: AdapterChange) -> Refusal | None:
        """Makes a change at all replicas. Returns a refusal if the change was not made, or if it failed at a replica,
        which the refusal names.
        """
        await self._restore()
        async with self._changing:
            checked = await self._at_all("check", wanted)
            refusal = self._refusal_to(wanted, checked)
            if refusal is not None:
                if wanted.digest is not None and not isinstance(checked, Refusal):
                    await self._at_all("forget", wanted.digest)
                return refusal
            change = dataclasses.replace(wanted, number=self._log.number + 1)
            self._log.add(change)
            async with self._changed:
                self._changed.notify_all()
            # Replicas that started in the meantime have asked for all changes, or wait for this one in since().
            followed = await self._at_all("follow", (change.without_files(),))
            if isinstance(followed, Refusal):
                return followed
            return refusal_of({outcome.replica: outcome.refusal for outcome in followed})

    @staticmethod
    def _refusal_to(wanted: AdapterChange, checked: Sequence[Outcome] | Refusal) -> Refusal | None:
        """Returns the reason why a change is not made after the replicas have checked it."""
        if isinstance(checked, Refusal):
            return checked
        refusal = refusal_of({outcome.replica: outcome.refusal for outcome in checked})
        if refusal is None and wanted.is_unload and not any(outcome.was_known for outcome in checked):
            return unknown_everywhere(wanted.name)
        return refusal

    async def files(self, digest: str) -> Files:
        """Returns the files of a sent adapter for a replica that did not check it; empty if they are not needed."""
        await self._restore()
        return self._log.files(digest)

    async def since(self, number: int, seconds: float) -> tuple[AdapterChange, ...]:
        """Returns the changes after the change of this number, without files. Waits up to `seconds` until there are
        some."""
        await self._restore()
        async with self._changed:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(lambda: self._log.number > number), seconds)
            return tuple(change.without_files() for change in self._log.since(number))

    async def _restore(self) -> None:
        """Restores the log of the previous coordinator if there was one."""
        if self._restored is None:
            self._restored = asyncio.create_task(self._ask_for_log())
        await asyncio.shield(self._restored)

    async def _ask_for_log(self) -> None:
        # While the application starts, no replica can answer.
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            answers = await call_all(self._replicas, "followed", seconds=RESTORE_SECONDS)
            logs: Sequence[tuple[AdapterChange, ...]] = answers.values
            self._log.adopt(max(logs, key=_number_of, default=()))

    async def _at_all(self, method: str, argument: Any) -> Sequence[Outcome] | Refusal:
        try:
            answers = await call_all(self._replicas, method, argument, seconds=CALL_SECONDS)
        except (TimeoutError, asyncio.TimeoutError):
            return _unavailable(f"not all replicas answered within {CALL_SECONDS:g} s")
        for failure in answers.failures:
            _LOG.error("%s at a replica failed: %s", method, failure)
        if answers.failures:
            return _unavailable("a replica failed; the server's log has it")
        if not answers.values:
            return _unavailable("no replica runs")
        return answers.values


def _number_of(changes: Iterable[AdapterChange]) -> int:
    return max((change.number for change in changes), default=0)


def _unavailable(message: str) -> Refusal:
    return Refusal.of(ApiError(message, status=HTTPStatus.SERVICE_UNAVAILABLE, kind=UNAVAILABLE))
