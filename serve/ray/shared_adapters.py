"""Adapters of one replica. All replicas make the same changes, and the router learns which adapters are used here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Final

from ..._core import AdaptrtError, Request
from ...formats.sources import Source
from ...runtime.adapter_versions import without_versions
from ..adapters import ServedAdapters, unknown_adapter
from ..async_executor import AsyncExecutor, Generation
from ..errors import ApiError
from ..remote_adapters import RemoteAdapters
from ..uploaded_adapters import Upload
from ..work import WorkKind
from .adapter_changes import AdapterChange, ChangeLog, Outcome, Refusal

_LOG: Final = logging.getLogger("adaptrt.replica")


class SharedAdapters(ServedAdapters):
    """Adapters of a replica, with changes that all replicas make. Call all methods on the event loop."""

    def __init__(
        self,
        executor: AsyncExecutor,
        roots: Sequence[Path],
        reserved: frozenset[str],
        replica: str,
        change_all: Callable[[AdapterChange], Awaitable[Refusal | None]],
        mark_present: Callable[[str], Awaitable[None]],
        remote: RemoteAdapters | None = None,
    ) -> None:
        """change_all: makes a change at all replicas. mark_present: tells the router that an adapter is used here."""
        super().__init__(executor, roots, reserved, remote)
        self._replica = replica
        self._change_all = change_all
        self._mark_present = mark_present
        self._log = ChangeLog()
        self._following = asyncio.Lock()
        self._initial: frozenset[str] = frozenset()
        self._failed: dict[str, AdapterChange] = {}

    @property
    def followed(self) -> ChangeLog:
        """The changes that this replica has made."""
        return self._log

    def finish_start(self) -> None:
        """Marks the end of the start: every replica starts with the adapters that are known now."""
        self._initial = frozenset(adapter.name for adapter in self.list())

    async def resolve(self, name: str, path: str, *, replace: bool) -> str:
        """Returns the path unchanged. Names of stores are not accepted, because each replica would download them."""
        return path

    async def load(self, name: str, path: str | Source, *, replace: bool = False, pinned: bool = False) -> None:
        """Like ServedAdapters.load, at all replicas."""
        directory = await self.directory_to_load(name, path, replace=replace)
        await self._change(AdapterChange(name, str(directory), replace, pinned, is_initial=name in self._initial))

    async def load_sent(self, upload: Upload) -> str:
        """Refuses adapters that clients send: the other replicas would not have their files."""
        if upload.source.lease is not None:
            upload.source.lease.release()
        raise ApiError(
            "replicas read adapters from directories that they share; expected /v1/load_lora_adapter with lora_path",
            status=HTTPStatus.NOT_IMPLEMENTED,
        )

    async def unload(self, name: str) -> None:
        """Like ServedAdapters.unload, at all replicas. At least one of them must know the adapter."""
        await self._change(AdapterChange(name, None, is_initial=name in self._initial))

    async def submit(self, request: Request, name: str | None) -> Generation:
        """Like ServedAdapters.submit. Also tells the router that the adapter is used here."""
        if name is not None:
            await self._mark_present(without_versions(name))
        return await super().submit(request, name)

    async def check(self, change: AdapterChange) -> Outcome:
        """Checks if this replica could make a change; changes nothing."""
        was_known = self.knows(change.name)
        if change.path is not None:
            try:
                directory = await self.directory_to_load(change.name, change.path, replace=change.replace)
                attempt = self._executor.try_adapter
                await self._work.run_alone(
                    WorkKind.ADAPTERS, change.name, attempt, change.name, directory, replace=was_known
                )
            except ApiError as error:
                return Outcome(self._replica, Refusal.of(error), was_known)
            except AdaptrtError as error:
                return Outcome(self._replica, Refusal.of(ApiError.of(error)), was_known)
        return Outcome(self._replica, None, was_known)

    async def follow(self, changes: Sequence[AdapterChange]) -> Outcome:
        """Makes the changes that have not been made here, in order.

        If an adapter cannot be loaded, its name is removed here, so that it does not stand for the old adapter. The
        next request for it tries again.
        """
        refusal = None
        async with self._following:
            for change in changes:
                if change.number <= self._log.number:
                    continue
                self._log.add(change)
                try:
                    await self._make(change)
                except ApiError as error:
                    _LOG.error("replica %s cannot follow: adapter '%s': %s", self._replica, change.name, error)
                    refusal = Refusal.of(error)
        return Outcome(self._replica, refusal)

    async def _make(self, change: AdapterChange) -> None:
        self._failed.pop(change.name, None)
        if change.path is None:
            if self.knows(change.name):
                await super().unload(change.name)
            return
        try:
            await self._add(change.name, Path(change.path), replace=self.knows(change.name))
            if change.pinned:
                await self.pin(change.name)
        except ApiError:
            if self.knows(change.name):
                await super().unload(change.name)
            self._failed[change.name] = change
            raise

    async def _find_one(self, name: str) -> bool:
        if name in self._failed:
            async with self._following:
                failed = self._failed.get(name)
                if failed is not None:
                    await self._make(failed)
        return await super()._find_one(name)

    async def _change(self, change: AdapterChange) -> None:
        refusal = await self._change_all(change)
        if refusal is not None:
            raise refusal.error()


def unknown_everywhere(name: str) -> Refusal:
    """Returns the refusal to unload an adapter that no replica knows."""
    return Refusal.of(unknown_adapter(name))
