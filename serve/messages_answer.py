"""Renders an answer's parts as Anthropic's message: a body with blocks, and events of a stream."""

from __future__ import annotations

import uuid
from typing import Any, Final, TypeAlias

from .answer_parts import CallArguments, CallBegin, CallEnd, ReasoningPart, TextPart, parsed_arguments
from .conversation import SplitAnswer
from .generation import TextPiece
from .receipts import ReceiptMaker

Event: TypeAlias = dict[str, Any]

_DELTAS: Final = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""Type and field of a block's deltas by the block's type."""


class MessageAnswer:
    """A message that is being generated. Methods return the events of what they add, in order."""

    def __init__(self, model: str, num_prompt_tokens: int, *, is_cut: bool) -> None:
        """is_cut: max_tokens was cut to the context."""
        self._model = model
        self._message_id = f"msg_{uuid.uuid4().hex}"
        self._num_prompt_tokens = num_prompt_tokens
        self._num_cached_tokens = 0
        self._num_answer_tokens = 0
        self._num_thinking_tokens = 0
        self._is_cut = is_cut
        self._blocks: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        """The block that is open, which is the last one."""
        self._written: list[str] = []
        """Pieces of the open block's text or input."""
        self._has_calls = False
        self.receipt: ReceiptMaker | None = None
        """Makes the receipt if the client asks for one."""
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    def body(self) -> dict[str, Any]:
        """Returns the message as far as it has arrived. Leaves out a call whose input is not complete."""
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [block for block in self._blocks if "input" not in block or block["input"] is not None],
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": self._usage(),
            **self._receipt(),
        }

    def begin(self) -> list[Event]:
        """Begins the message."""
        return [{"type": "message_start", "message": self.body()}, {"type": "ping"}]

    async def add(self, piece: TextPiece, split: SplitAnswer) -> list[Event]:
        """Adds a piece; `split` splits it. The last piece ends the message."""
        if self.receipt is not None:
            self.receipt.add(0, piece)
        parts = await split.parts(piece)
        self._num_answer_tokens += len(piece.token_ids)
        self._num_cached_tokens = piece.num_cached_tokens
        events: list[Event] = []
        for part in parts:
            if isinstance(part, TextPart):
                events += self._add_text("text", part.text)
            elif isinstance(part, ReasoningPart):
                events += self._add_text("thinking", part.text)
            elif isinstance(part, CallBegin):
                events += self._close()
                events.append(self._begin({"type": "tool_use", "id": part.call_id, "name": part.name, "input": None}))
            elif isinstance(part, CallArguments):
                events.append(self._delta(part.text))
            elif isinstance(part, CallEnd):
                assert self._open is not None
                self._has_calls = True
                self._open["input"] = parsed_arguments("".join(self._written))
                events += self._close()
        self._num_thinking_tokens = split.num_reasoning_tokens
        if piece.finish_reason is not None:
            events += self._finish(piece.finish_reason, piece.stop_reason)
        return events

    def _finish(self, reason: str, stop: str | int | None) -> list[Event]:
        events = self._close()
        if reason != "stop":
            is_full = reason == "length" and self._is_cut
            self._stop_reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif isinstance(stop, str):
            self._stop_reason, self._stop_sequence = "stop_sequence", stop
        else:
            self._stop_reason = "tool_use" if self._has_calls else "end_turn"
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        end = {"type": "message_delta", "delta": delta, "usage": self._usage(), **self._receipt()}
        return [*events, end, {"type": "message_stop"}]

    def _add_text(self, kind: str, text: str) -> list[Event]:
        """Adds text to the open block, which must be of this type; otherwise opens one."""
        events: list[Event] = []
        if self._open is None or self._open["type"] != kind:
            events += self._close()
            more = {"citations": None} if kind == "text" else {"signature": ""}
            events.append(self._begin({"type": kind, kind: "", **more}))
        return [*events, self._delta(text)]

    def _begin(self, block: dict[str, Any]) -> Event:
        self._open = block
        self._written = []
        self._blocks.append(block)
        shown = {**block, "input": {}} if block["type"] == "tool_use" else dict(block)
        return {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": shown}

    def _delta(self, text: str) -> Event:
        assert self._open is not None
        self._written.append(text)
        kind, field = _DELTAS[self._open["type"]]
        index = len(self._blocks) - 1
        return {"type": "content_block_delta", "index": index, "delta": {"type": kind, field: text}}

    def _close(self) -> list[Event]:
        """Ends the open block, if there is one."""
        block, self._open = self._open, None
        if block is None:
            return []
        if block["type"] != "tool_use":
            block[block["type"]] = "".join(self._written)
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _receipt(self) -> dict[str, Any]:
        """Returns the field of an answer that has ended."""
        if self.receipt is None or self._stop_reason is None:
            return {}
        return {"receipt": self.receipt.content()}

    def _usage(self) -> dict[str, Any]:
        # Clients add up the three counts of the prompt. Before the first piece, no token counts as cached.
        return {
            "input_tokens": self._num_prompt_tokens - self._num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._num_cached_tokens,
            "output_tokens": self._num_answer_tokens,
            "output_tokens_details": {"thinking_tokens": self._num_thinking_tokens},
        }
