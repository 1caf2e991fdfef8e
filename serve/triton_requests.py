"""Inputs and outputs of Triton's TensorRT-LLM backend: converts tensors to executor requests and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .._core import FinishReason, LoraConfig, OutputConfig, Request, Result, SamplingConfig
from ..runtime.adapter_tokenizers import TextTokenizer
from ..runtime.named_adapter import FIRST_NAMED_TASK_ID
from ..runtime.text_stream import TextStream
from ..runtime.vocabulary import Vocabulary
from .errors import FORBIDDEN, ApiError
from .records import current_request
from .triton_tensors import BYTES, OutputTensor, TensorSpec

INPUTS: Final = (
    TensorSpec("input_ids", ("INT32",), (-1,)),
    TensorSpec("input_lengths", ("INT32",), (1,)),
    TensorSpec("decoder_input_ids", ("INT32",), (-1,)),
    TensorSpec("decoder_input_lengths", ("INT32",), (1,)),
    TensorSpec("text_input", (BYTES,), (1,)),
    TensorSpec("request_output_len", ("INT32",), (1,)),
    TensorSpec("end_id", ("INT32",), (1,)),
    TensorSpec("pad_id", ("INT32",), (1,)),
    TensorSpec("temperature", ("FP32",), (1,)),
    TensorSpec("runtime_top_k", ("INT32",), (1,)),
    TensorSpec("runtime_top_p", ("FP32",), (1,)),
    TensorSpec("random_seed", ("UINT64", "INT64"), (1,)),
    TensorSpec("repetition_penalty", ("FP32",), (1,)),
    TensorSpec("presence_penalty", ("FP32",), (1,)),
    TensorSpec("frequency_penalty", ("FP32",), (1,)),
    TensorSpec("min_length", ("INT32",), (1,)),
    TensorSpec("len_penalty", ("FP32",), (1,)),
    TensorSpec("beam_width", ("INT32",), (1,)),
    TensorSpec("stop_words_list", ("INT32",), (2, -1)),
    TensorSpec("bad_words_list", ("INT32",), (2, -1)),
    TensorSpec("stop_words", (BYTES,), (-1,)),
    TensorSpec("bad_words", (BYTES,), (-1,)),
    TensorSpec("embedding_bias", ("FP32",), (-1,)),
    TensorSpec("streaming", ("BOOL",), (1,)),
    TensorSpec("exclude_input_in_output", ("BOOL",), (1,)),
    TensorSpec("return_log_probs", ("BOOL",), (1,)),
    TensorSpec("return_context_logits", ("BOOL",), (1,)),
    TensorSpec("return_generation_logits", ("BOOL",), (1,)),
    TensorSpec("lora_task_id", ("UINT64",), (1,)),
    TensorSpec("lora_weights", ("FP16", "BF16", "FP32"), (-1, -1)),
    TensorSpec("lora_config", ("INT32",), (-1, -1)),
)
"""All inputs are optional except request_output_len and one of input_ids and text_input."""

_ALIASES: Final = {
    "max_tokens": "request_output_len",
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "seed": "random_seed",
    "min_tokens": "min_length",
    "length_penalty": "len_penalty",
    "stream": "streaming",
}
"""Names of the same inputs in the backend's text-level model."""

_BY_NAME: Final = {spec.name: spec for spec in INPUTS}
ACCEPTED: Final[Mapping[str, TensorSpec]] = {
    **_BY_NAME,
    **{alias: _BY_NAME[name] for alias, name in _ALIASES.items()},
}

OUTPUTS: Final = {
    spec.name: spec
    for spec in (
        TensorSpec("output_ids", ("INT32",), (-1, -1)),
        TensorSpec("sequence_length", ("INT32",), (1,)),
        TensorSpec("text_output", (BYTES,), (1,)),
        TensorSpec("cum_log_probs", ("FP32",), (1,)),
        TensorSpec("output_log_probs", ("FP32",), (-1, -1)),
        TensorSpec("context_logits", ("FP32",), (-1, -1)),
        TensorSpec("generation_logits", ("FP32",), (-1, -1, -1)),
    )
}
_FLAGS: Final = {
    "return_log_probs": ("cum_log_probs", "output_log_probs"),
    "return_context_logits": ("context_logits",),
    "return_generation_logits": ("generation_logits",),
}
"""Inputs that select outputs if a request does not list its outputs."""


