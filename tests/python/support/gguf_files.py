"""GGUF files of transformers' models, with the names, orders and keys that llama.cpp's converter writes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer

Array = np.ndarray[Any, np.dtype[Any]]
Quantizer = Callable[[str, Array], tuple[Array, int | None]]
"""Returns the stored bytes of a tensor with a name, and their type; None: the array's own."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_PERMUTED = ("llama", "granite", "smollm3")
_CONV1D = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")


def plain(name: str, values: Array) -> tuple[Array, int | None]:
    """Stores float32."""
    return values, None


def write_model(
    model: Any,
    architecture: str,
    path: Path,
    tokenizer: Mapping[str, Any] | None = None,
    *,
    quantize: Quantizer = plain,
    parts: int = 1,
    extra: Mapping[str, Any] | None = None,
    added: Mapping[str, Array] | None = None,
) -> Path:
    """Writes a model as one file, or as several parts. Returns the path of the first.

    tokenizer: metadata of tokenizer_keys(). extra, added: further metadata and tensors.
    """
    tensors = dict(_tensors(model, architecture, quantize))
    tensors.update((name, (values, None)) for name, values in (added or {}).items())
    keys = {**model_keys(model.config, architecture), **(tokenizer or {}), **(extra or {})}
    names = list(tensors)
    paths = [path] if parts == 1 else [
        path.with_name(f"{path.stem}-{number + 1:05d}-of-{parts:05d}.gguf") for number in range(parts)
    ]  # fmt: skip
    for number, part in enumerate(paths):
        split = {"split.no": number, "split.count": parts, "split.tensors.count": len(names)} if parts > 1 else {}
        own = {name: tensors[name] for name in names[number::parts]}
        write_file(part, architecture, {**(keys if number == 0 else {}), **split}, own)
    return paths[0]


