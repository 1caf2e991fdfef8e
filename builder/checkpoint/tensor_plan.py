"""Which slices of which Hugging Face tensors make each tensor of a rank (layout: docs/formats.md)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .config import CheckpointConfig
from .tensor_names import EMBEDDING, LM_HEAD

HF_EMBEDDING = "model.embed_tokens.weight"
HF_LM_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Slice:
    """Rows and columns of a Hugging Face tensor; columns None: all, and the only choice for one dimension."""

    source: str
    rows: range
    columns: range | None = None


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of a rank: its slices below one another, then `zero_rows` rows of zeros."""

    name: str
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]
    zero_rows: int = 0


def hf_tensor_shapes(config: CheckpointConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a Hugging Face checkpoint of this config must hold, with its shape.

    lm_head.weight is left out where the embedding serves as lm_head.
    """
    q_width = config.num_attention_heads * config.head_size
    kv_width = config.num_key_value_heads * config.head_size
    hidden, intermediate = config.hidden_size, config.intermediate_size
    linears = {
        "self_attn.q_proj": (q_width, hidden, config.attn_bias),
        "self_attn.k_proj": (kv_width, hidden, config.attn_bias),
        "self_attn.v_proj": (kv_width, hidden, config.attn_bias),
        "self_attn.o_proj": (hidden, q_width, config.attn_dense_bias),
        "mlp.gate_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.up_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, intermediate, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {HF_EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        for name, (outputs, inputs, has_bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (outputs, inputs)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (outputs,)
        if config.qk_layernorm:
            shapes[f"{prefix}self_attn.q_norm.weight"] = (config.head_size,)
            shapes[f"{prefix}self_attn.k_norm.weight"] = (config.head_size,)
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.share_embedding_table:
        shapes[HF_LM_HEAD] = (config.vocab_size, hidden)
    return shapes


def plan_rank(config: CheckpointConfig, rank: int) -> list[PlannedTensor]:
    """The tensors of rank{N}.safetensors, in the order of the file.

    Layers are numbered from 0 within each pipeline rank, as TensorRT-LLM does it.
    """
    pp_rank, tp_rank = divmod(rank, config.mapping.tp_size)
    layers_per_rank = config.num_hidden_layers // config.mapping.pp_size
    tensors: list[PlannedTensor] = []
    if pp_rank == 0:
        tensors.append(_whole(EMBEDDING, HF_EMBEDDING, (config.vocab_size, config.hidden_size)))
    for layer in range(layers_per_rank):
        tensors.extend(_plan_layer(config, tp_rank, layer, pp_rank * layers_per_rank + layer))
    if pp_rank == config.mapping.pp_size - 1:
        tensors.append(_whole("transformer.ln_f.weight", "model.norm.weight", (config.hidden_size,)))
        if not config.lm_head_is_embedding:
            tensors.append(_plan_lm_head(config, tp_rank))
    return tensors


def _plan_layer(config: CheckpointConfig, tp_rank: int, layer: int, hf_layer: int) -> Iterator[PlannedTensor]:
    ours, theirs = f"transformer.layers.{layer}.", f"model.layers.{hf_layer}."
    tp_size, hidden = config.mapping.tp_size, config.hidden_size
    q_rows = _share(config.num_attention_heads * config.head_size, tp_size, tp_rank)
    kv_rows = _key_value_rows(config, tp_rank)
    ffn = _share(config.intermediate_size, tp_size, tp_rank)

    def column(name: str, sources: tuple[tuple[str, range], ...], has_bias: bool) -> Iterator[PlannedTensor]:
        """Split by outputs: the weight's rows, and the bias."""
        outputs = sum(len(rows) for _, rows in sources)
        for kind, shape in (("weight", (outputs, hidden)), ("bias", (outputs,))):
            if kind == "weight" or has_bias:
                slices = tuple(Slice(f"{theirs}{source}.{kind}", rows) for source, rows in sources)
                yield PlannedTensor(f"{ours}{name}.{kind}", shape, slices)

    def row(name: str, source: str, inputs: range, has_bias: bool) -> Iterator[PlannedTensor]:
        """Split by inputs: the weight's columns. The bias is whole: it is added once, to the ranks' sum."""
        weight = Slice(f"{theirs}{source}.weight", range(hidden), inputs)
        yield PlannedTensor(f"{ours}{name}.weight", (hidden, len(inputs)), (weight,))
        if has_bias:
            yield _whole(f"{ours}{name}.bias", f"{theirs}{source}.bias", (hidden,))

    yield _whole(f"{ours}input_layernorm.weight", f"{theirs}input_layernorm.weight", (hidden,))
    qkv = (("self_attn.q_proj", q_rows), ("self_attn.k_proj", kv_rows), ("self_attn.v_proj", kv_rows))
    yield from column("attention.qkv", qkv, config.attn_bias)
    if config.qk_layernorm:
        for norm in ("q", "k"):
            name, source = f"{ours}attention.{norm}_layernorm.weight", f"{theirs}self_attn.{norm}_norm.weight"
            yield _whole(name, source, (config.head_size,))
    yield from row("attention.dense", "self_attn.o_proj", q_rows, config.attn_dense_bias)
    yield _whole(f"{ours}post_layernorm.weight", f"{theirs}post_attention_layernorm.weight", (hidden,))
    yield from column("mlp.fc", (("mlp.gate_proj", ffn),), config.mlp_bias)
    yield from column("mlp.gate", (("mlp.up_proj", ffn),), config.mlp_bias)
    yield from row("mlp.proj", "mlp.down_proj", ffn, config.mlp_bias)


def _plan_lm_head(config: CheckpointConfig, tp_rank: int) -> PlannedTensor:
    """Split by outputs, after the vocabulary was padded with zero rows to a multiple of tp_size."""
    rows = -(-config.vocab_size // config.mapping.tp_size)
    real = range(min(rows * tp_rank, config.vocab_size), min(rows * (tp_rank + 1), config.vocab_size))
    source = HF_EMBEDDING if config.share_embedding_table else HF_LM_HEAD
    return PlannedTensor(LM_HEAD, (rows, config.hidden_size), (Slice(source, real),), rows - len(real))


def _whole(name: str, source: str, shape: tuple[int, ...]) -> PlannedTensor:
    return PlannedTensor(name, shape, (Slice(source, range(shape[0])),))


def _share(size: int, parts: int, part: int) -> range:
    return range(size // parts * part, size // parts * (part + 1))


def _key_value_rows(config: CheckpointConfig, tp_rank: int) -> range:
    """Rows of k and v that go with a rank's query heads; with fewer heads than ranks, ranks share one."""
    ranks_per_head = max(1, config.mapping.tp_size // config.num_key_value_heads)
    return _share(
        config.num_key_value_heads * config.head_size,
        config.mapping.tp_size // ranks_per_head,
        tp_rank // ranks_per_head,
    )
