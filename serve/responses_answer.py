"""Renders an answer's parts as a response: a body with items, and events of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

from ..runtime.adapter_tokenizers import TokenTexts
from ..runtime.token_log_probs import TokenLogProbs
from .answer_parts import CallArguments, CallBegin, CallEnd, ReasoningPart, TextPart
from .conversation import SplitAnswer
from .errors import ApiError
from .generation import TextPiece
from .json_answer import Items
from .openai_answers import MANY_ENTRIES, token_log_probs
from .openai_chat_fields import Message
from .receipts import ReceiptMaker
from .response_store import new_response_id
from .turns import Turns

Event: TypeAlias = dict[str, Any]

COMPLETED: Final = "completed"
INCOMPLETE: Final = "incomplete"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"
IN_PROGRESS: Final = "in_progress"
_INCOMPLETE_REASONS: Final = {"length": "max_output_tokens", "abort": "max_request_seconds"}
"""Reasons by finish reason."""
_ID_PREFIXES: Final = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def item_id(kind: str) -> str:
    """Makes a unique id for an item of this type."""
    return f"{_ID_PREFIXES[kind]}_{uuid.uuid4().hex}"


class _LogProbs:
    """Log probs of tokens in the format of chats. Each entry is made when it is written."""

    def __init__(self, entries: Sequence[TokenLogProbs], texts: TokenTexts) -> None:
        self._entries = entries
        self._texts = texts

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (token_log_probs(entry, self._texts) for entry in self._entries)

    def content(self) -> list[dict[str, Any]] | Items:
        """Returns the list for an answer."""
        return Items(self) if len(self._entries) > MANY_ENTRIES else list(self)


class ResponseAnswer:
    """A response that is being generated.

    Each method that takes in a part of the answer returns its events in order. Whole answers leave the events out.
    """

    def __init__(
        self, echo: dict[str, Any], num_prompt_tokens: int, log_prob_texts: TokenTexts | None, home: str = ""
    ) -> None:
        """echo: fields of the body that repeat the request. log_prob_texts: texts of tokens; None: no log probs. home:
        see new_response_id().
        """
        self.response_id: Final = new_response_id(home)
        self.status = IN_PROGRESS
        self.output: Final[list[dict[str, Any]]] = []
        self._echo = echo
        self._created = int(time.time())
        self._num_prompt_tokens = num_prompt_tokens
        self._num_cached_tokens = 0
        self._num_answer_tokens = 0
        self._num_reasoning_tokens = 0
        self._texts = log_prob_texts
        self._item: dict[str, Any] | None = None
        """The item that is open, the last one of the output."""
        self._written: list[str] = []
        """Pieces of the open item's text or arguments."""
        self._log_probs: list[TokenLogProbs] = []
        """Log probs of tokens that belong to no text yet, such as parts of a character."""
        self._item_log_probs: list[TokenLogProbs] = []
        """Log probs of the open item's text."""
        self.receipt: ReceiptMaker | None = None
        """Makes the receipt if the client asks for one."""
        self._error: dict[str, str] | None = None
        self._incomplete_reason: str | None = None
        self._ended: int | None = None
        self._num_events = 0
        self._has_items = False
        """True if the output contains Items."""

    def body(self) -> dict[str, Any]:
        """Returns the body as far as the answer has arrived."""
        is_over = self.status != IN_PROGRESS
        incomplete = None if self._incomplete_reason is None else {"reason": self._incomplete_reason}
        output = list(self.output)
        has_items = self._has_items
        if self._item is not None:
            written = self._written_fields()
            output[-1] = self._item | written
            has_items |= isinstance(written.get("content"), Items)
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self._created,
            "completed_at": self._ended if self.status == COMPLETED else None,
            "status": self.status,
            "error": self._error,
            "incomplete_details": incomplete,
            "output": Items(output) if has_items else output,
            "usage": self._usage() if is_over else None,
            **self._echo,
            **self._receipt(),
        }

    def begin(self) -> list[Event]:
        """Begins the response."""
        return [self._event(f"response.{state}", response=self.body()) for state in ("created", IN_PROGRESS)]

    async def add(self, piece: TextPiece, split: SplitAnswer) -> list[Event]:
        """Adds a piece; `split` splits it. The last piece ends the response."""
        if self.receipt is not None:
            self.receipt.add(0, piece)
        parts = await split.parts(piece)
        self._num_reasoning_tokens = split.num_reasoning_tokens
        self._num_answer_tokens += len(piece.token_ids)
        self._num_cached_tokens = piece.num_cached_tokens
        events: list[Event] = []
        self._log_probs += piece.log_probs
        for part in parts:
            if isinstance(part, TextPart):
                events += self._add_text("message", part.text, self._log_probs_of(part))
            elif isinstance(part, ReasoningPart):
                events += self._add_text("reasoning", part.text)
            elif isinstance(part, CallBegin):
                events += self._close(COMPLETED)
                call = {"call_id": part.call_id, "name": part.name, "arguments": ""}
                events.append(self._open("function_call", **call))
            elif isinstance(part, CallArguments):
                self._written.append(part.text)
                events.append(self._item_event("function_call_arguments.delta", delta=part.text))
            elif isinstance(part, CallEnd):
                events += self._close(COMPLETED, is_whole_call=True)
        if piece.finish_reason is not None:
            events += self._finish(piece.finish_reason)
        return events

    def messages(self) -> list[Message]:
        """Returns the answer as messages of a conversation. Leaves out calls that are not complete."""
        turns = Turns()
        for item in self.output:
            if item["type"] == "function_call":
                if item["status"] == COMPLETED:
                    turns.add_call(item["call_id"], item["name"], item["arguments"])
                continue
            content = item["content"]
            (text,) = (part["text"] for part in (content.items if isinstance(content, Items) else content))
            if item["type"] == "reasoning":
                turns.add_reasoning(text)
            else:
                turns.add_text([text])
        return turns.finish()

    def cancel(self) -> None:
        """Marks the response as cancelled. Its last piece still follows."""
        self.status = CANCELLED

    def fail(self, error: ApiError) -> list[Event]:
        """Ends the response with an error."""
        self._keep_rest()
        events = self._close(INCOMPLETE)
        self._error = {"code": "server_error", "message": str(error)}
        return [*events, self._end(FAILED, "response.failed")]

    def _finish(self, reason: str) -> list[Event]:
        status = COMPLETED if reason == "stop" and self.status != CANCELLED else INCOMPLETE
        events: list[Event] = []
        if not self.output:
            events += self._add_text("message", "")
        self._keep_rest()
        events += self._close(status)
        if self.status == CANCELLED:
            return [*events, self._end(CANCELLED, "response.incomplete")]
        if status == INCOMPLETE:
            self._incomplete_reason = _INCOMPLETE_REASONS[reason]
        return [*events, self._end(status, f"response.{status}")]

    def _end(self, status: str, event: str) -> Event:
        self.status = status
        self._ended = int(time.time())
        return self._event(event, response=self.body())

    def _log_probs_of(self, part: TextPart) -> list[TokenLogProbs]:
        """Removes the log probs of the tokens up to the end of a text. Returns those that are not before it."""
        before = [entry for entry in self._log_probs if entry.text_offset < part.end]
        self._log_probs = [entry for entry in self._log_probs if entry.text_offset >= part.end]
        return [entry for entry in before if entry.text_offset >= part.begin]

    def _keep_rest(self) -> None:
        """Adds the log probs of tokens without text at the end of an answer that ends with a message."""
        if self._item is not None and self._item["type"] == "message":
            self._item_log_probs += self._log_probs
        self._log_probs = []

    def _add_text(self, kind: str, text: str, log_probs: Sequence[TokenLogProbs] = ()) -> list[Event]:
        """Adds text to the open item, which must be of this type; otherwise opens one."""
        events: list[Event] = []
        if self._item is None or self._item["type"] != kind:
            events += self._close(COMPLETED)
            opened: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            events.append(self._open(kind, **opened, content=[]))
            events.append(self._item_event("content_part.added", content_index=0, part=self._part("")))
        if not text:
            return events
        self._written.append(text)
        delta: dict[str, Any] = {"content_index": 0, "delta": text}
        if kind == "message":
            self._item_log_probs += log_probs
            delta["logprobs"] = self._content_of(log_probs)
        return [*events, self._item_event(f"{self._text_name()}.delta", **delta)]

    def _open(self, kind: str, **fields: Any) -> Event:
        self._item = {"id": item_id(kind), "type": kind, "status": IN_PROGRESS, **fields}
        self._written, self._item_log_probs = [], []
        self.output.append(self._item)
        return self._event("response.output_item.added", output_index=len(self.output) - 1, item=dict(self._item))

    def _close(self, status: str, *, is_whole_call: bool = False) -> list[Event]:
        """Ends the open item, if there is one. is_whole_call: False: an open call lacks the end of its arguments."""
        item = self._item
        if item is None:
            return []
        if item["type"] == "function_call" and not is_whole_call:
            status = INCOMPLETE
        text = "".join(self._written)
        item |= {"status": status, **self._written_fields()}
        if item["type"] == "function_call":
            events = [self._item_event("function_call_arguments.done", name=item["name"], arguments=text)]
        else:
            self._has_items |= isinstance(item["content"], Items)
            done: dict[str, Any] = {"content_index": 0, "text": text}
            if item["type"] == "message":
                done["logprobs"] = self._content_of(self._item_log_probs)
            events = [
                self._item_event(f"{self._text_name()}.done", **done),
                self._item_event("content_part.done", content_index=0, part=self._part(text)),
            ]
        events.append(self._event("response.output_item.done", output_index=len(self.output) - 1, item=dict(item)))
        self._item = None
        return events

    def _written_fields(self) -> dict[str, Any]:
        """Returns the fields of the open item that have its text or arguments so far."""
        assert self._item is not None
        text = "".join(self._written)
        if self._item["type"] == "function_call":
            return {"arguments": text}
        part = self._part(text)
        return {"content": Items([part]) if isinstance(part.get("logprobs"), Items) else [part]}

    def _text_name(self) -> str:
        assert self._item is not None
        return "output_text" if self._item["type"] == "message" else "reasoning_text"

    def _part(self, text: str) -> dict[str, Any]:
        kind = self._text_name()
        if kind == "reasoning_text":
            return {"type": kind, "text": text}
        log_probs = self._content_of(self._item_log_probs)
        return {"type": kind, "text": text, "annotations": [], "logprobs": log_probs}

    def _item_event(self, name: str, /, **fields: Any) -> Event:
        assert self._item is not None
        return self._event(f"response.{name}", item_id=self._item["id"], output_index=len(self.output) - 1, **fields)

    def _event(self, name: str, /, **fields: Any) -> Event:
        number = self._num_events
        self._num_events += 1
        return {"type": name, "sequence_number": number, **fields}

    def _content_of(self, entries: Sequence[TokenLogProbs]) -> list[dict[str, Any]] | Items:
        return [] if self._texts is None else _LogProbs(tuple(entries), self._texts).content()

    def _receipt(self) -> dict[str, Any]:
        """Returns the field of a response that has ended without an error."""
        if self.receipt is None or self._ended is None or self._error is not None:
            return {}
        return {"receipt": self.receipt.content()}

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self._num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": self._num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self._num_answer_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
            "total_tokens": self._num_prompt_tokens + self._num_answer_tokens,
        }
