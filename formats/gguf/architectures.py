"""Table of the architectures that are read, in the order of llama.cpp's names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from .architecture import ATTENTION, GATED_MLP, HEAD_NORMS, LLAMA_MODEL, LLAMA_NORMS, Architecture
from .metadata import Metadata

Fields = Mapping[str, Any]

DENSE_MODULES: Final[Mapping[str, str]] = {"dense_2": "2_Dense", "dense_3": "3_Dense"}
"""Directories of sentence-transformers' modules in the original model, by the names of their tensors."""
_TYPES: Final = "token_types.weight"
_CLASSIFIER_OUTPUT: Final = "cls.output.weight"
CLASSIFIER_TENSORS: Final = frozenset({"cls.weight", _CLASSIFIER_OUTPUT})
"""Tensors that only files of classifiers have: the weights of their two layers."""
_ROBERTAS: Final[Mapping[object, str]] = {"gpt2": "RobertaModel", "t5": "XLMRobertaModel"}
"""BERT's relatives with other tokenizers, by the names of these."""


def _none(metadata: Metadata, common: Fields) -> dict[str, Any]:
    return {}


def _qwen2(metadata: Metadata, common: Fields) -> dict[str, Any]:
    return {"use_sliding_window": False}


def _granite(metadata: Metadata, common: Fields) -> dict[str, Any]:
    scale = metadata.optional_number(".attention.scale")
    return {
        "attention_multiplier": 1 / math.sqrt(common["head_dim"]) if scale is None else scale,
        "embedding_multiplier": metadata.optional_number(".embedding_scale") or 1.0,
        "residual_multiplier": metadata.optional_number(".residual_scale") or 1.0,
        "logits_scaling": metadata.optional_number(".logit_scale") or 1.0,
    }


def _gemma(metadata: Metadata, common: Fields) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh"}


def _gemma2(metadata: Metadata, common: Fields) -> dict[str, Any]:
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _query_scalar(common, layers_of_27b=46),
        "sliding_window": metadata.integer(".attention.sliding_window", 4096),
        "layer_types": _layer_types(metadata, 2, common),
        "attn_logit_softcapping": metadata.optional_number(".attn_logit_softcapping"),
        "final_logit_softcapping": metadata.optional_number(".final_logit_softcapping"),
    }


def _gemma3(metadata: Metadata, common: Fields) -> dict[str, Any]:
    window = metadata.optional_integer(".attention.sliding_window")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _query_scalar(common, layers_of_27b=62),
        "sliding_window": window or None,
        "layer_types": _layer_types(metadata, 6 if window else 1, common),
        "rope_local_base_freq": metadata.number(".rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": metadata.optional_number(".final_logit_softcapping"),
    }


