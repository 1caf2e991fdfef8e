"""Classes of TensorRT-LLM's newest bindings for features that engines here do not have. Executors reject them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

from .checked_fields import ANYTHING, BOOL, TENSOR, TEXT, TOKEN, CheckedFields, integer, list_of, optional

_MAX_UINT64 = 2**64 - 1
_COUNT = integer(0)
_ID = integer(0, _MAX_UINT64)


@dataclass(eq=False)
class AdditionalModelOutput(CheckedFields):
    """An element of additional_model_outputs of an OutputConfig or ExecutorConfig."""

    name: Annotated[str, TEXT]
    gather_context: Annotated[bool, BOOL] = False


@dataclass(eq=False)
class AdditionalOutput(CheckedFields):
    """An element of Result.additional_outputs, which is always None."""

    name: Annotated[str, TEXT]
    output: Annotated[Any, TENSOR]


@dataclass(eq=False)
class RuntimeDefaults(CheckedFields):
    """Defaults of a KvCacheConfig that an engine brings. Here the engine itself has them."""

    max_attention_window: Annotated[list[int] | None, optional(list_of(_COUNT))] = None
    sink_token_length: Annotated[int | None, optional(_COUNT)] = None


@dataclass(eq=False)
class MultimodalInput(CheckedFields):
    """Request.multimodal_input."""

    multimodal_hashes: Annotated[list[list[int]], list_of(list_of(TOKEN))]
    multimodal_positions: Annotated[list[int], list_of(_COUNT)]
    multimodal_lengths: Annotated[list[int], list_of(_COUNT)]


@dataclass(eq=False)
class MropeConfig(CheckedFields):
    """Request.mrope_config."""

    mrope_rotary_cos_sin: Annotated[Any, TENSOR]
    mrope_position_deltas: Annotated[Any, ANYTHING]


class KvCacheTransferMode(Enum):
    """How TensorRT-LLM's KvCacheRetentionConfig moves blocks to files."""

    DRAM = 0
    GDS = 1
    POSIX_DEBUG_FALLBACK = 2


@dataclass(eq=False)
class CacheTransceiverConfig(CheckedFields):
    """ExecutorConfig.cache_transceiver_config."""

    backend: Annotated[Any, ANYTHING] = None
    max_tokens_in_buffer: Annotated[int | None, optional(_COUNT)] = None
    kv_transfer_timeout_ms: Annotated[int | None, optional(_COUNT)] = None


@dataclass(eq=False)
class SpeculativeDecodingFastLogitsInfo(CheckedFields):
    """Location of the logits for ExternalDraftTokensConfig(fast_logits=True)."""

    draft_request_id: Annotated[int, _ID] = 0
    draft_participant_id: Annotated[int, integer(-(2**31), 2**31 - 1)] = 0


@dataclass(eq=False)
class ContextPhaseParams(CheckedFields):
    """Request.context_phase_params: another executor's results for the prompt."""

    first_gen_tokens: Annotated[list[int], list_of(TOKEN)]
    req_id: Annotated[int, _ID]
    opaque_state: Annotated[Any, ANYTHING] = None
    draft_tokens: Annotated[list[int] | None, optional(list_of(TOKEN))] = field(default=None)
