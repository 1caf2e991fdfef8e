"""A TextStream's pieces are the text that decoding everything at once gives, cut where a stop string begins."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tokenizers import Tokenizer, decoders

from adaptrt.runtime.text_stream import TextStream
from support.tokenizers import byte_level, metaspace


def with_metaspace_decoder() -> Tokenizer:
    tokenizer = metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


TOKENIZERS = {
    "byte_level": byte_level(),
    "metaspace": metaspace(),
    "metaspace_decoder": with_metaspace_decoder(),
}


def reference(text: str, stop: list[str]) -> tuple[str, str | None]:
    """The text before the first stop string, character by character."""
    for end in range(len(text) + 1):
        found = [word for word in stop if text[:end].endswith(word)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@st.composite
def answers(draw: Any) -> tuple[str, list[int], list[int], list[str]]:
    """A tokenizer, tokens of which many are bytes, where they are split, and stop strings that are likely to occur."""
    name = draw(st.sampled_from(sorted(TOKENIZERS)))
    tokenizer = TOKENIZERS[name]
    size = tokenizer.get_vocab_size()
    texts = st.text(st.sampled_from("hello .€😀\n</|é"), max_size=6).map(
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    )
    # Beyond the vocabulary as well: models' vocabularies are padded.
    tokens = st.lists(st.one_of(texts, st.lists(st.integers(0, size + 3), max_size=4)), max_size=8)
    ids = [token for part in draw(tokens) for token in part]
    splits = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    text = tokenizer.decode(ids)
    parts = st.builds(lambda begin, length: text[begin : begin + length], st.integers(0, 20), st.integers(1, 4))
    stop = draw(st.lists(st.one_of(parts, st.text("hello .€", min_size=1, max_size=3)).filter(bool), max_size=3))
    return name, ids, splits, stop


@settings(max_examples=600, deadline=None)
@given(answers(), st.booleans())
def test_pieces_are_the_whole_text_up_to_a_stop_string(
    answer: tuple[str, list[int], list[int], list[str]], skip_special_tokens: bool
) -> None:
    name, ids, splits, stop = answer
    tokenizer = TOKENIZERS[name]
    stream = TextStream(tokenizer, stop, skip_special_tokens=skip_special_tokens)
    pieces = [stream.add(ids[begin:end]) for begin, end in zip([0, *splits], [*splits, len(ids)], strict=True)]
    stopped_before_the_end = stream.stopped
    pieces.append(stream.finish())
    whole = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    text, stopped = reference(whole, stop)
    assert "".join(pieces) == text
    assert stream.stopped == stopped
    assert stopped_before_the_end in (None, stopped)
    assert stream.finish() == ""
    if stopped is None:
        assert len(stream.offsets) == len(ids)
    assert list(stream.offsets) == sorted(stream.offsets)
    assert all(offset <= len(whole) for offset in stream.offsets)


@settings(max_examples=200, deadline=None)
@given(answers())
def test_a_token_begins_where_the_text_before_it_ends(answer: tuple[str, list[int], list[int], list[str]]) -> None:
    name, ids, _, _ = answer
    stream = TextStream(TOKENIZERS[name])
    text = ""
    for token_id in ids:
        piece = stream.add([token_id])
        assert stream.offsets[-1] == len(text)
        text += piece


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@pytest.mark.parametrize("garbage", [[0xFF], [0xE2], [0xE2, 0x82], [0x82], [0xF0, 0x9F, 0x98], [0x20]])
def test_a_long_run_of_broken_bytes_takes_a_few_decodings_each(
    name: str, garbage: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = TOKENIZERS[name]
    if name == "byte_level":
        one_byte = {token: token_id for token, token_id in tokenizer.get_vocab().items() if len(token) == 1}
        of_byte = {tokenizer.decode([token_id]): token_id for token_id in one_byte.values()}
        names = dict(zip((0xFF, 0xE2, 0x82, 0xF0, 0x9F, 0x98), "ÿâĤðŁĺ", strict=True))
        ids = [one_byte[names[byte]] if byte in names else of_byte[chr(byte)] for byte in garbage]
    else:
        ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in garbage]
    run = (ids * 400)[:400]
    decoded: list[int] = []

    class Counting:
        def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
            decoded.append(len(token_ids))
            return str(tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

        def __getattr__(self, attribute: str) -> Any:
            return getattr(tokenizer, attribute)

    stream = TextStream(Counting())  # type: ignore[arg-type]
    text = "".join(stream.add([token_id]) for token_id in run) + stream.finish()
    assert text == tokenizer.decode(run)
    assert sum(decoded) < 60 * len(run)