@dataclass(frozen=True)
class TritonRequest:
    """A request in the terms of the executor."""

    request: Request
    """Always streams, so that the time of the first token is known."""
    lora: LoraConfig | None
    """The adapter of a task_id, with its weights if they were sent."""
    outputs: tuple[str, ...]
    streaming: bool | None
    """None: not set."""
    exclude_input: bool
    prompt_text: str | None
    """Text that was sent instead of token ids. Outputs begin with it, unless an encoder read it."""
    stop: tuple[str, ...]
    """Texts that end the answer. They are not part of it."""
    vocabulary: Vocabulary
    end_ids: tuple[int, ...]
    """Tokens that end the answer although the client did not name them. They are not part of it."""


class TritonAnswer:
    """Outputs of one request, made from results as they arrive."""

    def __init__(self, asked: TritonRequest, vocab_size: int, num_virtual_tokens: int) -> None:
        """num_virtual_tokens: number of tokens before the prompt in results."""
        self._asked = asked
        self._vocab_size = vocab_size
        self._num_virtual_tokens = num_virtual_tokens
        self._text = TextStream(asked.vocabulary, asked.stop)
        self._results: list[Result] = []
        self._tokens: list[int] = []
        self._shown = ""
        self._num_flushed = 0
        self.is_over = False
        """True after the last result or a stop text."""

    def add(self, results: Sequence[Result]) -> None:
        """Adds results."""
        last = results[-1]
        tokens = [token for result in results for token in result.output_token_ids[0]]
        has_stop_word = last.is_final and last.finish_reasons[0] is FinishReason.STOP_WORDS
        if has_stop_word and tokens and tokens[-1] in self._asked.end_ids:
            tokens.pop()
        self._results += results
        self._tokens += tokens
        if "text_output" in self._asked.outputs or self._asked.stop:
            self._shown += self._text.add(tokens)
            if last.is_final:
                self._shown += self._text.finish()
        self.is_over = last.is_final or self._text.stopped is not None

    def flush(self, *, with_prompt: bool) -> list[OutputTensor]:
        """Returns the outputs of all results since the last call, optionally with the prompt at the front."""
        prompt = self._asked.request.input_token_ids if with_prompt else []
        arrays = {
            "output_ids": lambda: np.array([[[*prompt, *self._tokens]]], np.int32),
            "sequence_length": lambda: np.array([[len(prompt) + len(self._tokens)]], np.int32),
            "text_output": lambda: np.array([[self._prompt_text(with_prompt) + self._shown]], object),
            "cum_log_probs": self._cum_log_probs,
            "output_log_probs": self._log_probs,
            "context_logits": self._context_logits,
            "generation_logits": self._generation_logits,
        }
        outputs = [OutputTensor(name, arrays[name]()) for name in self._asked.outputs]
        self._num_flushed += len(self._tokens)
        self._results, self._tokens, self._shown = [], [], ""
        return outputs

    def _prompt_text(self, with_prompt: bool) -> str:
        # In an encoder-decoder model, output_ids begin with the decoder's start tokens, which are not text.
        if not with_prompt or self._asked.request.encoder_input_token_ids is not None:
            return ""
        if self._asked.prompt_text is not None:
            return self._asked.prompt_text
        return str(self._asked.vocabulary.tokenizer.decode(self._asked.request.input_token_ids))

    def _cum_log_probs(self) -> npt.NDArray[Any]:
        return np.array([self._results[-1].cum_log_probs or [0.0]], np.float32)

    def _log_probs(self) -> npt.NDArray[Any]:
        # Each result has the log probs of all tokens so far.
        so_far = (self._results[-1].log_probs or [[]])[0]
        return np.array([[so_far[self._num_flushed : self._num_flushed + len(self._tokens)]]], np.float32)

    def _context_logits(self) -> npt.NDArray[Any]:
        """Returns [1, prompt, vocabulary] with the first tokens and [1, 0, vocabulary] later: every result repeats the
        logits.
        """
        logits = self._results[0].context_logits if self._num_flushed == 0 else None
        if logits is None:
            return np.zeros((1, 0, self._vocab_size), np.float32)
        return logits[np.newaxis, self._num_virtual_tokens :]

    def _generation_logits(self) -> npt.NDArray[Any]:
        """Returns [1, 1, tokens, vocabulary]."""
        rows = [result.generation_logits for result in self._results if result.generation_logits is not None]
        joined = np.concatenate(rows or [np.zeros((0, 1, self._vocab_size), np.float32)])
        return np.ascontiguousarray(joined.swapaxes(0, 1))[np.newaxis]


