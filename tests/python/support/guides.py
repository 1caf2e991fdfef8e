"""Random JSON schemas and regular expressions, and an executor with a random model that answers to them."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from tokenizers import Tokenizer

import adaptrt

GuideType = adaptrt.GuidedDecodingParams.GuideType
ENDINGS = '"}],: 0123456789'
"""Characters that bring a JSON text nearer to its end than most others."""

_names = st.text(string.ascii_letters + "_ é", min_size=1, max_size=4)
_scalars = st.none() | st.booleans() | st.integers(-1000, 1000) | st.text('ab "\\\n€', max_size=3)


def _range(name: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return (
        st.lists(values, min_size=2, max_size=2)
        .map(sorted)
        .map(lambda ends: {"type": name, "minimum": ends[0], "maximum": ends[1]})
    )


def _lengths(low: str, high: str) -> st.SearchStrategy[dict[str, int]]:
    return st.tuples(st.integers(0, 2), st.integers(0, 3)).map(lambda ends: {low: ends[0], high: sum(ends)})


_leaves = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": "integer"}, {"type": "string", "format": "date"}]),
    _range("integer", st.integers(-10000, 10000)),
    _range("number", st.integers(-400, 400).map(lambda quarters: quarters / 4)),
    _lengths("minLength", "maxLength").map(lambda lengths: {"type": "string", **lengths}),
    st.sampled_from(["^[a-f]{2,4}$", "^x?(yz)+$", "^[0-9]{3}-[A-Z]$"]).map(
        lambda text: {"type": "string", "pattern": text}
    ),
    st.lists(_scalars, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    _scalars.map(lambda value: {"const": value}),
)


def _object(properties: Mapping[str, Any], required: Sequence[bool]) -> dict[str, Any]:
    chosen = [name for name, wanted in zip(properties, required, strict=False) if wanted]
    return {"type": "object", "properties": properties, "required": chosen, "additionalProperties": False}


def _compound(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    arrays = st.tuples(inner, _lengths("minItems", "maxItems"))
    return st.one_of(
        arrays.map(lambda parts: {"type": "array", "items": parts[0], **parts[1]}),
        st.builds(
            _object,
            st.dictionaries(_names, inner, min_size=1, max_size=3),
            st.lists(st.booleans(), min_size=3, max_size=3),
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
    )


schemas = st.recursive(_leaves, _compound, max_leaves=6)

_atoms = st.sampled_from(["a", "b", " ", r"\.", "[0-9]", "[a-c]", "[^ab]", "é", "(x|yz)"])
patterns = st.lists(
    st.tuples(_atoms, st.sampled_from(["", "", "?", "{2,3}", "{0,2}"])).map("".join), min_size=1, max_size=5
).map("".join)


def json_schema(schema: Any) -> adaptrt.GuidedDecodingParams:
    return adaptrt.GuidedDecodingParams(GuideType.JSON_SCHEMA, json.dumps(schema))


def regex(pattern: str) -> adaptrt.GuidedDecodingParams:
    return adaptrt.GuidedDecodingParams(GuideType.REGEX, pattern)


def ending_bias(tokenizer: Tokenizer, vocab_size: int, end_id: int, strength: float = 10.0) -> np.ndarray:
    """Returns a bias towards the ends of JSON texts, for a temperature of about 4. Without it, few texts would end."""
    bias = np.zeros(vocab_size, np.float32)
    bias[[token for letter in ENDINGS for token in tokenizer.encode(letter).ids]] = strength
    bias[end_id] = strength
    return bias
