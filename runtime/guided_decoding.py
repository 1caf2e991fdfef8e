"""Guided decoding: prepares a tokenizer and guides for llguidance.

The executor calls llguidance's C functions directly; the library of the Python package exports them, and this module
finds their addresses. No step runs code of this module.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from .. import _core
from .._core import ConfigError, GuidedDecodingConfig, GuidedDecodingParams, RequestError
from .guide_trial import GuideLimits, GuideTrial
from .token_bytes import TokenBytes
from .tokenizer_files import TokenizerFiles

LIBRARY: Final = "llguidance"
"""The package that compiles guides."""
HOW_TO_INSTALL: Final = "guided decoding needs llguidance: pip install 'adaptrt[guided]'"
OLDEST_VERSION: Final = (1, 9)
"""Oldest supported version of llguidance. The next major version may have another C interface."""

COMPACT_JSON: Final[Mapping[str, Any]] = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
"""llguidance's options for JSON on one line, with at most one space after a comma or colon.

A model that may write any amount of whitespace may write nothing else until its limit. Both separators are patterns.
"""
_ANY_OBJECT: Final = '{"type": "object"}'
_SPECIAL: Final = b"\xff"
"""Byte with which llguidance marks special tokens. It does not occur in text."""


def make_grammar_compiler(
    tokenizer: Tokenizer, vocab_size: int, stop_token_ids: Sequence[int], limits: GuideLimits | None = None
) -> _core.GrammarCompiler:
    """Makes the compiler of requests' guides for a model of `vocab_size` tokens.

    Each guide is first tried in another process within the limits; see guide_trial.py.

    Raises ConfigError without llguidance, and for a tokenizer whose tokens' bytes are unknown.
    """
    if not stop_token_ids:
        raise ConfigError(
            "guided decoding needs a token that ends an output: the engine has no eos_token_id; give stop_token_ids"
        )
    if outside := [token for token in stop_token_ids if not 0 <= token < vocab_size]:
        raise ConfigError(f"stop_token_ids has {outside[0]}; the vocabulary is 0 to {vocab_size - 1}")
    llguidance, functions = _load_llguidance()
    tokens = token_bytes(tokenizer, vocab_size, stop_token_ids)
    special = {token[1:].decode() for token in tokens if token.startswith(_SPECIAL)}
    trial = GuideTrial(llguidance.__file__, tokens, stop_token_ids, limits or GuideLimits())

    def translate(params: GuidedDecodingParams) -> tuple[str, str, int]:
        kind, grammar = _grammar_of(params, llguidance, special)
        return kind, grammar, trial.compile(kind, grammar)

    return _core.make_llguidance_compiler(functions, tokens, list(stop_token_ids), translate)


def grammar_compiler_of(
    config: GuidedDecodingConfig | None,
    tokenizer_file: Path,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    limits: GuideLimits | None = None,
) -> _core.GrammarCompiler:
    """Makes the same compiler from an executor's configuration; the engine provides the other values. Raises
    ConfigError.
    """
    if config is not None and config.tokenizer_str is not None:
        try:
            tokenizer = Tokenizer.from_str(config.tokenizer_str)
        except Exception as error:  # tokenizers raises plain Exception
            raise ConfigError(f"tokenizer_str: cannot be read as a tokenizer: {error}") from error
    elif tokenizer_file.exists():
        tokenizer = TokenizerFiles.read(tokenizer_file).make(vocab_size).tokenizer
    else:
        raise ConfigError(f"guided decoding needs a tokenizer: there is no {tokenizer_file}; give tokenizer_str")
    stop_token_ids = eos_token_ids
    if config is not None and config.stop_token_ids is not None:
        stop_token_ids = config.stop_token_ids
    return make_grammar_compiler(tokenizer, vocab_size, stop_token_ids, limits)


def token_bytes(tokenizer: Tokenizer, vocab_size: int, stop_token_ids: Sequence[int] = ()) -> list[bytes]:
    """Returns the bytes that each token adds to a text, for llguidance: special and stop tokens begin with 0xFF.

    The bytes are empty for ids without a token. Raises ConfigError for more tokens than `vocab_size`, and for decoders
    other than ByteLevel, ByteFallback and Metaspace.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if (highest := max(vocabulary.values(), default=0)) >= vocab_size:
        raise ConfigError(f"the tokenizer has token {highest}; the engine's vocabulary is 0 to {vocab_size - 1}")
    of_tokens = TokenBytes(tokenizer)
    if not of_tokens.is_known:
        raise ConfigError(
            f"guided decoding needs to know the bytes of tokens, and the tokenizer's decoder is "
            f"{sorted(of_tokens.kinds)}; accepted: ByteLevel, ByteFallback, Metaspace"
        )
    added = tokenizer.get_added_tokens_decoder()
    tokens = [b""] * vocab_size
    for token, number in vocabulary.items():
        if number in stop_token_ids or (number in added and added[number].special):
            tokens[number] = _SPECIAL + token.encode()
        else:
            tokens[number] = of_tokens.of(token) or b""
    return tokens


def with_json_options(schema: str, options: Mapping[str, Any]) -> str:
    """Returns a JSON schema with llguidance's options for the format of the JSON.

    The schema's own options, under "x-guidance", take precedence: llguidance uses the last of two equal keys. A text
    that is no schema is returned unchanged, so that llguidance reports the error.
    """
    text = schema.strip(" \t\r\n")
    if text == "true":  # the schema of any JSON
        text = "{}"
    if not text.startswith("{"):
        return schema
    rest = text[1:].lstrip(" \t\r\n")
    return f'{{"x-guidance": {json.dumps(options)}{"" if rest.startswith("}") else ", "}{rest}'


