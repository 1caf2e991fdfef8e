"""The requests of tenants on the event loop: they wait here until they may enter the executor."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Final

from .._core import ConfigError, Request, Response
from .admission import AdmissionQueue, Ticket
from .openai_fields import MAX_PRIORITY
from .options import ServerOptions
from .records import current_request
from .tenants import read_tenants

_LOG: Final = logging.getLogger("adaptrt.tenants")
_TARGET_PRIORITY: Final = 1 / (4 * MAX_PRIORITY)
"""Added to the priority of a request with a target: half of a step between clients' priorities."""


class TenantGate:
    """Admission of requests by the rules of a file. Call all methods on the event loop."""

    def __init__(self, path: Path, options: ServerOptions, room: int) -> None:
        """Reads the rules. room: see AdmissionQueue. Raises ConfigError."""
        self._path = path
        self._api_keys = options.api_keys
        self.queue: Final = AdmissionQueue(
            read_tenants(path, options.api_keys), room=room, max_waiting=options.max_queue_size, now=time.monotonic()
        )
        self._reloading = asyncio.Lock()

    @classmethod
    def of_options(cls, options: ServerOptions, room: int) -> TenantGate | None:
        """Returns the gate of a server with these options; None: it has no tenants. Raises ConfigError."""
        return None if options.tenants is None else cls(options.tenants, options, room)

    async def reload(self) -> None:
        """Reads the file again. If it cannot be used, logs why and keeps the rules."""
        async with self._reloading:
            try:
                rules = await asyncio.to_thread(read_tenants, self._path, self._api_keys)
            except ConfigError as error:
                _LOG.error("the rules of tenants stay as they are: %s", error)
                return
            self.queue.replace(rules, time.monotonic())
            _LOG.info("read the rules of %d tenants from %s", len(rules.tenants), self._path)

    async def enter(self, request: Request, adapter: str | None) -> Admitted:
        """Waits until a request may enter the executor. Raises ApiError with status 429 if it is refused, and
        ExecutorClosedError.

        adapter: a name, or the digits of a task_id; None: the base model.
        """
        record = current_request.get()
        tenant = self.queue.rules.tenant_of("" if record is None else record.client, adapter)
        entered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ticket = self.queue.offer(
            tenant,
            group=object() if record is None else record,
            num_tokens=_num_prompt_tokens(request) + request.max_tokens * (request.num_return_sequences or 1),
            priority=request.priority,
            now=time.monotonic(),
            on_enter=lambda: None if entered.done() else entered.set_result(None),
            on_lost=lambda error: None if entered.done() else entered.set_exception(error),
        )
        admitted = Admitted(self.queue, ticket, _num_prompt_tokens(request))
        self.queue.enter_waiting(time.monotonic())
        try:
            await entered
        except BaseException:
            admitted.end()
            raise
        if ticket.is_targeted:
            request.priority = min(1.0, request.priority + _TARGET_PRIORITY)
        return admitted


class Admitted:
    """A request that entered."""

    def __init__(self, queue: AdmissionQueue, ticket: Ticket, num_prompt_tokens: int) -> None:
        """Called only by TenantGate.enter."""
        self._queue = queue
        self._ticket = ticket
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = 0

    def begin(self) -> None:
        """Notes that the executor has the request."""
        self._num_tokens = self._num_prompt_tokens

    def note(self, response: Response) -> None:
        """Counts the tokens of a response of the request."""
        if response.has_error():
            self.end()
            return
        result = response.result
        num_tokens = len(result.output_token_ids[0])
        self._num_tokens += num_tokens
        if num_tokens or result.is_final:
            self._queue.start(self._ticket, time.monotonic())
        if result.is_final:
            self.end()

    def end(self) -> None:
        """Ends the request. May be called again."""
        self._queue.end(self._ticket, self._num_tokens, time.monotonic())


def _num_prompt_tokens(request: Request) -> int:
    return len(request.input_token_ids) + len(request.encoder_input_token_ids or ())
