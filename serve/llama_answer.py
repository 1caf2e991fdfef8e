"""Renders a completion in llama.cpp's form: a body, and events of a stream."""

from __future__ import annotations

from typing import Any

from ..runtime.adapter_tokenizers import TextTokenizer
from ..runtime.token_log_probs import TokenLogProbs
from .generation import TextPiece
from .openai_answers import token_log_probs
from .records import newest_generation

_STOP_TYPES = {"stop": "eos", "length": "limit", "abort": "limit"}


class LlamaAnswer:
    """An answer that is being generated."""

    def __init__(
        self, model: str, prompt: str, num_prompt_tokens: int, own: TextTokenizer, *, with_tokens: bool
    ) -> None:
        """with_tokens: True: the whole answer has its token ids."""
        self._model = model
        self._prompt = prompt
        self._num_prompt_tokens = num_prompt_tokens
        self._num_answer_tokens = 0
        self._own = own
        self._with_tokens = with_tokens

    def whole(self, piece: TextPiece) -> dict[str, Any]:
        """Returns the answer without streaming."""
        self._num_answer_tokens = len(piece.token_ids)
        tokens = list(piece.token_ids) if self._with_tokens else []
        return {"content": piece.text, "tokens": tokens, **self._probabilities(piece), **self._end(piece)}

    def events(self, piece: TextPiece) -> list[dict[str, Any]]:
        """Returns the events of a piece. The last one has no text, but the counts and times."""
        self._num_answer_tokens += len(piece.token_ids)
        events = []
        if piece.text or piece.token_ids:
            tokens = list(piece.token_ids)
            events.append({"content": piece.text, "tokens": tokens, "stop": False, **self._probabilities(piece)})
        if piece.finish_reason is not None:
            events.append({"content": "", "tokens": [], **self._end(piece)})
        return events

    def _probabilities(self, piece: TextPiece) -> dict[str, Any]:
        if not piece.log_probs:
            return {}
        return {"completion_probabilities": [self._probability(entry) for entry in piece.log_probs]}

    def _probability(self, entry: TokenLogProbs) -> dict[str, Any]:
        made = token_log_probs(entry, self._own.texts)
        tops = [{"id": token, **top} for (token, _), top in zip(entry.top, made["top_logprobs"], strict=True)]
        return {"id": entry.token_id, **made, "top_logprobs": tops}

    def _end(self, piece: TextPiece) -> dict[str, Any]:
        reason = piece.finish_reason or "stop"
        is_word = isinstance(piece.stop_reason, str)
        return {
            "stop": True,
            "stop_type": "word" if is_word else _STOP_TYPES[reason],
            "stopping_word": piece.stop_reason if is_word else "",
            "model": self._model,
            "prompt": self._prompt,
            "id_slot": -1,
            "tokens_predicted": self._num_answer_tokens,
            "tokens_evaluated": self._num_prompt_tokens,
            "tokens_cached": piece.num_cached_tokens,
            "truncated": False,
            "timings": self._timings(piece.num_cached_tokens),
        }

    def _timings(self, num_cached_tokens: int) -> dict[str, Any]:
        generation = newest_generation()
        prompt = 0.0 if generation is None else generation.prompt_seconds
        answer = 0.0 if generation is None else generation.answer_seconds
        num_computed = self._num_prompt_tokens - num_cached_tokens
        return {
            "cache_n": num_cached_tokens,
            **_speed("prompt", num_computed, prompt),
            **_speed("predicted", self._num_answer_tokens, answer),
        }


def _speed(name: str, num_tokens: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": num_tokens,
        f"{name}_ms": seconds * 1000,
        f"{name}_per_token_ms": seconds * 1000 / num_tokens if num_tokens else 0.0,
        f"{name}_per_second": num_tokens / seconds if seconds else 0.0,
    }
