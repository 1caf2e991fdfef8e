"""The files of a tokenizer: tokenizer.json, and the files next to it that may list more tokens.

transformers adds those tokens when it loads a tokenizer. This module does so too, by the same rules and in the same
order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import xxhash
from tokenizers import AddedToken, Tokenizer

from .._core import ConfigError
from ..common.json_fields import describe, load_json_object
from ..common.regular_file import read_regular
from ..formats.adapter.adapter_copy import ADDED_TOKENS_FILE, SPECIAL_TOKENS_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE

_MAX_FILE_BYTES: Final = 256 << 20
"""Ten times the size of the largest vocabularies' files. Limited because adapters may come from clients."""
_MAX_SIDE_FILE_BYTES: Final = 1 << 26
"""Large enough for the files next to tokenizer.json, which list at most some thousands of added tokens."""
_NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA: Final = "extra_special_tokens"
_OLD_EXTRA: Final = "additional_special_tokens"
_DECODER: Final = "added_tokens_decoder"
_MAX_DIGITS: Final = 10
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class _SpecialTokens:
    """Tokens that a tokenizer_config.json or special_tokens_map.json calls special."""

    named: Mapping[str, AddedToken] = field(default_factory=dict)
    """Tokens by field, such as eos_token."""
    extra: tuple[AddedToken, ...] = ()
    """Tokens of extra_special_tokens, whose old name is additional_special_tokens."""


class MadeTokenizer(NamedTuple):
    """A tokenizer, and the tokens without an id in its files."""

    tokenizer: Tokenizer
    without_id: frozenset[str]
    """Tokens that the files call special but give no id. They come last, and a model may have no row for them."""


@dataclass(frozen=True)
class TokenizerFiles:
    """Content of the files of one tokenizer."""

    path: Path
    """Path of tokenizer.json."""
    content: bytes
    """Bytes of tokenizer.json."""
    stated: Mapping[int, AddedToken]
    """Tokens by id that another file lists: tokenizer_config.json or added_tokens.json."""
    stated_in: Path
    """Path of the file that lists them."""
    special: _SpecialTokens

    @classmethod
    def read(cls, path: Path) -> TokenizerFiles:
        """Reads a tokenizer.json and the files next to it, which count only if it has that name.

        Raises ConfigError that names the invalid file and field.
        """
        try:
            content = read_regular(path, _MAX_FILE_BYTES)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        if path.name != TOKENIZER_FILE:
            return cls(path, content, {}, path, _SpecialTokens())
        config_file = path.parent / TOKENIZER_CONFIG_FILE
        config = _object(config_file)
        special = _special_tokens(config, config_file, _SpecialTokens())
        if _DECODER in config:
            return cls(path, content, _numbered_tokens(config[_DECODER], config_file), config_file, special)
        # Older versions of transformers wrote these two files; newer ones read them only without added_tokens_decoder.
        map_file, tokens_file = path.parent / SPECIAL_TOKENS_FILE, path.parent / ADDED_TOKENS_FILE
        special = _special_tokens(_object(map_file), map_file, special)
        return cls(path, content, _plain_tokens(_object(tokens_file), tokens_file, special), tokens_file, special)

    def digest(self, made: Tokenizer) -> bytes:
        """Returns a digest of the tokenizer that make() made; equal for tokenizers that work alike."""
        digest = xxhash.xxh3_128(self.content)
        digest.update(
            json.dumps(
                [(number, *_described(token)) for number, token in sorted(made.get_added_tokens_decoder().items())]
            ).encode()
        )
        return digest.digest()

    def make(self, vocab_size: int | None = None) -> MadeTokenizer:
        """Makes the tokenizer, without padding and truncation.

        Published encoders' files ask for both. Here padding tokens would be normal tokens, and long texts are rejected.

        vocab_size: tokens beyond it in the files next to tokenizer.json are not added, for example a padding token that
        the model does not have; None: all are added.

        Raises ConfigError for an invalid tokenizer.json, and for a token that would get another id than its file
        states.
        """
        try:
            tokenizer = Tokenizer.from_buffer(self.content)
        except Exception as error:  # tokenizers raises plain Exception
            raise ConfigError(f"{self.path}: cannot be read as a tokenizer: {error}") from error
        tokenizer.no_padding()
        tokenizer.no_truncation()
        new = {number: token for number, token in self.stated.items() if tokenizer.token_to_id(token.content) is None}
        added = self._added(tokenizer.get_added_tokens_decoder())
        if vocab_size is not None:
            room = max(vocab_size - tokenizer.get_vocab_size(), 0)
            beyond = [token for token in added if tokenizer.token_to_id(token.content) is None][room:]
            added = [token for token in added if token not in beyond]
        known = {token.content for token in added if tokenizer.token_to_id(token.content) is not None}
        tokenizer.add_tokens(added)
        for stated, token in new.items():
            number = tokenizer.token_to_id(token.content)
            if number not in (None, stated):
                raise ConfigError(
                    f"{self.stated_in}: token {token.content!r} has id {stated}; expected {number}, which follows the "
                    f"tokens of {self.path}"
                )
        ids = {token.content for token in self.stated.values()}
        invented = (token.content for token in added if token.content not in known)
        return MadeTokenizer(tokenizer, frozenset(invented) - ids)

    def _added(self, own: Mapping[int, AddedToken]) -> list[AddedToken]:
        """Returns the tokens to add to those of tokenizer.json, in transformers' order.

        Tokens with ids come first, then those that are only called special. A token is special if a field such as
        eos_token names it, whatever its flags are.
        """
        named = self.special.named
        names = {token.content for token in named.values()}
        tokens = dict(self.stated) if self.stated_in.name == TOKENIZER_CONFIG_FILE else {**self.stated, **own}
        added = [_as_special(token) if token.content in names else token for _, token in sorted(tokens.items())]
        known = {token.content for token in (*own.values(), *added)}
        seen: set[str] = set()
        by_name = [*(named[name] for name in _NAMED if name in named), *named.values()]
        for token in (*map(_as_special, by_name), *self.special.extra):
            # Two fields may name the same token with different flags.
            if token.content not in known and repr(token) not in seen:
                seen.add(repr(token))
                added.append(token)
        return added


