"""PagedAttention: RoPE, write to the KV pool, causal attention over a sequence's blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from .adapter_tables import SEQUENCE_OFFSETS
from .definition import Array, Attribute, Plugin, Tensor


def _check(sizes: Mapping[str, int], attributes: Mapping[str, Any]) -> list[str]:
    heads, kv_heads, head_dim = (attributes[name] for name in ("num_heads", "num_kv_heads", "head_dim"))
    problems = []
    if min(heads, kv_heads, head_dim) < 1 or heads % max(1, kv_heads) != 0:
        problems.append(f"num_heads {heads} must be a multiple of num_kv_heads {kv_heads}, head_dim {head_dim} >= 1")
    if attributes["sliding_window"] < 0:
        problems.append(f"sliding_window {attributes['sliding_window']} must not be negative")
    if attributes["softcap"] < 0:
        problems.append(f"softcap {attributes['softcap']} must not be negative")
    expected = {
        "query": heads * head_dim,
        "key": kv_heads * head_dim,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
    }
    for name, size in expected.items():
        if sizes.get(name, size) != size:
            problems.append(f"'{name}' is {sizes[name]}; the attributes make it {size}")
    if "half" in sizes and not 1 <= sizes["half"] <= head_dim // 2:
        problems.append(f"cosine is {sizes['half']} wide; it must be 1 to head_dim / 2")
    if "offsets" in sizes and "sequences" in sizes and sizes["offsets"] != sizes["sequences"] + 1:
        problems.append(f"there are {sizes['offsets']} sequence_offsets for {sizes['sequences']} sequences")
    return problems


# Maximum number of parts of a decoding sequence's keys whose sums are stored.
_PARTS_OF_SEQUENCE: Final = 17


def _workspace_bytes(sizes: Mapping[str, int], attributes: Mapping[str, Any]) -> int:
    """Size of the queries after RoPE in two bytes, of each part's float32 results for every head, and of counters.

    A part's results are head_dim weighted values, the maximum score and the sum of the weights. There is at most one
    counter for each head.
    """
    heads, head_dim = int(attributes["num_heads"]), int(attributes["head_dim"])
    queries = -(-sizes["tokens"] * heads * head_dim * 2 // 256) * 256
    parts = sizes["sequences"] * _PARTS_OF_SEQUENCE
    return queries + parts * heads * (head_dim + 2) * 4 + sizes["sequences"] * heads * 4


def _rotate(heads: Array, cosine: Array, sine: Array) -> Array:
    """RoPE on [tokens, heads, head_dim]. Element i of the first half of the rotated part pairs with element i of the
    second half."""
    half = cosine.shape[1]
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    cosine, sine = cosine[:, None], sine[:, None]
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine, rest], axis=-1)


def _softmax(scores: Array) -> Array:
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights: Array = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return weights


def _evaluate(inputs: Sequence[Array], attributes: Mapping[str, Any]) -> tuple[Array, ...]:
    q, k, v, kv_pool, block_tables, sequence_offsets, positions, cosine, sine = inputs
    heads, kv_heads, head_dim = (int(attributes[name]) for name in ("num_heads", "num_kv_heads", "head_dim"))
    window, softcap = int(attributes["sliding_window"]), np.float32(attributes["softcap"])
    tokens = q.shape[0]
    queries = _rotate(q.astype(np.float32).reshape(tokens, heads, head_dim), cosine, sine)
    keys = _rotate(k.astype(np.float32).reshape(tokens, kv_heads, head_dim), cosine, sine)
    pool = kv_pool.copy()
    tokens_per_block = pool.shape[3]
    attended = np.zeros_like(queries)
    for sequence, table in enumerate(block_tables):
        for token in range(int(sequence_offsets[sequence]), int(sequence_offsets[sequence + 1])):
            position = int(positions[token])
            block, row = int(table[position // tokens_per_block]), position % tokens_per_block
            if block < 0:
                raise ValueError(f"sequence {sequence} has no block for position {position}")
            pool[block, 0, :, row] = keys[token].astype(pool.dtype)
            pool[block, 1, :, row] = v[token].reshape(kv_heads, head_dim)
            seen = range(max(0, position + 1 - window) if window else 0, position + 1)
            blocks = [int(table[at // tokens_per_block]) for at in seen]
            cached = pool[blocks, :, :, [at % tokens_per_block for at in seen]].astype(np.float32)
            grouped = queries[token].reshape(kv_heads, heads // kv_heads, head_dim)
            scores = np.einsum("hgd,nhd->hgn", grouped, cached[:, 0]) * np.float32(attributes["scale"])
            if softcap > 0:
                scores = softcap * np.tanh(scores / softcap)
            attended[token] = np.einsum("hgn,nhd->hgd", _softmax(scores), cached[:, 1]).reshape(heads, head_dim)
    return attended.reshape(q.shape).astype(q.dtype), pool


PAGED_ATTENTION: Final = Plugin(
    name="PagedAttention",
    doc="Applies RoPE to q and k, writes k and v to the blocks of each token's sequence, and attends from each "
    "token to its sequence's positions up to its own. Query head h reads KV head h / (num_heads / "
    "num_kv_heads). Scores and sums are float32.",
    inputs=(
        Tensor("q", "T", ("tokens", "query"), "Queries, head by head."),
        Tensor("k", "T", ("tokens", "key"), "Keys before RoPE, head by head."),
        Tensor("v", "T", ("tokens", "key"), "Values, head by head."),
        Tensor(
            "kv_pool",
            "T",
            ("blocks", 2, "kv_heads", "tokens_per_block", "head_dim"),
            "Keys after RoPE at [:, 0], values at [:, 1].",
        ),
        Tensor(
            "block_tables",
            "tensor(int32)",
            ("sequences", "max_blocks"),
            "Blocks of each sequence in the order of its positions; -1: none.",
        ),
        SEQUENCE_OFFSETS,
        Tensor("positions", "tensor(int32)", ("tokens",), "Position of each token in its sequence."),
        Tensor("cosine", "tensor(float)", ("tokens", "half"), "Cosines of the positions' angles, times any scaling."),
        Tensor("sine", "tensor(float)", ("tokens", "half"), "Sines of the positions' angles, times any scaling."),
    ),
    outputs=(
        Tensor("attended", "T", ("tokens", "query"), "The heads' outputs, head by head."),
        Tensor(
            "kv_pool_out",
            "T",
            ("blocks", 2, "kv_heads", "tokens_per_block", "head_dim"),
            "kv_pool, written in place.",
        ),
    ),
    own_attributes=(
        Attribute("layer", "int", "Decoder layer of the pool."),
        Attribute("num_heads", "int", "Query heads."),
        Attribute("num_kv_heads", "int", "Key and value heads; divides num_heads."),
        Attribute("head_dim", "int", "Width of a head."),
        Attribute("scale", "float", "Factor of the scores."),
        Attribute("sliding_window", "int", "A token sees itself and the sliding_window - 1 before it; 0: all.", 0),
        Attribute("softcap", "float", "Scores s become softcap * tanh(s / softcap); 0: no softcap.", 0.0),
    ),
    check=_check,
    evaluate=_evaluate,
    aliases={"kv_pool_out": "kv_pool"},
    workspace_bytes=_workspace_bytes,
)
