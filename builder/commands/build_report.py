"""Summary that `adaptrt build` prints."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from rich import box
from rich.table import Table

from ...common.progress import format_bytes
from ...formats.engine.build_config import CUDA, DEFAULT_TARGET_MODULES, NATIVE, TENSORRT
from ..build import BuildReport
from ..compile.native import CompiledNetwork
from ..compile.tensorrt.compiled_plans import CompiledPlans

_TARGETS: Final = {NATIVE: "CPUs", CUDA: "NVIDIA GPUs from compute capability 8.0 on", TENSORRT: "NVIDIA GPUs"}


def summary(report: BuildReport) -> Table:
    """Table of the engine's properties, printed at the end."""
    config, checkpoint = report.config, report.checkpoint
    table = Table(title=str(report.directory), box=box.SIMPLE_HEAD, show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    rows = [
        ("model", f"{checkpoint.architecture}, {checkpoint.describe_depth()}, {checkpoint.describe_weights()}"),
        ("engine", f"{format_bytes(report.engine_bytes)}, built in {report.seconds:.1f} s"),
        ("backend", f"{config.backend}, for {_TARGETS[config.backend]}"),
        *(
            _plan_rows(report, report.compiled)
            if isinstance(report.compiled, CompiledPlans)
            else _native_rows(report, report.compiled)
        ),
        ("KV cache", checkpoint.describe_kv_cache(config.tokens_per_block)),
        (
            "limits",
            f"{config.max_batch_size} sequences, prompts of {config.max_input_len}, prompt and answer of "
            f"{config.max_seq_len} tokens"
            + ("" if config.max_encoder_input_len is None else f"; encoder inputs of {config.max_encoder_input_len}"),
        ),
    ]
    if config.lora_enabled:
        lora = config.lora_config
        kinds = "LoRA and DoRA" if config.dora_enabled else "LoRA"
        everywhere = set(lora.lora_target_modules) >= set(DEFAULT_TARGET_MODULES)
        modules = "every linear layer" if everywhere else ", ".join(lora.lora_target_modules)
        rows.append(("adapters", f"{kinds} to rank {lora.max_lora_rank} on {modules}"))
        if lora.max_extra_tokens:
            rows.append(("", f"with up to {lora.max_extra_tokens} additional tokens"))
        if lora.long_lora_scaling_factors:
            factors = ", ".join(map(str, lora.long_lora_scaling_factors))
            rows.append(("", f"with positions divided by {factors}"))
        if lora.fully_sharded_loras:
            rows.append(("", "both matrices split over the ranks"))
        if lora.adapter_names:
            rows.append(("", f"carries {', '.join(lora.adapter_names)}"))
    else:
        rows.append(("adapters", "none (--lora_plugin auto enables them)"))
    if report.tower is not None:
        tower = report.tower.checkpoint.config
        rows.append(("vision layers", f"{tower.describe_layers()}, {tower.describe_weights()}"))
    left_out = report.left_out if report.tower is None else replace(report.left_out, num_vision=0)
    rows.extend(("ignored", left) for left in left_out.describe())
    if left_out.num_vision > 0 and report.why_only_text is not None:
        rows.append(("only text", report.why_only_text))
    if report.kept is not None:
        rows.append(("kept", report.kept.describe()))
    if report.dequantization is not None:
        rows.append(("dequantised", report.dequantization.describe()))
    for row in rows:
        table.add_row(*row)
    return table


def _native_rows(report: BuildReport, compiled: CompiledNetwork) -> list[tuple[str, str]]:
    arena = compiled.arena
    saved = 100 * (1 - arena.num_bytes / arena.unshared_bytes)
    rows = [("network", f"{compiled.num_ops} ops")]
    if report.config.compress_weights:
        matrices = compiled.linear_matrices
        compressed = sum(matrix.outliers is not None for matrix in matrices)
        rows.append(("compression", f"{compressed} of {len(matrices)} matrices, losslessly in 12 bits per weight"))
    if compiled.num_sparse_layers:
        rows.append(("sparse layers", f"{compiled.num_sparse_layers} layers read only the active neurons' weights"))
    if predicted := compiled.predicted_layers:
        least = predicted[0].least_score
        rows.append(("predictors", f"skip neurons of {len(predicted)} layers whose scores are below {least:g}"))
    return [
        *rows,
        (
            "activations",
            f"{format_bytes(arena.num_bytes)} for {report.config.max_num_tokens} tokens, {saved:.0f}% less than "
            "unshared",
        ),
    ]


def _plan_rows(report: BuildReport, compiled: CompiledPlans) -> list[tuple[str, str]]:
    plans = compiled.plans
    rows = [
        ("network", f"{compiled.num_nodes} ONNX nodes, compiled by {plans.package} {plans.package_version}"),
        *(
            (
                f"plan {plan.compute_capability}",
                f"{format_bytes(plan.stored.num_bytes)}, {format_bytes(built.peak_bytes)} of memory to build",
            )
            for plan, built in zip(plans.files, compiled.built, strict=True)
        ),
    ]
    if plans.weights is not None:
        rows.append(("weights", f"{format_bytes(plans.weights.num_bytes)} in {plans.weights.file}, for every plan"))
    return rows
