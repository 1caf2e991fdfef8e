"""Describes a checkpoint, an engine, a GGUF model or an adapter, with the same checks as when it is loaded."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from .._core import (
    ConfigError,
    EngineError,
    MatrixLayout,
    cpu_engine_info,
    cpu_kernels,
    dtype_name,
    impossible_cpu_kernels,
)
from ..builder.compile.tensorrt.compiled_plans import plan_file
from ..common.progress import format_bytes
from ..common.safetensors_stream import SafetensorsReader, TensorSpec
from ..common.shown_value import cut
from ..formats.adapter.recognise import CONFIG_FILE as ADAPTER_CONFIG
from ..formats.checkpoint.config import LEARNED_POSITIONS, RELATIVE_POSITIONS, CheckpointConfig
from ..formats.checkpoint.rank_file import rank_file
from ..formats.engine.bind import bind_program
from ..formats.engine.build_config import NATIVE
from ..formats.engine.engine_config import EngineConfig, engine_file
from ..formats.engine.engine_file import EngineFile
from ..formats.engine.engine_quality import EngineQuality
from ..formats.engine.tensorrt.plan_config import TensorRow
from ..formats.gguf.adapter_directory import is_adapter
from ..formats.gguf.gguf_file import GgufModel
from ..formats.gguf.model_directory import is_gguf_file
from ..formats.hugging_face.hf_config import HfConfig
from ..formats.models.registry import load_config
from ..formats.sources import find_adapter, find_model
from .inspect_adapter import (
    LORA_CONFIG,
    AdapterDescription,
    describe_adapter,
    describe_converted_adapter,
    print_adapter,
    print_table,
)
from .kernel_names import describe_kernels

_CONTEXTS: Final = (1 << 13, 1 << 15, 1 << 17)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument(
        "path",
        metavar="PATH",
        help="checkpoint, engine, GGUF file, converted adapter, or an adapter's directory or name in the Hub",
    )
    parser.add_argument("--tensors", action="store_true", help="list the tensors of a checkpoint or an engine")
    parser.add_argument("--engine", type=Path, help="adapters only: check that this engine can serve the adapter")
    parser.add_argument(
        "--context", type=int, nargs="+", metavar="N",
        help="native and CUDA engines only: context lengths in tokens for which to show the KV cache's size (default: "
        "powers of two up to max_seq_len)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="adapters only: print every module as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the description of one directory."""
    if is_gguf_file(Path(args.path)) and not is_adapter(Path(args.path)):
        _refuse_flags(args, {"--engine": args.engine, "--json": args.json, "--context": args.context})
        describe_gguf(Path(args.path), args.tensors)
        return 0
    args.path = find_adapter(args.path).directory
    adapter = _adapter_at(args.path, args.engine)
    if adapter is not None:
        print(adapter.to_json()) if args.json else print_adapter(adapter)
        return 0
    given = [flag for flag, is_given in (("--engine", args.engine is not None), ("--json", args.json)) if is_given]
    describe = _describer_of(args.path)
    if given:
        raise ConfigError(f"{' and '.join(given)}: only for adapters, which {args.path} is not")
    if args.context is None:
        describe(args.path, args.tensors)
    elif describe is _describe_native_engine:
        _describe_native_engine(args.path, args.tensors, args.context)
    else:
        raise ConfigError(f"--context: only for native engines, which {args.path} is not")
    return 0


def _refuse_flags(args: argparse.Namespace, flags: Mapping[str, object]) -> None:
    if given := [flag for flag, value in flags.items() if value]:
        raise ConfigError(f"{' and '.join(given)}: not for GGUF files, such as {args.path}")


