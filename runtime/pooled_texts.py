"""What LLM does with texts that end in rows instead of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from .._core import PoolingParams, PoolingType, RequestError
from .classifier import Classification, without_padding
from .executor import Executor
from .pooled import FloatArray, PromptTokens, embedding_params
from .text_requests import PooledAnswer, TextRequests


class PooledTexts:
    """The part of LLM that embeds and classifies."""

    _executor: Executor
    _requests: TextRequests

    @overload
    def embed(  # type: ignore[overload-overlap]
        self,
        texts: str,
        *,
        lora: str | None = None,
        pooling_type: PoolingType | None = None,
        normalize: bool | None = None,
    ) -> FloatArray: ...
    @overload
    def embed(
        self,
        texts: Sequence[str],
        *,
        lora: str | Sequence[str | None] | None = None,
        pooling_type: PoolingType | None = None,
        normalize: bool | None = None,
    ) -> list[FloatArray]: ...
    def embed(
        self,
        texts: str | Sequence[str],
        *,
        lora: str | Sequence[str | None] | None = None,
        pooling_type: PoolingType | None = None,
        normalize: bool | None = None,
    ) -> FloatArray | list[FloatArray]:
        """The embedding of a text, float32 [hidden_size], or those of several in one batch.

        lora: as generate()'s.
        pooling_type, normalize: which hidden states make the embedding, and whether it is divided by its length; None:
            as the model's files for sentence-transformers say.

        Raises RequestError where neither says how embeddings are made, and RequestError or AdapterError for a text that
        is refused; the others are cancelled then.
        """
        params = embedding_params(self._executor.engine, pooling_type, normalize)
        prompts, names = texts_and_names(texts, lora)
        rows = self._rows([(self._tokens(text, name), name, params) for text, name in zip(prompts, names, strict=True)])
        return rows[0] if isinstance(texts, str) else rows

    @overload
    def classify(  # type: ignore[overload-overlap]
        self, texts: str, *, lora: str | None = None
    ) -> Classification | list[Classification]: ...
    @overload
    def classify(
        self, texts: Sequence[str | tuple[str, str]], *, lora: str | Sequence[str | None] | None = None
    ) -> list[Classification | list[Classification]]: ...
    def classify(
        self, texts: str | Sequence[str | tuple[str, str]], *, lora: str | Sequence[str | None] | None = None
    ) -> Classification | list[Classification] | list[Classification | list[Classification]]:
        """The class of a text, or those of several in one batch; of a classifier of tokens, those of each token.

        texts: of several, each is a text or a pair, such as a query and a passage, which the tokenizer joins.
        lora: as generate()'s. An adapter with a head of its own brings its classes; others take the model's.

        Raises RequestError where neither the model nor the adapter is a classifier, and RequestError or AdapterError
        for a text that is refused; the others are cancelled then.
        """
        listed: list[str | tuple[str, str]] = [texts] if isinstance(texts, str) else list(texts)
        names = names_of(len(listed), lora)
        classifiers = [self._executor.adapters.classifier_for(name) for name in names]
        engine = self._executor.engine
        asked = [
            (without_padding(self._tokens(text, name), engine, classifier), name, classifier.params)
            for text, name, classifier in zip(listed, names, classifiers, strict=True)
        ]
        found = [
            classifier.classifications(rows) for classifier, rows in zip(classifiers, self._rows(asked), strict=True)
        ]
        return found[0] if isinstance(texts, str) else found

    def _tokens(self, text: str | tuple[str, str], name: str | None) -> PromptTokens:
        if isinstance(text, str):
            return PromptTokens(self._requests.token_ids(text, name))
        if not (isinstance(text, tuple | list) and len(text) == 2 and all(isinstance(part, str) for part in text)):
            raise RequestError(f"a text is {text!r:.60}; expected a text, or a pair of texts for classify()")
        first, second = text
        return self._requests.pair_tokens(first, second, name)

    def _rows(self, asked: Sequence[tuple[PromptTokens, str | None, PoolingParams]]) -> list[FloatArray]:
        """Of prompts in one batch, each with its adapter and how it is pooled."""
        answers: list[PooledAnswer] = []
        try:
            for prompt, name, params in asked:
                answers.append(self._requests.ask_for_rows(prompt, name, params))
            return [answer.rows() for answer in answers]
        finally:
            for answer in answers:
                answer.close()


def texts_and_names(
    texts: str | Sequence[str], lora: str | Sequence[str | None] | None
) -> tuple[list[str], list[str | None]]:
    """The texts, and the name of each one's adapter. Raises RequestError."""
    listed = [texts] if isinstance(texts, str) else list(texts)
    return listed, names_of(len(listed), lora)


def names_of(num_texts: int, lora: str | Sequence[str | None] | None) -> list[str | None]:
    """The name of each text's adapter. Raises RequestError."""
    names = [lora] * num_texts if lora is None or isinstance(lora, str) else list(lora)
    if len(names) != num_texts:
        raise RequestError(f"lora has {len(names)} names for {num_texts} prompts")
    return names
