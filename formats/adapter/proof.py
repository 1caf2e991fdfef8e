"""Proofs of adapters: log probs that an adapter must give, in a file in its directory (docs/formats.md)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from ..._core import AdapterError
from ...common.json_fields import MAX_INTEGER, load_json_object
from ...common.shown_value import shown

PROOF_FILE: Final = "adapter_proof.json"
FORMAT: Final = 1
"""Version of the format."""
MAX_PROOF_BYTES: Final = 1 << 20
MAX_PROMPTS: Final = 32
MAX_PROMPT_TOKENS: Final = 4096
MAX_TEXT: Final = 16_384
"""Maximum number of characters of a prompt."""
MAX_TOP: Final = 20
"""Maximum number of log probs at one position: that of executors."""
MAX_TOLERANCE: Final = 10.0
_FIELDS: Final = ("format", "tolerance", "prompts")
_PROMPT_FIELDS: Final = ("token_ids", "text", "adapter", "base")
_TOPS: Final = ("adapter", "base")

TopLogProbs: TypeAlias = tuple[tuple[int, float], ...]
"""Tokens with their log probs."""


@dataclass(frozen=True)
class ProvenPrompt:
    """A prompt, and log probs of the token that follows it."""

    token_ids: tuple[int, ...] | None
    """None: `text` is tokenised."""
    text: str | None
    """With token_ids: a text that the adapter's tokenizer must turn into them."""
    adapter: TopLogProbs
    base: TopLogProbs
    """The same of the base model without the adapter."""


@dataclass(frozen=True)
class AdapterProof:
    """Content of an adapter_proof.json."""

    tolerance: float
    """Maximum difference of a log prob."""
    prompts: tuple[ProvenPrompt, ...]

    def to_json(self) -> str:
        """Returns the content of the file."""
        prompts = [
            {
                **({} if one.token_ids is None else {"token_ids": one.token_ids}),
                **({} if one.text is None else {"text": one.text}),
                "adapter": one.adapter,
                "base": one.base,
            }
            for one in self.prompts
        ]
        return json.dumps({"format": FORMAT, "tolerance": self.tolerance, "prompts": prompts}, ensure_ascii=False)

    def difference(self) -> float:
        """Returns the largest difference between adapter and base of a token that both list; infinity if a list has
        tokens that the other lacks.
        """
        found = 0.0
        for prompt in self.prompts:
            base = dict(prompt.base)
            if base.keys() != dict(prompt.adapter).keys():
                return math.inf
            found = max(found, *(abs(log_prob - base[token]) for token, log_prob in prompt.adapter))
        return found


def read_proof(directory: Path) -> AdapterProof | None:
    """Reads the proof in an adapter's directory; None: there is none. Raises AdapterError for an invalid file."""
    path = directory / PROOF_FILE
    if not path.exists():
        return None
    return parse_proof(load_json_object(path, AdapterError, max_bytes=MAX_PROOF_BYTES), str(path))


def parse_proof(content: Mapping[str, Any], subject: str) -> AdapterProof:
    """Checks the fields of a proof. Raises AdapterError, whose message begins with `subject`."""
    _check_fields(content, _FIELDS, subject, "")
    if type(content.get("format")) is not int or content["format"] != FORMAT:
        raise _error(subject, "format", content.get("format"), str(FORMAT))
    tolerance: Any = content.get("tolerance")
    if not _is_number(tolerance) or not 0 < tolerance <= MAX_TOLERANCE:
        raise _error(subject, "tolerance", tolerance, f"a number above 0, at most {MAX_TOLERANCE:g}")
    prompts = _list(content.get("prompts"), subject, "prompts", MAX_PROMPTS)
    return AdapterProof(
        float(tolerance), tuple(_prompt(one, subject, f"prompts[{index}]") for index, one in enumerate(prompts))
    )


def _prompt(content: Any, subject: str, place: str) -> ProvenPrompt:
    if not isinstance(content, dict):
        raise _error(subject, place, content, "an object")
    _check_fields(content, _PROMPT_FIELDS, subject, f"{place}.")
    token_ids, text = content.get("token_ids"), content.get("text")
    if token_ids is None and text is None:
        raise AdapterError(f"{subject}: {place} has no prompt; expected token_ids, text, or both")
    if text is not None and (not isinstance(text, str) or not 0 < len(text) <= MAX_TEXT):
        raise _error(subject, f"{place}.text", text, f"1 to {MAX_TEXT} characters")
    if token_ids is not None:
        field = f"{place}.token_ids"
        token_ids = tuple(_token(one, subject, field) for one in _list(token_ids, subject, field, MAX_PROMPT_TOKENS))
    return ProvenPrompt(token_ids, text, *(_top(content.get(name), subject, f"{place}.{name}") for name in _TOPS))


def _top(content: Any, subject: str, place: str) -> TopLogProbs:
    found: dict[int, float] = {}
    for one in _list(content, subject, place, MAX_TOP):
        if not isinstance(one, list) or len(one) != 2:
            raise _error(subject, place, one, "pairs of a token id and its log prob")
        token, log_prob = _token(one[0], subject, place), one[1]
        if not _is_number(log_prob) or log_prob > 0:
            raise _error(subject, place, log_prob, f"a finite log prob of at most 0 for token {token}")
        if token in found:
            raise AdapterError(f"{subject}: {place} has token {token} more than once; expected different tokens")
        found[token] = float(log_prob)
    return tuple(found.items())


def _token(value: Any, subject: str, place: str) -> int:
    if type(value) is not int or not 0 <= value <= MAX_INTEGER:
        raise _error(subject, place, value, f"token ids from 0 to {MAX_INTEGER}")
    return value


def _list(value: Any, subject: str, place: str, most: int) -> Sequence[Any]:
    if not isinstance(value, list) or not 0 < len(value) <= most:
        given = f"a list of {len(value)}" if isinstance(value, list) else shown(value)
        raise AdapterError(f"{subject}: {place} is {given}; expected a list of 1 to {most}")
    return value


def _is_number(value: Any) -> bool:
    # A large integer has no float.
    return (type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) <= MAX_INTEGER)


def _check_fields(content: Mapping[str, Any], known: Sequence[str], subject: str, place: str) -> None:
    for name in content:
        if name not in known:
            raise AdapterError(f"{subject}: {place}{name[:64]} is not known; accepted: {', '.join(known)}")


def _error(subject: str, place: str, value: Any, expected: str) -> AdapterError:
    return AdapterError(f"{subject}: {place} is {shown(value)}; expected {expected}")