def write_file(
    path: Path, architecture: str, keys: Mapping[str, Any], tensors: Mapping[str, tuple[Array, int | None]]
) -> Path:
    """Writes metadata and tensors. The type of a number follows from its Python type."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, list(value))
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, values, raw_dtype=None if kind is None else gguf.GGMLQuantizationType(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def model_keys(config: Any, architecture: str) -> dict[str, Any]:
    """Metadata of a model's config."""
    c = config.to_dict()
    heads, width = config.num_attention_heads, config.hidden_size
    rope = getattr(config, "rope_parameters", None) or {}
    full = rope.get("full_attention", rope)
    own: dict[str, Any] = {
        "context_length": config.max_position_embeddings - unread_positions(config),
        "embedding_length": width,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": c.get("intermediate_size") or c.get("n_inner") or c.get("hidden_dim") or 4 * width,
        "attention.head_count": heads,
        "attention.head_count_kv": c.get("num_key_value_heads"),
        "attention.key_length": c.get("head_dim"),
        "attention.value_length": c.get("head_dim"),
        "attention.layer_norm_rms_epsilon": c.get("rms_norm_eps"),
        "attention.layer_norm_epsilon": c.get("layer_norm_epsilon") or c.get("norm_epsilon") or c.get("layer_norm_eps"),
        "rope.freq_base": full.get("rope_theta"),
        "rope.freq_base_swa": rope.get("sliding_attention", {}).get("rope_theta"),
        "expert_count": c.get("num_local_experts") or c.get("num_experts"),
        "expert_used_count": c.get("num_experts_per_tok"),
        "expert_feed_forward_length": c.get("moe_intermediate_size"),
        "attn_logit_softcapping": c.get("attn_logit_softcapping"),
        "final_logit_softcapping": c.get("final_logit_softcapping"),
        "attention.scale": c.get("attention_multiplier"),
        "embedding_scale": c.get("embedding_multiplier"),
        "residual_scale": c.get("residual_multiplier"),
        "logit_scale": c.get("logits_scaling") or c.get("logit_scale"),
        "expert_shared_feed_forward_length": c.get("shared_expert_intermediate_size"),
    }
    if architecture in ("gemma2", "gemma3", "phi3", "gpt-oss", "cohere2"):
        own["attention.sliding_window"] = c.get("sliding_window") or 0
    if c["model_type"] == "olmo3":
        own["attention.sliding_window"] = config.sliding_window
        own["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config.layer_types]
    if architecture in ("phi3", "glm4"):
        size = c.get("head_dim") or width // heads
        own["rope.dimension_count"] = int(full.get("partial_rotary_factor", 1.0) * size)
    if architecture == "bert":
        own["attention.causal"] = False
        own["attention.layer_norm_epsilon"] = c.get("layer_norm_eps", 1e-12)
    if architecture == "gemma-embedding":
        own["attention.sliding_window"] = 2 * (config.sliding_window - 1)  # transformers halves the field of the file
    kind = full.get("rope_type")
    if kind in ("linear", "yarn", "longrope"):
        own["rope.scaling.type"] = kind
        own["rope.scaling.factor"] = full.get("factor")
        own["rope.scaling.original_context_length"] = full.get("original_max_position_embeddings")
    if kind == "longrope":
        ratio = config.max_position_embeddings / full["original_max_position_embeddings"]
        own["rope.scaling.attn_factor"] = (
            1 + math.log(ratio) / math.log(full["original_max_position_embeddings"])
        ) ** 0.5
    keys = {f"{architecture}.{name}": value for name, value in own.items() if value is not None}
    return {"general.type": "model", "general.name": "Test", "general.file_type": 0, **keys}


def _tensors(model: Any, architecture: str, quantize: Quantizer) -> Iterator[tuple[str, tuple[Array, int | None]]]:
    config = model.config
    kind = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    rope = getattr(config, "rope_parameters", None) or {}
    for name in ("long", "short") if f"{'long'}_factor" in rope else ():
        yield f"rope_factors_{name}.weight", (np.array(rope[f"{name}_factor"], np.float32), None)
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", (llama3_factors(config), None)
    is_tied = config.tie_word_embeddings
    for name, parameter in model.state_dict().items():
        if (name == "lm_head.weight" and is_tied) or "pooler.dense" in name:
            continue
        values = parameter.float().numpy()
        for own, part in _split_alternating(name, values) if architecture == "gpt-oss" else _split(name, values):
            own = own.removeprefix("roberta.").removeprefix("distilbert.")
            if config.model_type == "distilbert" and own.startswith("classifier."):
                own = own.replace("classifier.", "classifier.out_proj.")
            found = names.get_name(own, try_suffixes=(".weight", ".bias"))
            assert found is not None, own
            yield found, quantize(found, _changed(found, part, config, architecture))


def unread_positions(config: Any) -> int:
    """Number of rows of RoBERTa's positions that the converter cuts off."""
    return int(config.pad_token_id) + 1 if "roberta" in config.model_type else 0


def _split(name: str, values: Array) -> Iterator[tuple[str, Array]]:
    """Tensors of all experts, which transformers stacks in another way, under the names that the package maps."""
    if name.endswith("experts.gate_up_proj"):
        gate, up = np.split(values, 2, axis=1)
        yield name.replace("gate_up_proj", "gate_proj.weight"), np.ascontiguousarray(gate)
        yield name.replace("gate_up_proj", "up_proj.weight"), np.ascontiguousarray(up)
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", values
    elif name.endswith("shared_expert_gate.weight"):
        yield name, values.reshape(-1)
    else:
        yield name, values


def _split_alternating(name: str, values: Array) -> Iterator[tuple[str, Array]]:
    """GPT-OSS: matrices of all experts are [experts, in, out], and the outputs of gate and up alternate."""
    kind = "bias" if name.endswith("_bias") else "weight"
    inner = name.removesuffix("_bias")
    if not inner.endswith(("experts.gate_up_proj", "experts.down_proj")):
        yield (f"{name}.weight" if name.endswith("sinks") else name), values
        return
    outputs_last = values if kind == "bias" else values.swapaxes(1, 2)
    if inner.endswith("down_proj"):
        yield f"{inner}.{kind}", np.ascontiguousarray(outputs_last)
        return
    for first, layer in enumerate(("gate_proj", "up_proj")):
        yield inner.replace("gate_up_proj", f"{layer}.{kind}"), np.ascontiguousarray(outputs_last[:, first::2])


def _changed(name: str, values: Array, config: Any, architecture: str) -> Array:
    if architecture in _PERMUTED and ".attn_q." in name:
        return permuted(values, config.num_attention_heads)
    if architecture in _PERMUTED and ".attn_k." in name:
        return permuted(values, config.num_key_value_heads)
    if architecture.startswith("gemma") and "norm" in name:
        return np.asarray(values + np.float32(1))
    if name == "position_embd.weight":
        return values[unread_positions(config) :]
    if architecture == "gpt2" and name.endswith(_CONV1D):
        return np.ascontiguousarray(values.T)
    return values


def permuted(rows: Array, heads: int) -> Array:
    """Rows of q or k in llama.cpp's order: the two elements that are rotated together are neighbours."""
    by_halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    result: Array = np.array(by_halves.swapaxes(1, 2)).reshape(rows.shape)
    return result


def llama3_factors(config: Any) -> Array:
    """Divisors of the frequencies for rope scaling of the kind llama3, as transformers computes them."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    size = 2 * len(scaled)
    base = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    return np.asarray((base / scaled).numpy())


def tokenizer_keys(tokenizer: Tokenizer, pre: str, **keys: Any) -> dict[str, Any]:
    """Metadata of a byte-level BPE tokenizer."""
    content = json.loads(tokenizer.to_str())
    added = {token["id"]: CONTROL if token["special"] else USER_DEFINED for token in content["added_tokens"]}
    size = tokenizer.get_vocab_size()
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"]["merges"]]
    return _token_keys(
        "gpt2",
        [tokenizer.id_to_token(number) for number in range(size)],
        [added.get(number, NORMAL) for number in range(size)],
        {"pre": pre, "merges": merges, **keys},
    )


def sentencepiece_keys(
    tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float], **keys: Any
) -> dict[str, Any]:
    """Metadata of a SentencePiece tokenizer."""
    return _token_keys("llama", tokens, kinds, {"pre": "default", "scores": scores, **keys})


def word_piece_keys(tokenizer: Tokenizer, **keys: Any) -> dict[str, Any]:
    """Metadata of BERT's tokenizer, without that of its normaliser."""
    content = json.loads(tokenizer.to_str())
    vocabulary = sorted(content["model"]["vocab"].items(), key=lambda pair: pair[1])
    special = {token["content"] for token in content["added_tokens"] if token["special"]}

    def stored(text: str) -> str:
        if text in special:
            return text
        return text.removeprefix("##") if text.startswith("##") else f"▁{text}"

    tokens = [stored(text) for text, _ in vocabulary]
    kinds = [CONTROL if text in special else NORMAL for text, _ in vocabulary]
    ids = {name: tokenizer.token_to_id(text) for name, text in (
        ("bos_token_id", "[CLS]"), ("eos_token_id", "[SEP]"), ("unknown_token_id", "[UNK]"),
        ("seperator_token_id", "[SEP]"), ("padding_token_id", "[PAD]"), ("mask_token_id", "[MASK]"))}  # fmt: skip
    ids = {name: number for name, number in ids.items() if number is not None}
    adds = {"add_bos_token": True, "add_eos_token": True, "add_sep_token": False}
    return _token_keys("bert", tokens, kinds, {"pre": "bert-bge", "token_type_count": 2, **ids, **adds, **keys})


def unigram_keys(tokenizer: Tokenizer, **keys: Any) -> dict[str, Any]:
    """Metadata of XLM-RoBERTa's tokenizer, without that of its normaliser."""
    content = json.loads(tokenizer.to_str())
    special = {token["content"]: UNKNOWN if token["content"] == "<unk>" else CONTROL
               for token in content["added_tokens"]}  # fmt: skip
    pieces = content["model"]["vocab"]
    ids = {name: tokenizer.token_to_id(text) for name, text in (
        ("bos_token_id", "<s>"), ("eos_token_id", "</s>"), ("unknown_token_id", "<unk>"),
        ("seperator_token_id", "</s>"), ("padding_token_id", "<pad>"), ("cls_token_id", "<s>"))}  # fmt: skip
    own = {
        "pre": "default", "scores": [score for _, score in pieces], "add_space_prefix": True, "token_type_count": 1,
        "remove_extra_whitespaces": True, "add_bos_token": True, "add_eos_token": True, "add_sep_token": True, **ids,
    }  # fmt: skip
    kinds = [special.get(text, NORMAL) for text, _ in pieces]
    return _token_keys("t5", [text for text, _ in pieces], kinds, {**own, **keys})


def _token_keys(model: str, tokens: Sequence[str], kinds: Sequence[int], keys: Mapping[str, Any]) -> dict[str, Any]:
    own = {"model": model, "tokens": tokens, "token_type": kinds, **keys}
    return {f"tokenizer.ggml.{name}": value for name, value in own.items() if value is None or value != []}
