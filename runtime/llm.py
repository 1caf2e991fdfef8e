"""Text in, text out, over one engine and its adapters.

Prompts are given to the tokenizer as they are: chat templates are the caller's business.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, overload

from tokenizers import Tokenizer

from .._core import (
    ConfigError,
    ExecutorClosedError,
    ExecutorConfig,
    FinishReason,
    ModelType,
    OutputConfig,
    Request,
    RequestError,
    Response,
    SamplingConfig,
)
from .executor import Executor

TOKENIZER_FILE: Final = "tokenizer.json"


@dataclass(frozen=True)
class Completion:
    """What one prompt gave."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason


class LLM:
    """An executor with a tokenizer: LLM(engine_dir).generate("text", lora="name")."""

    def __init__(
        self,
        engine_dir: str | Path,
        executor_config: ExecutorConfig | None = None,
        *,
        tokenizer: str | Path | None = None,
        kernels: str = "",
    ) -> None:
        """Loads the engine and its tokenizer.json, or the one at `tokenizer`.

        kernels: as ExecutorConfig.kernels, for which it stands.

        Raises ConfigError when there is no tokenizer or it cannot be read, and what Executor raises.
        """
        path = Path(engine_dir) / TOKENIZER_FILE if tokenizer is None else Path(tokenizer)
        if path.is_dir():
            path = path / TOKENIZER_FILE
        if not path.is_file():
            raise ConfigError(f"{path}: there is no tokenizer; name one with tokenizer=")
        self._tokenizer = load_tokenizer(path)
        self._executor = Executor(engine_dir, ModelType.DECODER_ONLY, _with_kernels(executor_config, kernels))
        self._end_ids = tuple(self._executor.engine.config.pretrained_config.eos_token_id)

    @property
    def executor(self) -> Executor:
        """For statistics, and for what the text level does not cover."""
        return self._executor

    # A str is a sequence of str as well; the first overload that fits counts.
    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompts: str,
        *,
        lora: str | None = None,
        max_tokens: int = 64,
        sampling_config: SamplingConfig | None = None,
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: Sequence[str],
        *,
        lora: str | Sequence[str | None] | None = None,
        max_tokens: int = 64,
        sampling_config: SamplingConfig | None = None,
    ) -> list[Completion]: ...
    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        lora: str | Sequence[str | None] | None = None,
        max_tokens: int = 64,
        sampling_config: SamplingConfig | None = None,
    ) -> Completion | list[Completion]:
        """Completes one prompt, or several in one batch.

        lora: the name of one of the engine's adapters for all prompts, or one (or None) for each.

        Raises RequestError or AdapterError for a prompt that is refused; the others are cancelled then.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        names = [lora] * len(texts) if lora is None or isinstance(lora, str) else list(lora)
        if len(names) != len(texts):
            raise RequestError(f"lora has {len(names)} names for {len(texts)} prompts")
        ids: list[int] = []
        try:
            for text, name in zip(texts, names, strict=True):
                ids.append(self._enqueue(text, name, max_tokens, sampling_config, streaming=False))
            completions = [self._completion(self._executor.await_responses(request_id)[-1]) for request_id in ids]
        except BaseException:
            for request_id in ids:
                self._abandon(request_id)
            raise
        return completions[0] if isinstance(prompts, str) else completions

    def stream(
        self,
        prompt: str,
        *,
        lora: str | None = None,
        max_tokens: int = 64,
        sampling_config: SamplingConfig | None = None,
    ) -> Iterator[str]:
        """Yields the completion's text piece by piece; giving the iterator up cancels the request."""
        request_id = self._enqueue(prompt, lora, max_tokens, sampling_config, streaming=True)
        tokens: list[int] = []
        sent = ""
        is_final = False
        try:
            while not is_final:
                for response in self._executor.await_responses(request_id):
                    _raise_if_failed(response)
                    tokens += response.result.output_token_ids[0]
                    is_final = response.result.is_final
                text = self._tokenizer.decode(self._without_end(tokens))
                # A replacement character at the end is a letter whose other bytes are still to come.
                if text.startswith(sent) and len(text) > len(sent) and (is_final or not text.endswith("\ufffd")):
                    yield text[len(sent) :]
                    sent = text
        finally:
            if not is_final:
                self._abandon(request_id)

    def shutdown(self) -> None:
        """Ends the executor."""
        self._executor.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _enqueue(
        self, text: str, lora: str | None, max_tokens: int, sampling_config: SamplingConfig | None, *, streaming: bool
    ) -> int:
        request = Request(
            self._tokenizer.encode(text).ids,
            max_tokens,
            streaming=streaming,
            sampling_config=SamplingConfig() if sampling_config is None else sampling_config,
            output_config=OutputConfig(exclude_input_from_output=True),
            end_id=self._end_ids[0] if self._end_ids else None,
            # A request has one end_id; the other tokens that end a text are stop words, cut off again in the output.
            stop_words=[[token] for token in self._end_ids[1:]] or None,
        )
        return self._executor.enqueue_request(request, adapter=lora)

    def _abandon(self, request_id: int) -> None:
        """Cancels a request and takes its last response, so that nothing of it stays behind."""
        # It may have ended, with its last response taken, and the executor may be closed: then there is nothing to do.
        with contextlib.suppress(RequestError, ExecutorClosedError):
            self._executor.cancel_request(request_id)
            while not any(
                response.has_error() or response.result.is_final
                for response in self._executor.await_responses(request_id)
            ):
                pass

    def _completion(self, response: Response) -> Completion:
        _raise_if_failed(response)
        result = response.result
        tokens = self._without_end(result.output_token_ids[0])
        return Completion(self._tokenizer.decode(tokens), tuple(tokens), result.finish_reasons[0])

    def _without_end(self, tokens: list[int]) -> list[int]:
        return tokens[:-1] if tokens and tokens[-1] in self._end_ids else tokens


def _with_kernels(config: ExecutorConfig | None, kernels: str) -> ExecutorConfig | None:
    """A configuration with these kernels; the caller's is left as it is."""
    if not kernels:
        return config
    changed = ExecutorConfig() if config is None else copy.copy(config)
    if changed.kernels not in ("", kernels):
        raise ConfigError(f"kernels is '{kernels}', and executor_config has '{changed.kernels}'")
    changed.kernels = kernels
    return changed


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a tokenizer.json. Raises ConfigError when it cannot be read."""
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers has no class of its own for what it raises
        raise ConfigError(f"{path}: cannot be read as a tokenizer: {error}") from error


def _raise_if_failed(response: Response) -> None:
    if response.has_error():
        raise RequestError(f"request {response.request_id}: {response.error_msg}")
