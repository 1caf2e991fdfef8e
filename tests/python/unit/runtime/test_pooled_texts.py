"""Texts that LLM embeds and classifies: a text, or a pair that the tokenizer joins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from adaptrt._core import PoolingParams, RequestError
from adaptrt.runtime.pooled import PromptTokens
from adaptrt.runtime.pooled_texts import PooledTexts


class Answer:
    """An answer of the executor that records if it was closed."""

    def __init__(self, prompt: PromptTokens) -> None:
        self.prompt = prompt
        self.is_closed = False

    def rows(self) -> Any:
        return self.prompt.ids

    def close(self) -> None:
        self.is_closed = True


class Requests:
    """Tokens are the text's characters. The prompt "bad" is rejected."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []

    def token_ids(self, text: str, _: str | None) -> list[int]:
        return [ord(letter) for letter in text]

    def pair_tokens(self, first: str, second: str, name: str | None) -> PromptTokens:
        return PromptTokens([*self.token_ids(first, name), 0, *self.token_ids(second, name)])

    def ask_for_rows(self, prompt: PromptTokens, _: str | None, __: PoolingParams) -> Answer:
        if prompt.ids == self.token_ids("bad", None):
            raise RequestError("refused")
        self.answers.append(Answer(prompt))
        return self.answers[-1]


class Classifier:
    """A classifier whose class is the row itself."""

    params = PoolingParams()

    def classifications(self, rows: Any) -> Any:
        return rows


class Texts(PooledTexts):
    """PooledTexts without an engine."""

    def __init__(self) -> None:
        self.made = Requests()
        adapters = SimpleNamespace(
            classifier_for=lambda name: Classifier(), knows=lambda name: True,
            version_name=lambda name: name, hold=lambda name: (),
        )  # fmt: skip
        self._executor: Any = SimpleNamespace(adapters=adapters, engine=None)

    @property
    def _requests(self) -> Any:
        return self.made


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> Texts:
    monkeypatch.setattr("adaptrt.runtime.pooled_texts.without_padding", lambda prompt, *_: prompt)
    return Texts()


def test_a_text_and_a_pair_in_one_batch(texts: Texts) -> None:
    pairs: list[Any] = ["ab", ("a", "b"), ["c", "d"]]
    assert texts.classify(pairs) == [[97, 98], [97, 0, 98], [99, 0, 100]]
    assert texts.classify("ab") == [97, 98]
    assert all(answer.is_closed for answer in texts.made.answers)


@pytest.mark.parametrize("wrong", [4, ("a",), ("a", "b", "c"), ("a", 4), {"a": "b"}, None])
def test_inputs_other_than_texts_and_pairs_are_refused(texts: Texts, wrong: Any) -> None:
    with pytest.raises(RequestError, match="expected a text, or a pair of texts for classify"):
        texts.classify([wrong])
    assert not texts.made.answers


def test_a_refused_text_cancels_the_others(texts: Texts) -> None:
    with pytest.raises(RequestError, match="refused"):
        texts.classify(["ab", "bad", "cd"])
    assert [answer.is_closed for answer in texts.made.answers] == [True]


def test_each_text_has_an_adapter(texts: Texts) -> None:
    asked: list[str | None] = []
    ask = texts.made.ask_for_rows

    def ask_for_rows(prompt: PromptTokens, name: str | None, params: PoolingParams) -> Any:
        asked.append(name)
        return ask(prompt, name, params)

    texts.made.ask_for_rows = ask_for_rows
    texts.classify("a", lora="x")
    texts.classify(["a", "b"])
    texts.classify(["a", "b"], lora=["x", None])
    assert asked == ["x", None, None, "x", None]
    with pytest.raises(RequestError, match="lora has 1 names for 2 prompts"):
        texts.classify(["a", "b"], lora=["x"])
