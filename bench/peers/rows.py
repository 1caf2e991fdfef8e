"""The rows that all peers are asked for, and the minimum work of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from own import BenchModel, FamilyModel
from worker import GGUF

from adaptrt.tools.bench.limits import greatest
from adaptrt.tools.bench.profile import Work


@dataclass(frozen=True)
class Target:
    """Target for AdaptRT's speed as a multiple of a peer's."""

    at_least: float
    peer: str | None = None
    """None: every peer."""

    def is_for(self, peer: str) -> bool:
        """True if the target applies to this peer."""
        return self.peer in (None, peer)


@dataclass(frozen=True)
class RowKind:
    """A row of the table."""

    title: str
    unit: str = "tok/s"
    weights: str = "bf16"
    """Kind of weights."""
    adapters: bool = False
    tokens: int = 0
    """Tokens per step, for rows with a roofline: a step reads the base weights and its adapter's weights once."""
    prompt: bool = False
    """True: the tokens are one prompt, and only its last token gets logits. False: all tokens get logits."""
    rank: int = 0
    """Rank of the adapter, which acts on all linear layers; 0: none."""
    target: Target | None = None
    target_with_amx: Target | None = None
    """Replaces `target` on a CPU with AMX."""
    peers_of: str | None = None
    """Another row whose peers' samples this row is compared with. Peers are not asked for this row, because it would be
    the same as the other one for them."""
    why_not: str = "no quantised weights by this runner"
    """Reason that is shown if a peer does not run the row and gives no reason."""


def _gguf_rows(kind: str) -> dict[str, RowKind]:
    def row(what: str, target: float, *, adapters: bool = False) -> RowKind:
        title, only = f"{kind.upper()} in GGUF: {what}", "reads no GGUF files"
        return RowKind(title, weights=kind, adapters=adapters, target=Target(target, "llama_cpp"), why_not=only)

    return {
        f"{kind}-prefill-512": row("prefill, 512 tokens", 2.0),
        f"{kind}-decode-1": row("decode, 1 request", 1.1),
        f"{kind}-decode-16": row("decode, 16 requests", 2.0),
        f"{kind}-mixed-16": row("decode, 16 requests, 16 adapters of rank 8 to 64", 5.0, adapters=True),
    }


OWN = "the peers' int8 is W8A8: they quantise activations too"
ROWS = {
    "prefill-512": RowKind(
        "prefill, 512 tokens",
        tokens=512,
        prompt=True,
        target=Target(1.10, "openvino"),
        target_with_amx=Target(1.50),
    ),
    "compressed-prefill-512": RowKind(
        "bfloat16 in 12 bits: prefill, 512 tokens",
        weights="compressed",
        tokens=512,
        prompt=True,
        peers_of="prefill-512",
    ),
    "prefill-8192": RowKind("prefill, 8192 tokens", tokens=8192, prompt=True, target_with_amx=Target(1.30)),
    "decode-8192": RowKind("decode after 8192 tokens, 1 request", target=Target(1.25)),
    "decode-1": RowKind("decode, 1 request", tokens=1, target=Target(1.25, "llama_cpp"), target_with_amx=Target(1.15)),
    "compressed-decode-1": RowKind(
        "bfloat16 in 12 bits: decode, 1 request",
        weights="compressed",
        tokens=1,
        target=Target(1.25, "llama_cpp"),
        target_with_amx=Target(1.15),
        peers_of="decode-1",
    ),
    "decode-16": RowKind(
        "decode, 16 requests", tokens=16, target=Target(1.35, "openvino"), target_with_amx=Target(1.25)
    ),
    "compressed-decode-16": RowKind(
        "bfloat16 in 12 bits: decode, 16 requests", weights="compressed", tokens=16, peers_of="decode-16"
    ),
    "prefill-512-lora": RowKind(
        "prefill, 512 tokens, rank-16 adapter", adapters=True, tokens=512, prompt=True, rank=16
    ),
    "decode-1-lora": RowKind(
        "decode, 1 request, rank-16 adapter",
        adapters=True,
        tokens=1,
        rank=16,
        target=Target(1.30),
        target_with_amx=Target(1.50),
    ),
    "compressed-decode-1-lora": RowKind(
        "bfloat16 in 12 bits: decode, 1 request, rank-16 adapter",
        weights="compressed",
        adapters=True,
        tokens=1,
        rank=16,
        target=Target(1.30),
        target_with_amx=Target(1.50),
        peers_of="decode-1-lora",
    ),
    "mixed-16": RowKind("decode, 16 requests, 16 adapters of rank 8 to 64", adapters=True, target=Target(10.0)),
    "adapter-load": RowKind("adapter of rank 16 from disk", adapters=True, unit="s"),
    "decode-1-dora": RowKind("decode, 1 request, DoRA", adapters=True),
    "mixed-16-dora": RowKind("decode, 16 requests, 8 LoRA and 8 DoRA", adapters=True),
    "int8-prefill-512": RowKind(
        "int8: prefill, 512 tokens",
        weights="int8",
        tokens=512,
        prompt=True,
        target=Target(1.0, "openvino"),
        target_with_amx=Target(1.3),
    ),
    "int8-decode-1": RowKind(
        "int8: decode, 1 request",
        weights="int8",
        tokens=1,
        target=Target(1.3, "llama_cpp"),
        target_with_amx=Target(2.5),
    ),
    "int8-decode-16": RowKind(
        "int8: decode, 16 requests",
        weights="int8",
        tokens=16,
        target=Target(1.2, "openvino"),
        target_with_amx=Target(2.0),
    ),
    "w8a16-prefill-512": RowKind(
        "int8 weights alone: prefill, 512 tokens", weights="w8a16", why_not=OWN, tokens=512, prompt=True
    ),
    "w8a16-decode-1": RowKind("int8 weights alone: decode, 1 request", weights="w8a16", why_not=OWN, tokens=1),
    "w8a16-decode-16": RowKind("int8 weights alone: decode, 16 requests", weights="w8a16", why_not=OWN, tokens=16),
    "int4-prefill-512": RowKind(
        "int4: prefill, 512 tokens", weights="int4", tokens=512, prompt=True, target_with_amx=Target(1.1)
    ),
    "int4-decode-1": RowKind(
        "int4: decode, 1 request", weights="int4", tokens=1, target=Target(1.2), target_with_amx=Target(2.0)
    ),
    "int4-decode-16": RowKind("int4: decode, 16 requests", weights="int4", tokens=16),
    **_gguf_rows("q8_0"),
    **_gguf_rows("q4_k_m"),
}
_UNQUANTISED = ("bf16", "compressed")
_LAYER_BYTES = {"bf16": 2.0, "compressed": 1.5, "int8": 1.0, "w8a16": 1.0, "int4": 0.5 + 2 / 128}
"""Bytes per weight of the layers; int4 has a bfloat16 scale per 128 weights. The scales of int8 outputs and the tables
of compressed weights are negligible."""
_HEAD_BYTES = {"bf16": 2.0, "compressed": 1.5, "int8": 1.0, "w8a16": 1.0, "int4": 1.0}
_ADAPTER_BYTES = 2  # Bytes per value: bfloat16.