def describe_gguf(path: Path, tensors: bool) -> None:
    """Prints what a model in a GGUF file is read as."""
    model, config = GgufModel(path.absolute()), HfConfig.read(find_model(path).directory).config
    sizes = Counter[str]()
    for tensor in model.tensors.values():
        sizes[tensor.type.name] += tensor.num_bytes
    named = {"name": cut(str(model.metadata["general.name"]))} if "general.name" in model.metadata else {}
    rows = {
        **named,
        **_model_rows(config),
        "weights": ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.most_common())
        + f"; an engine of {dtype_name(config.dtype)} keeps or dequantises them",
        "files": f"{len(model.paths)}, {len(model.tensors)} tensors",
    }
    print_table(f"{path}: GGUF model", rows)
    for tensor in model.tensors.values() if tensors else ():
        print(f"  {tensor.name}  {tensor.type.name} {list(tensor.shape)}")


def _adapter_at(path: Path, engine: Path | None) -> AdapterDescription | None:
    """Describes the adapter at a path; None if it is not an adapter."""
    if (path / ADAPTER_CONFIG).is_file():
        return describe_adapter(path, engine)
    if (path / LORA_CONFIG).is_file():
        if engine is not None:
            raise ConfigError(f"{path}: is a converted adapter; --engine needs an adapter of PEFT or MLX-LM")
        return describe_converted_adapter(path)
    return None


def _describer_of(path: Path) -> Callable[[Path, bool], None]:
    kinds = {
        engine_file(0): _describe_native_engine,
        plan_file("*"): _describe_tensorrt_engine,
        rank_file(0): _describe_checkpoint,
    }
    for file, describe in kinds.items():
        if any(found.is_file() for found in path.glob(file)):
            return describe
    if not path.is_dir():
        raise ConfigError(f"{path}: is not a checkpoint, engine or adapter, because it is not a directory")
    *files, last = ADAPTER_CONFIG, LORA_CONFIG, *kinds
    raise ConfigError(
        f"{path}: is not a checkpoint, engine or adapter; expected a directory with {', '.join(files)} or {last}"
    )


def _describe_checkpoint(path: Path, tensors: bool) -> None:
    config = load_config(path)
    readers = [SafetensorsReader(path / rank_file(rank)) for rank in range(config.mapping.world_size)]
    num_tensors = sum(len(reader.specs) for reader in readers)
    num_bytes = sum(reader.num_bytes for reader in readers)
    rows = {
        **_model_rows(config),
        "mapping": config.mapping.describe(),
        "weights": f"{num_tensors} tensors, {format_bytes(num_bytes)}",
    }
    print_table(f"{path}: checkpoint", rows)
    for reader in readers if tensors else ():
        _print_tensors(reader.path.name, reader.specs.values())


def _describe_native_engine(path: Path, tensors: bool, contexts: Sequence[int] | None = None) -> None:
    config = EngineConfig.load(path)
    keeps = config.build_config.weight_memory is None
    files = [
        EngineFile(path / engine_file(rank), checksum, keeps_in_memory=keeps)
        for rank, checksum in enumerate(config.engine_checksums)
    ]
    max_seq_len = config.build_config.max_seq_len or 0
    for context in contexts or ():
        if not 1 <= context <= max_seq_len:
            raise ConfigError(f"--context is {context}; accepted: 1 to {max_seq_len}, the engine's max_seq_len")
    lengths = contexts or _usual_contexts(max_seq_len)
    rows = {
        "weights": by_ranks(f"{len(file.tensors)} tensors, {format_bytes(file.num_bytes)}" for file in files),
        "activations": by_ranks(format_bytes(file.program.arena_bytes) for file in files),
        "contexts": by_ranks(_describe_contexts(file, lengths) for file in files),
    }
    if config.build_config.backend == NATIVE:
        rows["kernels"] = _describe_kernels()
    if config.build_config.weight_memory is not None:
        rows["weights"] += f", of which {format_bytes(config.build_config.weight_memory)} in memory"
    if config.build_config.sparse_predictors is not None:
        rows["predictors"] = f"{config.build_config.sparse_predictors}, which close gates before they are computed"
    backend = config.build_config.backend
    kind = "engine" if backend == NATIVE else f"engine of backend {backend}"
    print_table(f"{path}: {kind}", _engine_rows(config, rows))
    for file in files if tensors else ():
        specs = (TensorSpec(name, array.dtype, array.shape) for name, array in file.tensors.items())
        _print_tensors(file.path.name, specs)


