"""Checks an adapter's proof: asks the engine for the log probs that the proof has, and compares them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from .._core import AdapterError, OutputConfig, QueueFullError, Request, RequestError, Result
from ..formats.adapter.proof import MAX_TOP, PROOF_FILE, AdapterProof, ProvenPrompt, TopLogProbs
from .adapter_tokenizers import Tokenizers
from .executor import Executor
from .named_adapter import NamedAdapter
from .prompt_tuning import behind_virtual_tokens

AskAll = Callable[[Sequence[Request]], Sequence[Result]]
"""Answers requests of one token each, in their order. Raises RequestError."""


class ProofCheck:
    """Checks the proofs of adapters that an executor has cached, but does not know by name yet."""

    def __init__(self, executor: Executor, tokenizers: Tokenizers, ask: AskAll) -> None:
        """ask: called with the requests of the adapter and of the base model in turn."""
        self._executor: Final = executor
        self._tokenizers: Final = tokenizers
        self._ask: Final = ask

    def __call__(self, adapter: NamedAdapter) -> None:
        """Raises AdapterError if the proof fails or cannot be checked. Does nothing without a proof."""
        proof = adapter.facts.proof
        if proof is None:
            return
        try:
            self._executor.adapters.refuse_generation_of(adapter)
            results = self._ask(self._requests(adapter, proof))
        except QueueFullError:
            raise
        except RequestError as error:
            raise AdapterError(f"{adapter.directory / PROOF_FILE}: the proof cannot be checked: {error}") from error
        for index, prompt in enumerate(proof.prompts):
            with_adapter, without = results[2 * index : 2 * index + 2]
            # First the base: if it differs, the adapter cannot be right.
            for who, expected, found in (
                ("base model", prompt.base, without),
                ("adapter", prompt.adapter, with_adapter),
            ):
                problem = _difference(expected, found, proof.tolerance)
                if problem is not None:
                    raise AdapterError(
                        f"{adapter.directory / PROOF_FILE}: the proof of adapter '{adapter.name}' fails: prompts"
                        f"[{index}]: with the {who}, {problem}"
                    )

    def _requests(self, adapter: NamedAdapter, proof: AdapterProof) -> list[Request]:
        """Returns the adapter's and the base's request for each prompt."""
        store, requests = self._executor.adapters, []
        prompt_config = store.virtual_tokens_of(adapter)
        for index, prompt in enumerate(proof.prompts):
            token_ids = self._token_ids(adapter, prompt, index)
            of_base, of_adapter = (_request(token_ids) for _ in range(2))
            if prompt_config is not None:
                vocab_size = self._executor.engine_info.vocab_size
                of_adapter = behind_virtual_tokens(of_adapter, prompt_config, vocab_size, adapter.name)
            else:
                of_adapter.lora_config = store.lora_of(adapter, token_ids)
            requests += [of_adapter, of_base]
        return requests

    def _token_ids(self, adapter: NamedAdapter, prompt: ProvenPrompt, index: int) -> list[int]:
        if prompt.text is None:
            return list(prompt.token_ids or ())
        own = self._tokenizers.of_adapter(adapter)
        made = list(own.encode(prompt.text, self._executor.engine_info.max_seq_len, f"prompts[{index}].text").ids)
        if prompt.token_ids is not None and list(prompt.token_ids) != made:
            raise AdapterError(
                f"{adapter.directory / PROOF_FILE}: the proof of adapter '{adapter.name}' fails: prompts[{index}]."
                f"text has {len(made)} tokens that differ from token_ids: the tokenizer is another one"
            )
        return made


def _request(token_ids: Sequence[int]) -> Request:
    output = OutputConfig(return_log_probs=True, top_log_probs=MAX_TOP, exclude_input_from_output=True)
    return Request(list(token_ids), 1, output_config=output)


def _difference(expected: TopLogProbs, result: Result, tolerance: float) -> str | None:
    """Describes the first difference above the tolerance; None: there is none."""
    if not result.top_log_probs or not result.top_log_probs[0]:
        return "the engine gave no log probs"
    found = dict(result.top_log_probs[0][0])
    least = min(found.values())
    for token, log_prob in expected:
        # A token that is not among the most likely ones is at most as likely as the last of these.
        here = found.get(token, min(log_prob, least))
        if not abs(here - log_prob) <= tolerance:
            return f"token {token} has log prob {here:.4f}; expected {log_prob:.4f} within {tolerance:g}"
    return None