def groups() -> tuple[list[str], ...]:
    """Groups of rows that are measured together. Between groups the peers' processes end, which frees their memory."""
    bases = [name for name, kind in ROWS.items() if kind.weights in _UNQUANTISED and not kind.adapters]
    adapters = [name for name, kind in ROWS.items() if kind.weights in _UNQUANTISED and kind.adapters]
    quantised = [name for name, kind in ROWS.items() if kind.weights not in (*_UNQUANTISED, *GGUF)]
    return bases, adapters, quantised, *([name for name in ROWS if ROWS[name].weights == kind] for kind in GGUF)


def rows_of(model: BenchModel | FamilyModel) -> list[str]:
    """Rows of a model. A model of another family only has the rows with its own weights, compressed or not."""
    if isinstance(model, BenchModel):
        return list(ROWS)
    return [name for name, kind in ROWS.items() if kind.weights in _UNQUANTISED and not kind.adapters]


def source_of_peers(name: str) -> str:
    """Returns the row whose peers' samples this row is compared with; usually the row itself."""
    return ROWS[name].peers_of or name


def work_of_row(name: str, model: BenchModel | FamilyModel) -> Work | None:
    """Returns the minimum work of a step: base and adapter weights are read and multiplied once. None: no roofline.

    A model of another family has no roofline here: which experts a mixture reads depends on its tokens, and states have
    products of their own.

    For a prompt, attention's products count as well. Only its last token needs lm_head, and the last layer computes
    only keys and values for the other tokens.
    """
    kind = ROWS[name]
    if kind.tokens == 0 or isinstance(model, FamilyModel):
        return None
    logit_rows = 1 if kind.prompt else kind.tokens
    last_layer = f".layers.{model.num_hidden_layers - 1}."
    layers = adapter = 0
    flops = _attention_flops(kind.tokens, model) if kind.prompt else 0
    for tensor, (outputs, inputs) in _matrices(model):
        if ".layers." not in tensor:
            continue
        of_all_tokens = last_layer not in tensor or "k_proj" in tensor or "v_proj" in tensor
        rows = kind.tokens if of_all_tokens else logit_rows
        flops += 2 * rows * (outputs * inputs + kind.rank * (outputs + inputs))
        layers += outputs * inputs
        adapter += kind.rank * (outputs + inputs)
    head = model.vocab_size * model.hidden_size
    # A matrix that is also the embedding table is not compressed.
    head_weights = "bf16" if kind.weights == "compressed" and model.tie_word_embeddings else kind.weights
    return Work(
        num_bytes=int(_LAYER_BYTES[kind.weights] * layers + _HEAD_BYTES[head_weights] * head)
        + _ADAPTER_BYTES * adapter,
        flops=flops + 2 * logit_rows * head,
    )


def _attention_flops(tokens: int, model: BenchModel) -> int:
    """Returns the FLOPs of a prompt's attention: each token attends to itself and all earlier tokens. In the last layer
    only the last token counts.
    """
    pairs = (model.num_hidden_layers - 1) * tokens * (tokens + 1) // 2 + tokens
    products = 2  # Queries by keys, and weights by values.
    return 2 * products * pairs * model.num_attention_heads * model.head_dim


def _matrices(model: BenchModel) -> list[tuple[str, tuple[int, int]]]:
    return [(name, (shape[0], shape[1])) for name, shape, _ in model.tensors() if len(shape) == 2]


def peak_of_row(name: str, limits: Mapping[str, float]) -> str:
    """Name of the multiply-add limit that AdaptRT is compared with in this row."""
    in_8_bits = ["int8_ops"] if ROWS[name].weights == "int8" else []
    return greatest(["float32_flops", "bfloat16_flops", *in_8_bits], limits)


def target_of_row(name: str, model: BenchModel | FamilyModel, *, amx: bool) -> Target | None:
    """The row's target on a CPU with or without AMX."""
    if isinstance(model, FamilyModel):
        return Target(1.1 if "qwen3.5" in model.family and ROWS[name].prompt else 1.25)
    kind = ROWS[name]
    return kind.target_with_amx or kind.target if amx else kind.target
