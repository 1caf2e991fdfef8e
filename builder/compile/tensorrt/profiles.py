"""Optimization profiles: the sizes that a plan accepts, for prefill chunks and for decode steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import onnx

from ....formats.engine.build_config import BuildConfig
from ....formats.engine.tensorrt.plan_config import DECODE, PREFILL
from ....formats.network.network import Network

# Maximum size of a layer's KV pool: no GPU has this much memory. TensorRT for RTX 1.7 corrupts its heap when it builds
# for pools of 2^40 elements.
_LARGEST_POOL_BYTES: Final = 1 << 38
# Block ids are int32.
_LARGEST_NUMBER: Final = (1 << 31) - 1
# Typical sizes of a step. Plans are correct for other sizes too, but may be slower.
_USUAL_SEQUENCES: Final = 64
_USUAL_CHUNK: Final = 2048
_USUAL_SLOTS: Final = 8


class Range(NamedTuple):
    """Minimum, optimum and maximum of a size."""

    min: int
    opt: int
    max: int


@dataclass(frozen=True)
class Profile:
    """The sizes of one profile."""

    name: str
    sizes: Mapping[str, Range]
    """Ranges by the name of the size in the network (builder/network/inputs.py)."""

    def shapes(self, tensor: onnx.ValueInfoProto) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
        """Minimum, optimum and maximum shape of an input; None if its shape is fixed."""
        dims = tensor.type.tensor_type.shape.dim
        if all(dim.HasField("dim_value") for dim in dims):
            return None
        ranges = [
            Range(*(dim.dim_value,) * 3) if dim.HasField("dim_value") else self.sizes[dim.dim_param] for dim in dims
        ]
        return (
            tuple(size.min for size in ranges),
            tuple(size.opt for size in ranges),
            tuple(size.max for size in ranges),
        )


def make_profiles(config: BuildConfig, network: Network) -> tuple[Profile, ...]:
    """The profiles of an engine. `config` must have its defaults filled in."""
    assert config.max_seq_len is not None
    # Every sequence in a step has at least one token.
    max_sequences = min(config.max_batch_size, config.max_num_tokens)
    max_blocks = -(-config.max_seq_len // config.tokens_per_block)
    # Keys and values, two bytes each, of the layer with the largest.
    block_bytes = max(2 * 2 * config.tokens_per_block * op.shape.key_value_size for op in network.attentions)
    pool = min(_LARGEST_POOL_BYTES // block_bytes, _LARGEST_NUMBER)
    sequences = _up_to(max_sequences, _USUAL_SEQUENCES)
    common = {
        "num_sequences": sequences,
        "num_sequences_plus_1": Range(*(size + 1 for size in sequences)),
        "max_blocks": _up_to(max_blocks, max_blocks),
        "num_blocks": _up_to(pool, max_sequences * max_blocks),
        # More rows are computed in several runs, because the last layer's activations would be by far the largest.
        "num_logit_rows": sequences,
        # A sequence has one adapter.
        "num_slots": _up_to(max_sequences, _USUAL_SLOTS),
    }
    return (
        Profile(PREFILL, {**common, "num_tokens": _up_to(config.max_num_tokens, _USUAL_CHUNK)}),
        Profile(DECODE, {**common, "num_tokens": sequences}),
    )


def _up_to(largest: int, usual: int) -> Range:
    return Range(1, min(usual, largest), largest)
