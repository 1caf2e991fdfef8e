"""Combines the arguments of LLM's methods that say how a completion is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._core import ConfigError, RequestError, SamplingConfig
from ..common.shown_value import shown
from ..formats.hugging_face.hf_config import GENERATION_CONFIG_FILE
from .sampling_defaults import SamplingDefaults
from .sampling_params import SamplingParams


@dataclass(frozen=True)
class CompletionOptions:
    """Options of one prompt's completions."""

    params: SamplingParams
    sampling_config: SamplingConfig | None
    """Replaces the sampling of `params`; None: `params` decides."""

    @property
    def has_list(self) -> bool:
        """True if the caller gets a list of completions, even if it has one entry."""
        return self.params.n is not None


def recommended_sampling(engine_dir: Path, generation_config: str | Path | None) -> SamplingDefaults:
    """Returns the sampling settings that LLM's argument generation_config names.

    Raises ConfigError for a file that is missing or invalid.
    """
    if generation_config is None or generation_config == "vllm":
        return SamplingDefaults()
    if generation_config == "auto":
        return SamplingDefaults.load(engine_dir)
    path = Path(generation_config) / GENERATION_CONFIG_FILE
    if not path.is_file():
        raise ConfigError(
            f"generation_config is {shown(str(generation_config))}, which has no {GENERATION_CONFIG_FILE}; expected "
            "'auto', 'vllm', None, or a directory with that file"
        )
    return SamplingDefaults.load(path.parent)


def combined(
    sampling_params: Any,
    sampling_config: SamplingConfig | None,
    recommended: SamplingDefaults,
    *,
    max_tokens: int | None,
    stop: str | Sequence[str],
    n: int | None = None,
) -> CompletionOptions:
    """Returns the options of a method's arguments. recommended: the model's settings, used without sampling_config.

    Raises RequestError for an option that is given twice, and for values that cannot be used.
    """
    if sampling_params is not None and not isinstance(sampling_params, SamplingParams):
        raise RequestError(f"sampling_params is {shown(sampling_params)}; expected SamplingParams")
    if sampling_params is not None and sampling_config is not None:
        raise RequestError("sampling_params and sampling_config are given; expected one of them")
    params = SamplingParams() if sampling_params is None else sampling_params
    if sampling_params is None and sampling_config is None and not recommended.samples:
        sampling_config = SamplingConfig(repetition_penalty=recommended.repetition_penalty)
    return CompletionOptions(params.with_arguments(max_tokens=max_tokens, stop=stop, n=n), sampling_config)


def combined_for_each(num_prompts: int, sampling_params: Any, *arguments: Any, **more: Any) -> list[CompletionOptions]:
    """Returns the options of each prompt, like combined().

    sampling_params: for all prompts, or a list with one entry per prompt.

    Raises RequestError, also if the list has another length.
    """
    if not isinstance(sampling_params, Sequence):
        return [combined(sampling_params, *arguments, **more)] * num_prompts
    if len(sampling_params) != num_prompts:
        raise RequestError(
            f"sampling_params has {len(sampling_params)} entries for {num_prompts} prompts; expected one per prompt"
        )
    return [combined(params, *arguments, **more) for params in sampling_params]