def make_request(
    arrays: Mapping[str, npt.NDArray[Any]],
    outputs: Sequence[str] | None,
    *,
    own: TextTokenizer,
    max_prompt_tokens: int,
    limit_ms: float | None,
    decoder_start: Sequence[int] | None = None,
) -> TritonRequest:
    """Makes the request that tensors describe. arrays: by the names in ACCEPTED. Raises ApiError that names the tensor.

    outputs: the outputs that the request lists; None: no list. own: its end ids end the answer to a text without an
    end_id. max_prompt_tokens: longer texts are rejected. decoder_start: default start tokens of the decoder in an
    encoder-decoder model; None: there is no encoder.
    """
    inputs = _Inputs(arrays)
    prompt, prompt_text = _prompt(inputs, own, max_prompt_tokens)
    decoder_input = _decoder_input(inputs, decoder_start)
    num_tokens = inputs.one("request_output_len")
    if num_tokens is None:
        raise ApiError("input 'request_output_len' is missing", param="request_output_len")
    wanted = _wanted_outputs(inputs, outputs)
    implied = own.end_ids if prompt_text is not None and inputs.one("end_id") is None else ()
    stop_words = [*_word_list(inputs, "stop_words_list"), *([token] for token in implied[1:])]
    bias = inputs.array("embedding_bias")
    request = Request(
        prompt if decoder_input is None else decoder_input,
        num_tokens,
        encoder_input_token_ids=None if decoder_input is None else prompt,
        streaming=True,
        sampling_config=_sampling(inputs),
        output_config=OutputConfig(
            return_log_probs="cum_log_probs" in wanted or "output_log_probs" in wanted,
            return_context_logits="context_logits" in wanted,
            return_generation_logits="generation_logits" in wanted,
            exclude_input_from_output=True,
        ),
        end_id=implied[0] if implied else inputs.one("end_id"),
        pad_id=inputs.one("pad_id"),
        stop_words=stop_words or None,
        bad_words=_word_list(inputs, "bad_words_list") or None,
        embedding_bias=bias,
        allotted_time_ms=limit_ms,
    )
    if any(inputs.texts("bad_words")):
        raise ApiError(
            "input 'bad_words' is not supported; send bad_words_list, which has token ids", param="bad_words"
        )
    return TritonRequest(
        request=request,
        lora=_lora(inputs),
        outputs=wanted,
        streaming=inputs.one("streaming"),
        exclude_input=bool(inputs.one("exclude_input_in_output")),
        prompt_text=prompt_text if decoder_input is None else None,
        stop=tuple(text for text in inputs.texts("stop_words") if text),
        vocabulary=own.vocabulary,
        end_ids=implied,
    )


class _Inputs:
    """Arrays by their names in INPUTS."""

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        for given, array in arrays.items():
            name = _ALIASES.get(given, given)
            if name in self._arrays:
                alias = next(alias for alias, meant in _ALIASES.items() if meant == name and alias in arrays)
                raise ApiError(
                    f"inputs '{name}' and '{alias}' have the same meaning; send only one of them", param=alias
                )
            self._arrays[name] = array

    def array(self, name: str) -> npt.NDArray[Any] | None:
        """Returns the array; None: it was not sent."""
        return self._arrays.get(name)

    def one(self, name: str) -> Any:
        """Returns the only element of a tensor of shape [1]; None: it was not sent."""
        array = self._arrays.get(name)
        return None if array is None else array.item()

    def texts(self, name: str) -> list[str]:
        """Returns the elements of a BYTES tensor; []: it was not sent."""
        array = self._arrays.get(name)
        return [] if array is None else array.tolist()


def _prompt(inputs: _Inputs, own: TextTokenizer, max_tokens: int) -> tuple[list[int], str | None]:
    ids, text = inputs.array("input_ids"), inputs.one("text_input")
    length = inputs.one("input_lengths")
    if (ids is None) == (text is None):
        raise ApiError("one of the inputs 'input_ids' and 'text_input' is needed, and not both", param="input_ids")
    if ids is None:
        if length is not None:
            raise ApiError("input 'input_lengths' is given without input_ids; expected both", param="input_lengths")
        return list(own.encode(text, max_tokens, "text_input").ids), text
    return _first(ids, "input_ids", length, "input_lengths"), None


def _decoder_input(inputs: _Inputs, decoder_start: Sequence[int] | None) -> list[int] | None:
    """Returns the tokens that the decoder begins with; None: there is no encoder."""
    ids, length = inputs.array("decoder_input_ids"), inputs.one("decoder_input_lengths")
    if decoder_start is None and not (ids is None and length is None):
        name = "decoder_input_lengths" if ids is None else "decoder_input_ids"
        raise ApiError(f"input '{name}' is for models with an encoder; this model has none", param=name)
    if ids is not None:
        return _first(ids, "decoder_input_ids", length, "decoder_input_lengths")
    if length is not None:
        raise ApiError(
            "input 'decoder_input_lengths' is given without decoder_input_ids; expected both",
            param="decoder_input_lengths",
        )
    return None if decoder_start is None else list(decoder_start)


