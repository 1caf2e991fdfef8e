"""The deployment of replicas. Each has an executor and the server's routes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Final

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from ..adapters import roots_of
from ..app import make_app
from ..async_executor import AsyncExecutor
from ..command import make_executor
from ..command_options import options_of
from ..errors import UNAVAILABLE, ApiError
from ..options import ServerOptions
from ..response_store import home_of
from ..service import Service
from .adapter_changes import AdapterChange, Files, Outcome, Refusal
from .affinity import group_of
from .forwarding import ForwardedRequest, MessageBatch, WholeAnswer, answer, whole_answer
from .options import parse_flags
from .shared_adapters import SharedAdapters

WAIT_SECONDS: Final = 60.0
"""Time to wait for changes of adapters in one call."""
RETRY_SECONDS: Final = 0.5
_LOG: Final = logging.getLogger("adaptrt.replica")


class Replica:
    """A replica. The endpoint and the coordinator call its methods."""

    # Ray Serve awaits an async __init__.
    async def __init__(  # type: ignore[misc]
        self, flags: Mapping[str, Any], coordinator: DeploymentHandle, max_groups: int
    ) -> None:
        """flags: flags of `adaptrt serve`. max_groups: number of recently used groups of adapters that routing
        considers here.

        Raises AdaptrtError, and ApiError for an adapter of lora_modules. Both end the start of the application.
        """
        args = parse_flags(flags)
        given = options_of(args)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
        self._name = serve.get_replica_context().replica_id.unique_id
        # Serve's proxies listen. The router finds the replica of a stored response by its id.
        options = replace(given, host="", response_home=home_of(self._name))
        self._coordinator = coordinator
        self._group = serve.multiplexed(max_num_models_per_replica=max_groups)(_group)
        executor = await asyncio.to_thread(make_executor, args)
        self._service = await Service.open(executor, options, self._make_adapters)
        self._adapters.finish_start()
        self._app = make_app(self._service)
        await self._adapters.follow(await coordinator.since.remote(0, 0.0))
        self._watch = asyncio.create_task(self._follow_changes())

    async def answer(self, request: ForwardedRequest) -> AsyncIterator[MessageBatch]:
        """Yields the messages of the answer as they arrive."""
        async with contextlib.aclosing(answer(self._app, request, self._name)) as batches:
            async for batch in batches:
                yield batch

    async def whole_answer(self, request: ForwardedRequest) -> WholeAnswer:
        """Returns the complete answer, for routes that merge the answers of all replicas."""
        return await whole_answer(self._app, request, self._name)

    async def check(self, change: AdapterChange) -> Outcome:
        """Calls SharedAdapters.check."""
        return await self._adapters.check(change)

    async def forget(self, digest: str) -> None:
        """Calls SharedAdapters.forget."""
        self._adapters.forget(digest)

    async def follow(self, changes: Sequence[AdapterChange]) -> Outcome:
        """Calls SharedAdapters.follow."""
        return await self._adapters.follow(changes)

    async def followed(self) -> tuple[AdapterChange, ...]:
        """Returns this replica's copy of the coordinator's log."""
        return await self._adapters.changes()

    def check_health(self) -> None:
        """Called by Serve, which replaces this replica if it raises."""
        if not self._service.executor.executor.is_alive:
            raise RuntimeError("the executor has ended")

    async def __del__(self) -> None:
        """Called by Serve when the replica shuts down in order."""
        if hasattr(self, "_watch"):
            self._watch.cancel()
        if hasattr(self, "_service"):
            await self._service.close()

    @property
    def _adapters(self) -> SharedAdapters:
        adapters = self._service.adapters
        assert isinstance(adapters, SharedAdapters)
        return adapters

    def _make_adapters(
        self, executor: AsyncExecutor, options: ServerOptions, reserved: frozenset[str]
    ) -> SharedAdapters:
        local, remote = roots_of(options)
        return SharedAdapters(
            executor,
            local,
            reserved,
            self._name,
            self._change_all,
            self._files_of,
            self._mark_present,
            remote,
            options.limits,
        )

    async def _change_all(self, change: AdapterChange) -> Refusal | None:
        refusal: Refusal | None = await self._coordinator.change.remote(change)
        return refusal

    async def _files_of(self, digest: str) -> Files:
        try:
            files: Files = await self._coordinator.files.remote(digest)
        except (RayError, RayServeException) as error:
            raise ApiError(
                f"the coordinator of adapters does not answer: {type(error).__name__}",
                status=HTTPStatus.SERVICE_UNAVAILABLE,
                kind=UNAVAILABLE,
            ) from None
        return files

    async def _mark_present(self, adapter: str) -> None:
        await self._group(group_of(adapter))

    async def _follow_changes(self) -> None:
        """Applies changes that the coordinator could not send to this replica: before it had started, or while the
        coordinator was replaced.
        """
        while True:
            try:
                number = self._adapters.followed.number
                await self._adapters.follow(await self._coordinator.since.remote(number, WAIT_SECONDS))
            except (RayError, RayServeException) as error:
                _LOG.info("the coordinator of adapters does not answer: %s", type(error).__name__)
                await asyncio.sleep(RETRY_SECONDS)


async def _group(group: str) -> str:
    """Returns the object that Serve keeps as a multiplexed model. The adapters are in the executor's cache."""
    return group
