"""Renders an answer's parts as Ollama's objects: one for a whole answer, or one per line of a stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any, Final, TypeAlias

from ..runtime.adapter_tokenizers import TextTokenizer
from .answer_parts import CallArguments, CallBegin, CallEnd, ReasoningPart, TextPart, parsed_arguments
from .conversation import SplitAnswer
from .generation import TextPiece
from .openai_answers import chat_log_probs
from .records import newest_generation

_NANOSECONDS: Final = 1_000_000_000

Said: TypeAlias = dict[str, Any]
"""Texts and calls of an answer: text, thinking, tool_calls. Empty ones are absent."""
Render: TypeAlias = Callable[[Said], dict[str, Any]]


def chat_fields(said: Said) -> dict[str, Any]:
    """Returns the fields of a chat's answer."""
    more = {name: said[name] for name in ("thinking", "tool_calls") if name in said}
    return {"message": {"role": "assistant", "content": said.get("text", ""), **more}}


def prompt_fields(said: Said) -> dict[str, Any]:
    """Returns the fields of a prompt's answer, which calls no functions."""
    return {"response": said.get("text", "")} | ({"thinking": said["thinking"]} if "thinking" in said else {})


def timestamp(seconds: float) -> str:
    """Returns a time since the epoch as in Ollama's answers."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def nanoseconds(seconds: float) -> int:
    """Converts seconds."""
    return round(seconds * _NANOSECONDS)


def loaded_object(render: Render, model: str) -> dict[str, Any]:
    """Returns the answer to a request without prompt, which only loads the model."""
    return _object(render, model, {}, done=True) | {"done_reason": "load"}


def _object(render: Render, model: str, said: Said, *, done: bool) -> dict[str, Any]:
    return {"model": model, "created_at": timestamp(time.time()), **render(said), "done": done}


class LoadTime:
    """The time of a request until its model was ready, and since it began."""

    def __init__(self) -> None:
        self.began: Final = time.monotonic()
        self._loaded = self.began

    def end(self) -> None:
        """Notes that the model is ready."""
        self._loaded = time.monotonic()

    def fields(self) -> dict[str, int]:
        """Returns the fields of an answer that ends now."""
        return {
            "total_duration": nanoseconds(time.monotonic() - self.began),
            "load_duration": nanoseconds(self._loaded - self.began),
        }


class OllamaAnswer:
    """An answer that is being generated."""

    def __init__(
        self,
        render: Render,
        model: str,
        num_prompt_tokens: int,
        tokenizer: TextTokenizer,
        load_time: LoadTime,
        *,
        with_log_probs: bool,
    ) -> None:
        """render: chat_fields or prompt_fields. model: the name that the request gave."""
        self._render = render
        self._model = model
        self._num_prompt_tokens = num_prompt_tokens
        self._num_answer_tokens = 0
        self._tokenizer = tokenizer
        self._load_time = load_time
        self._with_log_probs = with_log_probs
        self._names: dict[int, tuple[str, str]] = {}
        """Id and name of the calls that have begun, by index."""
        self._arguments: dict[int, list[str]] = {}

    async def whole(self, piece: TextPiece, split: SplitAnswer) -> dict[str, Any]:
        """Returns the answer without streaming."""
        said = await self._said(piece, split)
        return self._object(said, done=True) | self._log_probs(piece) | self._end(piece)

    async def chunks(self, piece: TextPiece, split: SplitAnswer) -> list[dict[str, Any]]:
        """Returns the objects of a piece. The last piece ends the answer with an object without text."""
        said = await self._said(piece, split)
        log_probs = self._log_probs(piece)
        chunks = [self._object(said, done=False) | log_probs] if said or log_probs else []
        if piece.finish_reason is not None:
            chunks.append(self._object({}, done=True) | self._end(piece))
        return chunks

    async def _said(self, piece: TextPiece, split: SplitAnswer) -> Said:
        self._num_answer_tokens += len(piece.token_ids)
        said: Said = {}
        for part in await split.parts(piece):
            if isinstance(part, TextPart):
                said["text"] = said.get("text", "") + part.text
            elif isinstance(part, ReasoningPart):
                said["thinking"] = said.get("thinking", "") + part.text
            elif isinstance(part, CallBegin):
                self._names[part.index] = (part.call_id, part.name)
                self._arguments[part.index] = []
            elif isinstance(part, CallArguments):
                self._arguments[part.index].append(part.text)
            elif isinstance(part, CallEnd):
                call_id, name = self._names[part.index]
                arguments = parsed_arguments("".join(self._arguments.pop(part.index)))
                call = {"id": call_id, "function": {"index": part.index, "name": name, "arguments": arguments}}
                said.setdefault("tool_calls", []).append(call)
        return said

    def _object(self, said: Said, *, done: bool) -> dict[str, Any]:
        return _object(self._render, self._model, said, done=done)

    def _log_probs(self, piece: TextPiece) -> dict[str, Any]:
        if not self._with_log_probs or not piece.log_probs:
            return {}
        return {"logprobs": chat_log_probs(piece.log_probs, self._tokenizer.texts)["content"]}

    def _end(self, piece: TextPiece) -> dict[str, Any]:
        generation = newest_generation()
        return {
            "done_reason": piece.finish_reason,
            **self._load_time.fields(),
            "prompt_eval_count": self._num_prompt_tokens,
            "prompt_eval_duration": nanoseconds(0.0 if generation is None else generation.prompt_seconds),
            "eval_count": self._num_answer_tokens,
            "eval_duration": nanoseconds(0.0 if generation is None else generation.answer_seconds),
        }