def by_ranks(texts: Iterable[str]) -> str:
    """The texts of the ranks, in order. Ranks with the same text share one line.

    Pipeline stages differ: the first has the embeddings, the last has the head, and some have one more layer.
    """
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    if len(ranks) == 1:
        ((text, all_ranks),) = ranks.items()
        return f"{text} on each of {len(all_ranks)} ranks" if len(all_ranks) > 1 else text
    return "; ".join(
        f"{text} on rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
        for text, numbers in ranks.items()
    )


def _usual_contexts(max_seq_len: int) -> list[int]:
    return [*(length for length in _CONTEXTS if length < max_seq_len), max_seq_len]


def _describe_contexts(file: EngineFile, lengths: Sequence[int]) -> str:
    """KV cache size of a request for each length, and the size of its states. Native engines also show the other type
    that the KV cache can have."""
    program = bind_program(file.program, file.tensors, str(file.path))
    block = {is_int8: program.kv_block_bytes(is_int8) for is_int8 in (False, True)}
    state_bytes = cpu_engine_info(program).state_bytes
    states = f"states of {format_bytes(state_bytes)} for each request" if state_bytes else ""
    if not any(block.values()):
        return f"{states}, which do not grow with the sequence" if states else "do not grow with the sequence"
    used, other = program.int8_kv_cache, not program.int8_kv_cache
    tokens = program.tokens_per_block
    names = {False: dtype_name(program.dtype), True: "int8"}

    def size(length: int, is_int8: bool) -> str:
        return format_bytes(-(-length // tokens) * block[is_int8])

    can_choose = program.matrix_layout is MatrixLayout.PANELS
    each = ", ".join(
        f"{length} tokens {size(length, used)}" + (f" (as {names[other]} {size(length, other)})" if can_choose else "")
        for length in lengths
    )
    return f"KV cache of a request with {each}" + (f", and {states}" if states else "")


def _describe_kernels() -> str:
    """Kernels that run the engine on this machine, and the other available ones."""
    chosen, *others = cpu_kernels()
    refused = [f"{name}: {reason}" for name, reason in impossible_cpu_kernels()]
    on_request = [f"on request: {', '.join(others)}"] if others else []
    return "; ".join([f"{describe_kernels(chosen)} on this machine", *on_request, *refused])


def _describe_tensorrt_engine(path: Path, tensors: bool) -> None:
    config = EngineConfig.load(path)
    plans = config.tensorrt
    if plans is None:
        raise EngineError(f"{path}: has plans, which its config.json does not know")
    plans.check_files(path)
    rows = {"compiled by": f"{plans.package} {plans.package_version}, version {plans.plugin_version} of the plugins"}
    for plan in plans.files:
        rows[f"plan {plan.compute_capability}"] = f"{plan.stored.file}, {format_bytes(plan.stored.num_bytes)}"
    rows["weights"] = (
        "in each plan" if plans.weights is None else f"{plans.weights.file}, {format_bytes(plans.weights.num_bytes)}"
    )
    rows["profiles"] = ", ".join(plans.profiles)
    print_table(f"{path}: TensorRT engine", _engine_rows(config, rows))
    if tensors:
        print("inputs and outputs, with the largest shape in each profile:")
        for tensor in plans.tensors:
            print(f"  {_describe_row(tensor, plans.profiles)}")


def _describe_row(tensor: TensorRow, profiles: Sequence[str]) -> str:
    text = f"{tensor.name}  {tensor.mode} {tensor.dtype} {list(tensor.shape)}"
    if tensor.alias is not None:
        text += f", written over {tensor.alias}"
    if tensor.profiles:
        for name, (_, _, largest) in zip(profiles, tensor.profiles, strict=True):
            text += f", {name} {list(largest)}"
    return text


def _engine_rows(config: EngineConfig, compiled: Mapping[str, str]) -> dict[str, str]:
    """Rows that describe an engine; `compiled` are rows about its compiled program."""
    build, lora = config.build_config, config.build_config.lora_config
    rows = {
        "built by": f"adaptrt {config.version}; every checksum holds",
        **_model_rows(config.pretrained_config),
        "limits": f"max_batch_size {build.max_batch_size}, max_num_tokens {build.max_num_tokens}, "
        f"max_input_len {build.max_input_len}, max_seq_len {build.max_seq_len}"
        + ("" if build.max_encoder_input_len is None else f", max_encoder_input_len {build.max_encoder_input_len}"),
        "KV cache": config.pretrained_config.describe_kv_cache(build.tokens_per_block),
        **compiled,
        "LoRA": "none",
    }
    if build.lora_enabled:
        rows["LoRA"] = (
            f"max_lora_rank {lora.max_lora_rank}, {', '.join(lora.lora_target_modules)}"
            f"{', DoRA' if build.dora_enabled else ''}"
            f"{f', max_extra_tokens {lora.max_extra_tokens}' if lora.max_extra_tokens else ''}"
            + (f", long_lora_scaling_factors {list(factors)}" if (factors := lora.long_lora_scaling_factors) else "")
        )
        rows["adapters"] = ", ".join(lora.adapter_names) or "none in the engine directory"
    if config.source is not None:
        rows["built from"] = config.source
    if config.quality is not None:
        rows["quality"] = _describe_quality(config.quality)
    return rows


def _describe_quality(quality: EngineQuality) -> str:
    text = f"perplexity {quality.perplexity:.4f}"
    if quality.reference is not None:
        text += f", {quality.reference.perplexity:.4f} of {quality.reference.engine}"
    return f"{text}, over {quality.tokens} tokens of {quality.text}"


def _positions(config: CheckpointConfig) -> str:
    if config.position_embedding_type == RELATIVE_POSITIONS:
        return "relative to each other, without limit"
    if config.position_embedding_type == LEARNED_POSITIONS:
        return f"{config.max_position_embeddings}, learned"
    scaling = config.rotary_scaling
    scaled = f"{scaling.rope_type} scaling by {scaling.factor:g}" if scaling else "not scaled"
    return f"{config.max_position_embeddings}, rotary base {config.rotary_base:g}, {scaled}"


def _model_rows(config: CheckpointConfig) -> dict[str, str]:
    attention = [config.describe_heads()]
    if config.qk_layernorm:
        attention.append("q and k normalised")
    if config.sliding_window is not None:
        attention.append(f"window of {config.sliding_window} in {len(config.sliding_window_layers)} layers")
    quantised = [] if config.quantization is None else [config.quantization.describe()]
    if config.int8_kv_cache:
        quantised.append("int8 KV cache")
    biases = {"qkv": config.attn_bias, "dense": config.attn_dense_bias, "mlp": config.mlp_bias}
    return {
        "architecture": config.architecture,
        "dtype": dtype_name(config.dtype),
        "quantization": ", ".join(quantised) or "none",
        "layers": config.describe_layers(),
        "attention": ", ".join(attention),
        "biases": ", ".join(name for name, present in biases.items() if present) or "none",
        "positions": _positions(config),
        "vocabulary": f"{config.vocab_size}, {_head_of(config)}",
        **({} if config.embedding_pooling is None else {"embeddings": config.embedding_pooling.describe()}),
        **({} if config.classifier is None else {"classifier": config.classifier.describe()}),
    }


def _head_of(config: CheckpointConfig) -> str:
    if not config.has_lm_head:
        return "no lm_head"
    return "tied to lm_head" if config.share_embedding_table else "not tied to lm_head"


def _print_tensors(file: str, specs: Iterable[TensorSpec]) -> None:
    print(f"{file}:")
    for spec in specs:
        print(f"  {spec.name}  {spec.dtype} {list(spec.shape)}")


if __name__ == "__main__":
    from ..builder.cli import run_command

    sys.exit(
        run_command(
            sys.modules[__name__], sys.argv[1:], prog="python -m adaptrt.tools.inspect", description=__doc__ or ""
        )
    )