def _query_scalar(common: Fields, layers_of_27b: int) -> int:
    """Gemma's divisor of scores, which files do not state: the largest model does not use the head's size."""
    if common["num_hidden_layers"] == layers_of_27b:
        return int(common["hidden_size"] // common["num_attention_heads"])
    return int(common["head_dim"])


def _layer_types(metadata: Metadata, number: int, common: Fields) -> list[str]:
    """Kinds of the layers: all but each `number`-th have a window, unless the file says otherwise."""
    key, count = ".attention.sliding_window_pattern", common["num_hidden_layers"]
    stated = metadata.raw(key)
    if isinstance(stated, np.ndarray):
        if len(stated) != count or not set(stated.tolist()) <= {0, 1}:
            metadata.problem(key, f"has {len(stated)} values; expected {count}, each 0 or 1")
        windows = stated.tolist()
    else:
        every = metadata.integer(key, number)
        windows = [layer % every != 0 for layer in range(1, count + 1)]
    return ["sliding_attention" if window else "full_attention" for window in windows]


def _phi3(metadata: Metadata, common: Fields) -> dict[str, Any]:
    return {"sliding_window": metadata.optional_integer(".attention.sliding_window") or None}


def _gpt2(metadata: Metadata, common: Fields) -> dict[str, Any]:
    return {"activation_function": "gelu_new"}


def _starcoder2(metadata: Metadata, common: Fields) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh", "sliding_window": None, "use_bias": True}


def _olmo3(metadata: Metadata, common: Fields) -> dict[str, Any]:
    return {
        "sliding_window": metadata.integer(".attention.sliding_window"),
        "layer_types": _layer_types(metadata, 4, common),
        "rope_local_base_freq": metadata.number(".rope.freq_base_swa", metadata.number(".rope.freq_base", 10000.0)),
    }


def _qwen3_moe(metadata: Metadata, common: Fields) -> dict[str, Any]:
    return {
        "num_experts": metadata.integer(".expert_count"),
        "num_experts_per_tok": metadata.integer(".expert_used_count"),
        "moe_intermediate_size": metadata.integer(".expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    }


def _qwen2_moe(metadata: Metadata, common: Fields) -> dict[str, Any]:
    return {
        **_qwen3_moe(metadata, common),
        "shared_expert_intermediate_size": metadata.integer(".expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
    }


def _olmoe(metadata: Metadata, common: Fields) -> dict[str, Any]:
    return {
        "num_experts": metadata.integer(".expert_count"),
        "num_experts_per_tok": metadata.integer(".expert_used_count"),
        "norm_topk_prob": False,
    }


def _gpt_oss(metadata: Metadata, common: Fields) -> dict[str, Any]:
    return {
        "num_local_experts": metadata.integer(".expert_count"),
        "num_experts_per_tok": metadata.integer(".expert_used_count"),
        "intermediate_size": metadata.integer(".expert_feed_forward_length", common["intermediate_size"]),
        "sliding_window": metadata.integer(".attention.sliding_window"),
        "layer_types": _layer_types(metadata, 2, common),
    }


def _cohere(metadata: Metadata, common: Fields) -> dict[str, Any]:
    return {"logit_scale": metadata.number(".logit_scale", 1.0)}


def _cohere2(metadata: Metadata, common: Fields) -> dict[str, Any]:
    return {
        **_cohere(metadata, common),
        "sliding_window": metadata.integer(".attention.sliding_window"),
        "layer_types": _layer_types(metadata, 4, common),
    }


def _smollm3(metadata: Metadata, common: Fields) -> dict[str, Any]:
    layers = range(1, common["num_hidden_layers"] + 1)
    return {"no_rope_layers": [int(layer % 4 != 0) for layer in layers], "use_sliding_window": False}


def _gemma_embedding(metadata: Metadata, common: Fields) -> dict[str, Any]:
    return {**_gemma3(metadata, common), "use_bidirectional_attention": True}


def _bert(metadata: Metadata, common: Fields) -> dict[str, Any]:
    return {"hidden_act": "gelu"}


def _distilbert(metadata: Metadata, common: Fields) -> dict[str, Any]:
    return {"activation": "gelu"}


def _roberta(metadata: Metadata, common: Fields) -> dict[str, Any]:
    return {"hidden_act": "gelu", "pad_token_id": _padding_token(metadata)}


def _padding_token(metadata: Metadata) -> int:
    return metadata.integer("tokenizer.ggml.padding_token_id", 1, minimum=0)


def _roberta_positions(metadata: Metadata) -> int:
    """Positions start after the padding token's id, and converters cut off the rows before."""
    return _padding_token(metadata) + 1


def _with_labels(
    read: Callable[[Metadata, Fields], dict[str, Any]], metadata: Metadata, common: Fields
) -> dict[str, Any]:
    """Fields of a classifier: also the labels, if the file has them."""
    labels = metadata.texts(".classifier.output_labels")
    named = {"id2label": {str(number): label for number, label in enumerate(labels)}} if labels else {}
    return {**read(metadata, common), **named}


def _mixtral(metadata: Metadata, common: Fields) -> dict[str, Any]:
    return {
        "num_local_experts": metadata.integer(".expert_count"),
        "num_experts_per_tok": metadata.integer(".expert_used_count"),
        "sliding_window": None,
    }


LLAMA: Final = Architecture(
    hugging_face="LlamaForCausalLM",
    read_fields=_none,
    layer_names={**LLAMA_NORMS, **ATTENTION, **GATED_MLP},
    bias_fields={"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"},
    is_permuted=True,
)
MIXTRAL: Final = replace(
    LLAMA,
    hugging_face="MixtralForCausalLM",
    read_fields=_mixtral,
    bias_fields={},
    layer_names={**LLAMA_NORMS, **ATTENTION, "ffn_gate_inp": "block_sparse_moe.gate"},
    expert_names={
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
)
"""Files of Mixtral have the architecture llama, with experts."""
OLMO2: Final = replace(
    LLAMA,
    hugging_face="Olmo2ForCausalLM",
    bias_fields={},
    is_permuted=False,
    layer_names={
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        **ATTENTION,
        **HEAD_NORMS,
        **GATED_MLP,
    },
)
OLMO3: Final = replace(OLMO2, hugging_face="Olmo3ForCausalLM", read_fields=_olmo3)
"""Files of OLMo 3 have the architecture olmo2, with a window."""
_EXPERTS: Final = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_COHERE: Final = Architecture(
    hugging_face="CohereForCausalLM",
    read_fields=_cohere,
    layer_names={"attn_norm": "input_layernorm", **ATTENTION, **GATED_MLP},
    norm_epsilon=(".attention.layer_norm_epsilon", "layer_norm_eps"),
    is_always_tied=True,
)
_QWEN2: Final = replace(LLAMA, hugging_face="Qwen2ForCausalLM", read_fields=_qwen2, bias_fields={}, is_permuted=False)
_QWEN3: Final = replace(
    _QWEN2,
    hugging_face="Qwen3ForCausalLM",
    layer_names={**LLAMA_NORMS, **ATTENTION, **HEAD_NORMS, **GATED_MLP},
    bias_fields={"attention_bias": "blk.0.attn_q.bias"},
)
_GEMMA: Final = replace(
    LLAMA,
    hugging_face="GemmaForCausalLM",
    read_fields=_gemma,
    bias_fields={},
    is_permuted=False,
    norms_plus_one=True,
    is_always_tied=True,
)
_GEMMA2: Final = replace(
    _GEMMA,
    hugging_face="Gemma2ForCausalLM",
    read_fields=_gemma2,
    layer_names={
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        **ATTENTION,
        **GATED_MLP,
    },
)
_GEMMA3: Final = replace(
    _GEMMA2,
    hugging_face="Gemma3ForCausalLM",
    read_fields=_gemma3,
    layer_names={**_GEMMA2.layer_names, **HEAD_NORMS},
    is_always_tied=False,
)
BERT: Final = Architecture(
    hugging_face="BertModel",
    read_fields=_bert,
    model_names={
        "token_embd": "bert.embeddings.word_embeddings",
        "position_embd": "bert.embeddings.position_embeddings",
        "token_types": "bert.embeddings.token_type_embeddings",
        "token_embd_norm": "bert.embeddings.LayerNorm",
    },
    layer_prefix="bert.encoder.layer",
    layer_names={
        "attn_q": "attention.self.query",
        "attn_k": "attention.self.key",
        "attn_v": "attention.self.value",
        "attn_output": "attention.output.dense",
        "attn_output_norm": "attention.output.LayerNorm",
        "ffn_up": "intermediate.dense",
        "ffn_down": "output.dense",
        "layer_output_norm": "output.LayerNorm",
    },
    row_fields={"type_vocab_size": _TYPES},
    norm_epsilon=(".attention.layer_norm_epsilon", "layer_norm_eps"),
    rotates=False,
    is_encoder=True,
)
_ROBERTA: Final = replace(
    BERT,
    hugging_face="RobertaModel",
    read_fields=_roberta,
    model_names={name: path.replace("bert.", "roberta.") for name, path in BERT.model_names.items()},
    layer_prefix="roberta.encoder.layer",
    first_position=_roberta_positions,
)
_DISTILBERT: Final = replace(
    BERT,
    hugging_face="DistilBertModel",
    read_fields=_distilbert,
    model_names={
        name: path.replace("bert.", "distilbert.") for name, path in BERT.model_names.items() if name != "token_types"
    },
    layer_prefix="distilbert.transformer.layer",
    layer_names={
        "attn_q": "attention.q_lin",
        "attn_k": "attention.k_lin",
        "attn_v": "attention.v_lin",
        "attn_output": "attention.out_lin",
        "attn_output_norm": "sa_layer_norm",
        "ffn_up": "ffn.lin1",
        "ffn_down": "ffn.lin2",
        "layer_output_norm": "output_layer_norm",
    },
    row_fields={},
    field_names={
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
    },
)
_CLASSIFIERS: Final[Mapping[str, tuple[str, str]]] = {
    "RobertaModel": ("classifier.dense", "classifier.out_proj"),
    "XLMRobertaModel": ("classifier.dense", "classifier.out_proj"),
    "DistilBertModel": ("pre_classifier", "classifier"),
}
"""Both layers of classifiers of texts, by the encoder's class. Files of BERT's classifiers lack the first one."""


def bert_architecture(tensors: Mapping[str, object], metadata: Metadata) -> Architecture:
    """Returns the architecture of a file that has the architecture bert, as all of BERT's relatives have."""
    tokenizer = metadata.raw("tokenizer.ggml.model")
    if tokenizer in _ROBERTAS:
        found = replace(_ROBERTA, hugging_face=_ROBERTAS[tokenizer])
    else:
        found = BERT if _TYPES in tensors else _DISTILBERT
    if not tensors.keys() >= CLASSIFIER_TENSORS or found is BERT:
        return found
    return replace(
        found,
        hugging_face=found.hugging_face.replace("Model", "ForSequenceClassification"),
        read_fields=partial(_with_labels, found.read_fields),
        model_names={
            **found.model_names,
            **dict(zip(("cls", "cls.output"), _CLASSIFIERS[found.hugging_face], strict=True)),
        },
        row_fields={**found.row_fields, "num_labels": _CLASSIFIER_OUTPUT},
        is_classifier=True,
    )


ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": LLAMA,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA3,
    "gemma-embedding": replace(
        _GEMMA3,
        hugging_face="Gemma3TextModel",
        read_fields=_gemma_embedding,
        model_names={**LLAMA_MODEL, **{name: f"{path}.linear" for name, path in DENSE_MODULES.items()}},
        is_encoder=True,
    ),
    "bert": BERT,
    "phi3": Architecture(
        hugging_face="Phi3ForCausalLM",
        read_fields=_phi3,
        layer_names={
            **LLAMA_NORMS,
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        partial_rotation=True,
    ),
    "granite": replace(LLAMA, hugging_face="GraniteForCausalLM", read_fields=_granite),
    "gpt2": Architecture(
        hugging_face="GPT2LMHeadModel",
        read_fields=_gpt2,
        model_names={
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        layer_prefix="transformer.h",
        layer_names={
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        transposed=frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"}),
        norm_epsilon=(".attention.layer_norm_epsilon", "layer_norm_epsilon"),
        field_names={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "intermediate_size": "n_inner",
        },
        dropped_fields=frozenset({"num_key_value_heads", "head_dim", "hidden_act"}),
        rotates=False,
    ),
    "starcoder2": Architecture(
        hugging_face="Starcoder2ForCausalLM",
        read_fields=_starcoder2,
        layer_names={**LLAMA_NORMS, **ATTENTION, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        norm_epsilon=(".attention.layer_norm_epsilon", "norm_epsilon"),
    ),
    "olmo2": OLMO2,
    "qwen3moe": replace(
        _QWEN3,
        hugging_face="Qwen3MoeForCausalLM",
        read_fields=_qwen3_moe,
        bias_fields={},
        layer_names={**LLAMA_NORMS, **ATTENTION, **HEAD_NORMS, "ffn_gate_inp": "mlp.gate"},
        expert_names=_EXPERTS,
    ),
    "qwen2moe": replace(
        _QWEN2,
        hugging_face="Qwen2MoeForCausalLM",
        read_fields=_qwen2_moe,
        layer_names={
            **LLAMA_NORMS,
            **ATTENTION,
            "ffn_gate_inp": "mlp.gate",
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
        },
        rows=frozenset({"ffn_gate_inp_shexp"}),
        expert_names=_EXPERTS,
    ),
    "olmoe": replace(
        _QWEN3,
        hugging_face="OlmoeForCausalLM",
        read_fields=_olmoe,
        layer_names={**LLAMA_NORMS, **ATTENTION, **HEAD_NORMS, "ffn_gate_inp": "mlp.gate"},
        bias_fields={},
        expert_names=_EXPERTS,
    ),
    "gpt-oss": replace(
        _QWEN2,
        hugging_face="GptOssForCausalLM",
        read_fields=_gpt_oss,
        layer_names={
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            **ATTENTION,
            "ffn_gate_inp": "mlp.router",
        },
        parameter_names={"attn_sinks": "self_attn.sinks"},
        bias_fields={"attention_bias": "blk.0.attn_q.bias"},
        expert_names=_EXPERTS,
        yarn_truncates=False,
        scales_by_default=True,
    ),
    "command-r": _COHERE,
    "cohere2": replace(_COHERE, hugging_face="Cohere2ForCausalLM", read_fields=_cohere2),
    "glm4": Architecture(
        hugging_face="Glm4ForCausalLM",
        read_fields=_none,
        layer_names={
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            **ATTENTION,
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        bias_fields={"attention_bias": "blk.0.attn_q.bias"},
        partial_rotation=True,
    ),
    "smollm3": replace(LLAMA, hugging_face="SmolLM3ForCausalLM", read_fields=_smollm3),
}
"""By the values of general.architecture."""
