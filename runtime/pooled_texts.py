"""LLM's methods for texts that end in rows instead of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

from .._core import PoolingParams, PoolingType, RequestError
from .classifier import Classification, without_padding
from .llm_adapters import LoadedAdapters, Lora
from .pooled import FloatArray, PromptTokens, embedding_params
from .text_requests import PooledAnswer
from .vllm_method_arguments import with_method_arguments


class PooledTexts(LoadedAdapters):
    """Part of LLM that embeds and classifies texts."""

    @overload
    def embed(
        self,
        texts: str,
        *,
        lora: Lora | None = None,
        pooling_type: PoolingType | None = None,
        normalize: bool | None = None,
        **vllm_arguments: Any,
    ) -> FloatArray: ...
    @overload
    def embed(
        self,
        texts: Sequence[str],
        *,
        lora: Lora | Sequence[Lora | None] | None = None,
        pooling_type: PoolingType | None = None,
        normalize: bool | None = None,
        **vllm_arguments: Any,
    ) -> list[FloatArray]: ...
    def embed(
        self,
        texts: str | Sequence[str],
        *,
        lora: Lora | Sequence[Lora | None] | None = None,
        pooling_type: PoolingType | None = None,
        normalize: bool | None = None,
        **vllm_arguments: Any,
    ) -> FloatArray | list[FloatArray]:
        """Returns the embedding of a text, float32 [hidden_size], or those of several texts in one batch.

        lora: see generate().
        pooling_type, normalize: selects the hidden states of the embedding, and divides it by its length if true; None:
            as in the model's files for sentence-transformers.
        vllm_arguments: vLLM's arguments of this method: lora_request is `lora`; use_tqdm has no effect.

        Raises RequestError if neither says how to make embeddings, and RequestError or AdapterError if a text is
        rejected; the other texts are cancelled then.
        """
        lora = _lora("embed", vllm_arguments, lora)
        params = embedding_params(self._executor.engine, pooling_type, normalize)
        prompts = [texts] if isinstance(texts, str) else list(texts)
        held = self._hold(len(prompts), lora)
        rows = self._rows(
            [(self._tokens(text, name), name, params) for text, name in zip(prompts, held.names, strict=True)]
        )
        return rows[0] if isinstance(texts, str) else rows

    @overload
    def classify(
        self, texts: str, *, lora: Lora | None = None, **vllm_arguments: Any
    ) -> Classification | list[Classification]: ...
    @overload
    def classify(
        self,
        texts: Sequence[str | tuple[str, str]],
        *,
        lora: Lora | Sequence[Lora | None] | None = None,
        **vllm_arguments: Any,
    ) -> list[Classification | list[Classification]]: ...
    def classify(
        self,
        texts: str | Sequence[str | tuple[str, str]],
        *,
        lora: Lora | Sequence[Lora | None] | None = None,
        **vllm_arguments: Any,
    ) -> Classification | list[Classification] | list[Classification | list[Classification]]:
        """Returns the class of a text, or of several texts in one batch. A token classifier returns the class of each
        token.

        texts: a text, or several texts or pairs (for example query and passage), which the tokenizer joins.
        lora: see generate(). An adapter with its own head brings its classes; others use the model's.
        vllm_arguments: as in embed().

        Raises RequestError if neither the model nor the adapter is a classifier, and RequestError or AdapterError if a
        text is rejected; the other texts are cancelled then.
        """
        lora = _lora("classify", vllm_arguments, lora)
        listed: list[str | tuple[str, str]] = [texts] if isinstance(texts, str) else list(texts)
        held = self._hold(len(listed), lora)
        classifiers = [self._executor.adapters.classifier_for(name) for name in held.names]
        engine = self._executor.engine
        asked = [
            (without_padding(self._tokens(text, name), engine, classifier), name, classifier.params)
            for text, name, classifier in zip(listed, held.names, classifiers, strict=True)
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
        """Runs prompts in one batch, each with its adapter and pooling, and returns their rows."""
        answers: list[PooledAnswer] = []
        try:
            for prompt, name, params in asked:
                answers.append(self._requests.ask_for_rows(prompt, name, params))
            return [answer.rows() for answer in answers]
        finally:
            for answer in answers:
                answer.close()


def _lora(
    method: str, arguments: Mapping[str, Any], lora: Lora | Sequence[Lora | None] | None
) -> Lora | Sequence[Lora | None] | None:
    """Returns the adapters of a call with vLLM's arguments. Raises like with_method_arguments()."""
    adapters: Lora | Sequence[Lora | None] | None = with_method_arguments(
        method, arguments, lora=lora, progress=None
    ).lora
    return adapters