def _first(ids: npt.NDArray[Any], name: str, length: int | None, length_name: str) -> list[int]:
    """Returns the first `length` ids, or all."""
    if length is not None and not 1 <= length <= ids.size:
        raise ApiError(
            f"input '{length_name}' is {length}; {name} has {ids.size} tokens, so accepted: 1 to {ids.size}",
            param=length_name,
        )
    found: list[int] = ids[:length].tolist()
    return found


def _wanted_outputs(inputs: _Inputs, outputs: Sequence[str] | None) -> tuple[str, ...]:
    if outputs is not None:
        for name in outputs:
            if name not in OUTPUTS:
                raise ApiError(f"output '{name}' is not known; accepted: {', '.join(OUTPUTS)}", param=name)
            if list(outputs).count(name) > 1:
                raise ApiError(f"output '{name}' is given twice", param=name)
        return tuple(outputs)
    wanted = ["text_output"] if inputs.array("text_input") is not None else ["output_ids", "sequence_length"]
    for flag, names in _FLAGS.items():
        if inputs.one(flag):
            wanted += names
    return tuple(wanted)


def _sampling(inputs: _Inputs) -> SamplingConfig:
    seed = inputs.one("random_seed")
    if seed is not None and seed < 0:
        raise ApiError(f"input 'random_seed' is {seed}; accepted: 0 or more", param="random_seed")
    length_penalty = inputs.one("len_penalty")
    if length_penalty not in (None, 0.0, 1.0):
        raise ApiError(
            f"input 'len_penalty' is {length_penalty}; accepted: 0, 1, because it only affects several beams",
            param="len_penalty",
        )
    return SamplingConfig(
        beam_width=1 if inputs.one("beam_width") is None else inputs.one("beam_width"),
        top_k=inputs.one("runtime_top_k"),
        # The backend's clients send 0 for a top_p that is not used.
        top_p=inputs.one("runtime_top_p") or None,
        seed=seed,
        temperature=inputs.one("temperature"),
        min_tokens=inputs.one("min_length"),
        repetition_penalty=inputs.one("repetition_penalty"),
        presence_penalty=inputs.one("presence_penalty"),
        frequency_penalty=inputs.one("frequency_penalty"),
    )


def _word_list(inputs: _Inputs, name: str) -> list[list[int]]:
    """Returns words of token ids. The tensor's first row has all ids; the second has each word's end and is padded
    with -1.
    """
    array = inputs.array(name)
    if array is None:
        return []
    ids, ends = array.tolist()
    words: list[list[int]] = []
    begin = 0
    num_words = ends.index(-1) if -1 in ends else len(ends)
    for end in ends[:num_words]:
        if not begin < end <= len(ids):
            raise ApiError(
                f"input '{name}': word {len(words)} ends at {end}; accepted: {begin + 1} to {len(ids)}", param=name
            )
        words.append(ids[begin:end])
        begin = end
    if any(end != -1 for end in ends[num_words:]):
        raise ApiError(f"input '{name}': the second row has ends of words after a -1", param=name)
    return words


def _lora(inputs: _Inputs) -> LoraConfig | None:
    task_id = inputs.one("lora_task_id")
    weights, config = inputs.array("lora_weights"), inputs.array("lora_config")
    if (weights is None) != (config is None):
        there, missing = ("lora_config", "lora_weights") if weights is None else ("lora_weights", "lora_config")
        raise ApiError(f"input '{there}' is given without {missing}; expected both", param=missing)
    if task_id is None:
        if weights is not None:
            raise ApiError("input 'lora_weights' is given without lora_task_id; expected both", param="lora_task_id")
        return None
    record = current_request.get()
    if weights is not None and record is not None and not record.may_change_adapters:
        raise ApiError(
            "input 'lora_weights' brings an adapter; expected an admin key (--admin-api-key), or an adapter that is "
            "cached",
            status=HTTPStatus.FORBIDDEN,
            kind=FORBIDDEN,
            param="lora_weights",
        )
    if task_id >= FIRST_NAMED_TASK_ID:
        raise ApiError(
            f"input 'lora_task_id' is {task_id}; the ids from {FIRST_NAMED_TASK_ID} on belong to the server's named "
            "adapters; use such an adapter's name as the model's name",
            param="lora_task_id",
        )
    return LoraConfig(task_id, weights, config)
