"""Flags of trtllm-build that have no effect here: accepted if their value holds anyway, else rejected with a reason."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from ...common.number_flags import MAX_INT32, integer
from ...formats.engine.build_config import AUTO, DISABLE, ENABLE, NATIVE

PROMPT_TABLE: Final = "max_prompt_embedding_table_size"

_SWITCH: Final = (ENABLE, DISABLE)
_DTYPES: Final = (AUTO, "float16", "float32", "bfloat16", DISABLE)


class _Valued(NamedTuple):
    """A flag with a value. An empty tuple of accepted values accepts all."""

    accepted: tuple[str, ...]
    reason: str
    bare: str | None = None
    """Value of the flag without an argument; None: an argument is required."""


class _Number(NamedTuple):
    """A flag with a number within a range."""

    minimum: int
    maximum: int
    reason: str


_BUILT_IN: Final = "kernels are chosen automatically by type and size"
_NOT_FUSED: Final = "no such kernel exists"
_BY_QUANTIZATION: Final = "a checkpoint states how its weights are quantised; use --quantization"

_VALUED: Final = {
    "log_level": _Valued(
        ("internal_error", "error", "warning", "info", "verbose", "debug", "trace"),
        "errors and progress are always shown",
    ),
    "profiling_verbosity": _Valued(("layer_names_only", "detailed", "none"), "it does not change results"),
    "multiple_profiles": _Valued(_SWITCH, "sizes are chosen at run time"),
    "nccl_plugin": _Valued(_DTYPES, "ranks exchange values of the checkpoint's type"),
    "bert_attention_plugin": _Valued(_DTYPES, _BUILT_IN),
    "moe_plugin": _Valued(_DTYPES, _BUILT_IN),
    "mamba_conv1d_plugin": _Valued(_DTYPES, "no supported model family has such a layer"),
    "lookup_plugin": _Valued(_DTYPES, _BUILT_IN),
    "weight_only_quant_matmul_plugin": _Valued(_DTYPES, _BUILT_IN),
    "weight_only_groupwise_quant_matmul_plugin": _Valued(_DTYPES, _BUILT_IN),
    "use_fused_mlp": _Valued(_SWITCH, _BUILT_IN, ENABLE),
    "multi_block_mode": _Valued(_SWITCH, _BUILT_IN),
    "enable_xqa": _Valued(_SWITCH, _BUILT_IN),
    "use_custom_all_reduce": _Valued(_SWITCH, "it changes how ranks communicate, but not results"),
    "use_paged_context_fmha": _Valued((ENABLE,), "attention always reads the paged KV cache"),
    "paged_state": _Valued((ENABLE,), "the state of requests is always paged"),
    "context_fmha_fp32_acc": _Valued((ENABLE,), "attention accumulates in float32"),
    "bert_context_fmha_fp32_acc": _Valued((ENABLE,), "attention accumulates in float32"),
    "attention_qk_half_accumulation": _Valued((DISABLE,), "attention accumulates in float32"),
    "use_fp8_context_fmha": _Valued((DISABLE,), "attention has no FP8"),
    "use_context_fmha_for_generation": _Valued((DISABLE,), _NOT_FUSED),
    "streamingllm": _Valued((DISABLE,), "attention windows and sinks are fixed by the model"),
    "reduce_fusion": _Valued((DISABLE,), "all-reduces are not fused with norms"),
    "user_buffer": _Valued((DISABLE,), "all-reduces are not fused with norms"),
    "pp_reduce_scatter": _Valued((DISABLE,), "stages exchange whole rows"),
    "norm_quant_fusion": _Valued((DISABLE,), _NOT_FUSED),
    "gemm_swiglu_plugin": _Valued((DISABLE,), _NOT_FUSED),
    "low_latency_gemm_plugin": _Valued((DISABLE,), _NOT_FUSED),
    "low_latency_gemm_swiglu_plugin": _Valued((DISABLE,), _NOT_FUSED),
    "gemm_allreduce_plugin": _Valued((DISABLE,), _NOT_FUSED),
    "identity_plugin": _Valued((DISABLE,), "it only serves TensorRT-LLM's tests"),
    "manage_weights": _Valued((DISABLE,), "--weights external keeps weights outside of plans"),
    "fp8_rowwise_gemm_plugin": _Valued((DISABLE,), _BY_QUANTIZATION),
    "qserve_gemm_plugin": _Valued((DISABLE,), _BY_QUANTIZATION),
    "smooth_quant_plugins": _Valued((DISABLE,), _BY_QUANTIZATION),
    "smooth_quant_gemm_plugin": _Valued((DISABLE,), _BY_QUANTIZATION),
    "layernorm_quantization_plugin": _Valued((DISABLE,), _BY_QUANTIZATION),
    "rmsnorm_quantization_plugin": _Valued((DISABLE,), _BY_QUANTIZATION),
    "quantize_per_token_plugin": _Valued((DISABLE,), _BY_QUANTIZATION),
    "quantize_tensor_plugin": _Valued((DISABLE,), _BY_QUANTIZATION),
    "speculative_decoding_mode": _Valued(
        ("draft_tokens_external", "lookahead_decoding"), "engines have no draft heads; these modes need no build"
    ),
    "cluster_key": _Valued((), "only TensorRT-LLM's planner uses it"),
}
_NUMBERS: Final = {
    "opt_num_tokens": _Number(1, MAX_INT32, "steps of every size are supported"),
    "max_draft_len": _Number(0, MAX_INT32, "the executor's configuration limits drafts at run time"),
    "auto_parallel": _Number(1, 1, "use --tp_size and --pp_size of convert-checkpoint to split a model"),
    "gpus_per_node": _Number(1, MAX_INT32, "only TensorRT-LLM's planner uses it"),
}
_SET: Final = {
    "gather_context_logits": "each request may ask for logits",
    "gather_generation_logits": "each request may ask for logits",
    "gather_all_token_logits": "each request may ask for logits",
    "strongly_typed": "a network always has the checkpoint's types",
    "fast_build": "native engines do not search for kernels; with TensorRT, use --timing_cache",
    "monitor_memory": "it does not change results",
}
_REFUSED: Final = {
    "model_config": "engines are built with weights; give --checkpoint_dir or --model_dir",
    "build_config": "give its fields as flags",
    "model_cls_file": "the model's class follows from its config.json",
    "model_cls_name": "the model's class follows from its config.json",
    "input_timing_cache": "use --timing_cache FILE, which is read and written",
    "output_timing_cache": "use --timing_cache FILE, which is read and written",
    "strip_plan": "plans keep their weights; use --weights external for a separate file",
    "weight_sparsity": "kernels only read dense weights",
    "weight_streaming": "use --weight_memory SIZE, which streams weights at run time",
    "enable_debug_output": "engines have no debug tensors",
    "visualize_network": "use --dump_onnx FILE to write the network",
    "dry_run": "every build writes an engine; use adaptrt inspect to describe a checkpoint",
}


class _Refuse(argparse.Action):
    """Exits with the reason why the flag is rejected."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        parser.error(f"argument {option}: not supported; {self.help}")