def _object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; {} without the file."""
    return load_json_object(path, ConfigError, max_bytes=_MAX_SIDE_FILE_BYTES) if path.exists() else {}


def _special_tokens(config: Mapping[str, Any], path: Path, before: _SpecialTokens) -> _SpecialTokens:
    """Returns the special tokens that a file names, together with those of the file `before` it."""
    named = dict(before.named)
    for name, value in config.items():
        if value is not None and (name in _NAMED or (name.endswith("_token") and isinstance(value, str | dict))):
            named[name] = _special(value, path, name)
    name, value, extra = _EXTRA, config.get(_EXTRA), before.extra
    if not value and not extra and _OLD_EXTRA in config:
        name, value = _OLD_EXTRA, config[_OLD_EXTRA]
    if isinstance(value, dict):
        named |= {key: _special(token, path, f"{name}.{key}") for key, token in value.items()}
    elif isinstance(value, list):
        known = {token.content for token in extra}
        tokens = [_special(token, path, f"{name}[{i}]") for i, token in enumerate(value)]
        extra = (*extra, *(token for token in tokens if token.content not in known))
    elif value is not None:
        raise ConfigError(f"{path}: {name} is {describe(value)}; expected a list or an object of tokens")
    return _SpecialTokens(named, extra)


def _numbered_tokens(value: Any, path: Path) -> dict[int, AddedToken]:
    """Returns the tokens of added_tokens_decoder, by id."""
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: {_DECODER} is {describe(value)}; expected an object of tokens by id")
    tokens = {}
    for number, token in value.items():
        if not (number.isascii() and number.isdigit() and len(number) <= _MAX_DIGITS):
            raise ConfigError(f"{path}: {_DECODER} has key {describe(number)}; expected a token's id")
        tokens[int(number)] = _token(token, path, f"{_DECODER}[{number}]")
    return tokens


def _plain_tokens(ids: Mapping[str, Any], path: Path, special: _SpecialTokens) -> dict[int, AddedToken]:
    """Returns the tokens of added_tokens.json, by id. The file has no flags."""
    named = (special.named[name] for name in _NAMED if name in special.named)
    names = {token.content for token in (*named, *special.extra)}
    tokens = {}
    for text, number in ids.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise ConfigError(f"{path}: token {describe(text)} has id {describe(number)}; expected 0 or more")
        tokens[number] = AddedToken(text, normalized=text not in names, special=text in names)
    return tokens


def _special(value: Any, path: Path, name: str) -> AddedToken:
    """Parses a special token: its text, or an object with its flags."""
    if isinstance(value, str):
        return AddedToken(value, special=True)
    return _token({"special": True, **value} if isinstance(value, dict) else value, path, name)


def _token(value: Any, path: Path, name: str) -> AddedToken:
    """Parses a token: an object with its `content` and flags."""
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise ConfigError(
            f"{path}: {name} is {describe(value)}; expected a token's text, or an object with its content"
        )
    flags = {flag: on for flag, on in value.items() if flag not in ("content", "__type", "id")}
    for flag, on in flags.items():
        if flag not in _FLAGS or not isinstance(on, bool):
            raise ConfigError(f"{path}: {name}.{flag} is {describe(on)}; expected {', '.join(_FLAGS)}: true or false")
    return AddedToken(value["content"], **flags)


def _as_special(token: AddedToken) -> AddedToken:
    if token.special:
        return token
    content, flags = _described(token)
    return AddedToken(content, **{**flags, "special": True})


def _described(token: AddedToken) -> tuple[str, dict[str, bool]]:
    return token.content, {flag: getattr(token, flag) for flag in _FLAGS}