def lark_of(grammar: str) -> str:
    """Returns a grammar in llguidance's Lark. Raises RequestError for a grammar that cannot be converted, and
    ConfigError without llguidance.
    """
    llguidance, _ = _load_llguidance()
    try:
        return str(llguidance.gbnf_to_lark.any_to_lark(grammar))
    except Exception as error:  # the conversion raises many types of errors
        raise RequestError(f"the guide cannot be compiled: {error}") from error


def _load_llguidance() -> tuple[Any, dict[str, int]]:
    """Returns the llguidance package and the addresses of its C functions."""
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError(HOW_TO_INSTALL) from error
    version = metadata.version("llguidance")
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if not OLDEST_VERSION <= numbers < (OLDEST_VERSION[0] + 1,):
        oldest = ".".join(map(str, OLDEST_VERSION))
        raise ConfigError(f"llguidance is {version}; accepted: {oldest} or newer, below {OLDEST_VERSION[0] + 1}")
    library = ctypes.CDLL(llguidance._lib.__file__)
    functions = {}
    for name in _core.llguidance_functions():
        try:
            functions[name] = ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
        except AttributeError as error:
            raise ConfigError(f"llguidance {version} does not export {name}, which guided decoding calls") from error
    return llguidance, functions


def _grammar_of(params: GuidedDecodingParams, llguidance: Any, special: set[str]) -> tuple[str, str]:
    """Returns llguidance's name of the language, and the grammar. Raises RequestError."""
    kind, guide = params.guide_type, params.guide or ""
    kinds = GuidedDecodingParams.GuideType
    if kind is kinds.JSON:
        return "json_schema", with_json_options(_ANY_OBJECT, COMPACT_JSON)
    if kind is kinds.JSON_SCHEMA:
        _check_json(guide)
        return "json_schema", with_json_options(guide, COMPACT_JSON)
    if kind is kinds.REGEX:
        return "regex", guide
    try:
        if kind is kinds.EBNF_GRAMMAR:
            return "llguidance", llguidance.grammar_from("grammar", guide)
        grammar = _structural_tag(guide, llguidance, special)
    except RequestError:
        raise
    except Exception as error:  # the package's conversions raise many types of errors
        raise RequestError(f"the guide cannot be compiled: {error}") from error
    return ("llguidance" if grammar.startswith("{") else "lark"), grammar


def _check_json(guide: str) -> None:
    """Raises RequestError for invalid JSON. Positions in the error count from the guide's own beginning, without added
    options.
    """
    try:
        json.loads(guide)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the guide is not JSON: {error}") from error


_TAG_LISTS: Final = {"structures", "triggers"}


@dataclass(frozen=True)
class TagStructure:
    """JSON between two texts, which must follow if the first one begins with the trigger."""

    trigger: str
    begin: str
    schema: str
    """The JSON schema as a text, with options."""
    end: str


def tag_structures(guide: str) -> list[TagStructure]:
    """Parses a structural tag in TensorRT-LLM's form: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}.

    Raises RequestError for anything else.
    """
    _check_json(guide)
    content = json.loads(guide)
    has_lists = isinstance(content, dict) and all(isinstance(content.get(key), list) for key in _TAG_LISTS)
    if not has_lists or set(content) - {"type"} != _TAG_LISTS:
        raise RequestError('the guide is not a structural tag; accepted: {"structures": [...], "triggers": [...]}')
    triggers = [trigger for trigger in content["triggers"] if isinstance(trigger, str)]
    tags = []
    for i, structure in enumerate(content["structures"]):
        if not isinstance(structure, dict) or set(structure) != {"begin", "schema", "end"}:
            raise RequestError(f"structures[{i}] of the guide is not a structure; accepted: begin, schema and end")
        begin, schema, end = structure["begin"], structure["schema"], structure["end"]
        if not isinstance(begin, str) or not isinstance(end, str):
            raise RequestError(f"begin and end of structures[{i}] of the guide are no texts; accepted: texts")
        trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
        if not trigger:
            raise RequestError(f"structures[{i}].begin of the guide, {begin!r}, begins with none of the triggers")
        text = schema if isinstance(schema, str) else json.dumps(schema)
        tags.append(TagStructure(trigger, begin, with_json_options(text, COMPACT_JSON), end))
    if not tags:
        raise RequestError("structures of the guide is empty; accepted: one or more")
    return tags


def _structural_tag(guide: str, llguidance: Any, special: set[str]) -> str:
    """Returns the grammar of a structural tag. Raises like tag_structures()."""
    tags = tag_structures(guide)
    # llguidance treats either all triggers in angle brackets as special tokens, or none of them.
    bracketed = {tag.trigger for tag in tags if tag.trigger.startswith("<") and tag.trigger.endswith(">")}
    if bracketed & special and bracketed - special:
        raise RequestError(
            f"triggers of the guide has special tokens and {sorted(bracketed - special)}; accepted: either"
        )
    made = [llguidance.StructTag(trigger=tag.trigger, begin=tag.begin, grammar=tag.schema, end=tag.end) for tag in tags]
    return str(llguidance.StructTag.to_grammar(made, assume_special=bool(bracketed & special)))