def add_trtllm_flags(group: Any) -> None:
    """Declares the flags. Of these, only the prompt table's size appears in the parsed arguments."""
    for name, valued in _VALUED.items():
        group.add_argument(
            f"--{name}", type=_one_of(valued), nargs=None if valued.bare is None else "?", const=valued.bare,
            default=argparse.SUPPRESS, dest=argparse.SUPPRESS, metavar="VALUE", help=valued.reason,
        )  # fmt: skip
    for name, number in _NUMBERS.items():
        group.add_argument(
            f"--{name}", type=_number(number), default=argparse.SUPPRESS, dest=argparse.SUPPRESS, metavar="N",
            help=number.reason,
        )  # fmt: skip
    for name, reason in _SET.items():
        group.add_argument(
            f"--{name}", action="store_true", default=argparse.SUPPRESS, dest=argparse.SUPPRESS, help=reason
        )
    for name, reason in _REFUSED.items():
        group.add_argument(f"--{name}", action=_Refuse, nargs="?", dest=argparse.SUPPRESS, metavar="VALUE", help=reason)
    group.add_argument(
        f"--{PROMPT_TABLE}", "--max_multimodal_len", type=integer(0, MAX_INT32), default=0, dest=PROMPT_TABLE,
        metavar="N", help=f"requests may have prompt tables of any size with backend {NATIVE}; other backends accept 0",
    )  # fmt: skip


def _one_of(flag: _Valued) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if flag.accepted and text not in flag.accepted:
            accepted = " or ".join(flag.accepted)
            raise argparse.ArgumentTypeError(f"it is {text[:40]}; expected {accepted}: {flag.reason}")
        return text

    return parse


def _number(flag: _Number) -> Callable[[str], int]:
    parse_integer = integer(flag.minimum, flag.maximum)

    def parse(text: str) -> int:
        try:
            return parse_integer(text)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{error}: {flag.reason}") from None

    return parse
