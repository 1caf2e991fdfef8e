"""The output of `adaptrt inspect` for adapters: how each module is served, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np

from .._core import AdapterError, DType, lora_modules
from ..builder.engine.adapter_fit import adapter_for, require_virtual_tokens
from ..common.json_fields import load_json_object
from ..common.progress import format_bytes
from ..formats.adapter import (
    MAGNITUDE,
    SHIFT,
    Adapter,
    add_token_rows,
    add_whole_weights,
    is_prompt_tuned,
    read_adapter,
    read_prompt_embeddings,
)
from ..formats.adapter.classifier_head import is_classifier
from ..formats.adapter.initial import over_the_unchanged_base
from ..formats.adapter.new_tokens import take_new_tokens
from ..formats.adapter.reader import read_initial_adapter
from ..formats.adapter.recognise import CONFIG_FILE, SAFETENSORS_FILE
from ..formats.adapter.terms import rotary_factor_of
from ..formats.engine.engine_config import EngineConfig
from ..formats.network.adapter_sites import EXPERT_MODULES, NORM, AdaptedModules

LORA_CONFIG: Final = "model.lora_config.npy"
LORA_WEIGHTS: Final = "model.lora_weights.npy"


@dataclass(frozen=True)
class AdapterModule:
    """One module of an adapter in one layer."""

    module: str
    """Name in the table of modules, such as attn_q."""
    layer: int
    rank: int
    dora: bool
    """True if it has magnitudes."""
    shift: bool
    """True if a vector is added to its outputs: trained biases, or biases scaled by IA3."""
    path: str | None = None
    """Name in the Hugging Face model; None for converted adapters, which lack it."""
    scale: float | None = None
    """Factor of B A; None if B already includes it."""
    in_size: int | None = None
    out_size: int | None = None
    experts: int | None = None
    """Number of the layer's experts that it changes; None: the module is not an expert's. Sizes are per expert; the
    rank is the maximum over the experts."""


@dataclass(frozen=True)
class AdapterDescription:
    """The parts of an adapter that are served, and how."""

    path: str
    form: str
    """"adapter" or "converted adapter"."""
    kind: str | None
    """Text such as "LoRA, rsLoRA scaling"; None for converted adapters, which lack it."""
    weights: str
    modules: list[AdapterModule]
    magnitudes: str | None = None
    """DoRA: says if the magnitudes are normalised by the base model."""
    initialisation: str | None = None
    """An initialisation that changed the base model."""
    trained_tokens: int | None = None
    """Rows of the embedding and of lm_head that replace the base model's. With an engine they are also listed as
    modules."""
    whole_weights: list[str] | None = None
    """Paths of lm_head and the embedding if they were trained as whole matrices. With an engine they are also listed as
    modules. Their rank is the number of tokens that differ from the base model, at most hidden_size."""
    virtual_tokens: int | None = None
    """Number of virtual tokens before each prompt. An adapter that has them changes nothing else."""
    new_tokens: int | None = None
    """Number of tokens that it adds to the base model's vocabulary; needs an engine."""
    absent_tokens: int | None = None
    """Number of the base model's last tokens that it lacks; needs an engine."""
    rotary_factor: int | None = None
    """Factor by which it divides rotary positions; needs an engine."""
    engine: str | None = None
    """The engine that serves it."""
    engine_limits: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """The description as one JSON object."""
        return json.dumps(asdict(self), indent=2)


def describe_adapter(path: Path, engine: Path | None) -> AdapterDescription:
    """Describes an adapter of PEFT or MLX-LM; with an engine, as that engine serves it.

    Raises AdapterError that lists the problems of the adapter, or of serving it with this engine, and the errors of
    EngineConfig.load.
    """
    if is_prompt_tuned(path):
        return _describe_virtual_tokens(path, engine)
    limits: dict[str, Any] = {}
    modules, dtype = None, DType.FLOAT32
    if engine is not None:
        config = EngineConfig.load(engine)
        build = config.build_config
        modules = AdaptedModules(config.network)
        adapter_for(path, build, config.network, build.lora_config.lora_target_modules)
        dtype = config.pretrained_config.dtype
        limits = {"max_lora_rank": build.lora_config.max_lora_rank, "dora": build.dora_enabled}
        if build.lora_config.max_extra_tokens:
            limits["max_extra_tokens"] = build.lora_config.max_extra_tokens
        if build.lora_config.long_lora_scaling_factors:
            limits["long_lora_scaling_factors"] = list(build.lora_config.long_lora_scaling_factors)
    adapter = read_adapter(path, modules, classifiers=True)
    initial = read_initial_adapter(path, None, modules)
    if initial is not None:
        over_the_unchanged_base(adapter, initial)
    new_tokens = None
    rotary_factor = 1
    if modules is not None:
        new_tokens = take_new_tokens(adapter, modules, None)
        rotary_factor = rotary_factor_of(adapter, modules, None)
    if modules is not None:
        add_whole_weights(adapter, None, modules, dtype, None, left_open=True)
        add_token_rows(adapter, None, modules, None, left_open=True)
    num_bytes = format_bytes(adapter.file.stat().st_size)
    return AdapterDescription(
        str(path),
        "adapter",
        adapter.kind + (", and a classifier's head" if _is_classifier(path) else ""),
        f"{len(adapter.tensors)} tensors, {num_bytes}",
        list(_modules(adapter)),
        magnitudes=_magnitudes(adapter),
        initialisation=_initialisation(adapter, initial),
        trained_tokens=sum(len(rows.tokens) for rows in adapter.token_rows.values()) or None,
        whole_weights=sorted({weight.key.path for weight in adapter.whole_weights if weight.is_own}) or None,
        new_tokens=None if new_tokens is None else new_tokens.rank,
        absent_tokens=adapter.absent_tokens or None,
        rotary_factor=rotary_factor if rotary_factor > 1 else None,
        engine=None if engine is None else str(engine),
        engine_limits=limits,
    )


def _describe_virtual_tokens(path: Path, engine: Path | None) -> AdapterDescription:
    if engine is not None:
        config = EngineConfig.load(engine)
        require_virtual_tokens(path, config.build_config, config.network)
    kind, table = read_prompt_embeddings(path, None)
    num_bytes = format_bytes((path / SAFETENSORS_FILE).stat().st_size)
    return AdapterDescription(
        str(path),
        "adapter",
        kind.value,
        f"1 tensor, {num_bytes}",
        [],
        virtual_tokens=len(table),
        engine=None if engine is None else str(engine),
    )


def _is_classifier(path: Path) -> bool:
    return is_classifier(load_json_object(path / CONFIG_FILE, AdapterError))


def _modules(adapter: Adapter) -> Iterable[AdapterModule]:
    for _, found in groupby(adapter.modules.items(), key=lambda item: item[0].row):
        experts = list(found)
        key, tensors = experts[0]
        of_experts = key.module.name in EXPERT_MODULES
        yield AdapterModule(
            key.module.name,
            key.layer,
            max(of_expert.rank for _, of_expert in experts),
            tensors.magnitude is not None,
            any(of_expert.has_shift for _, of_expert in experts),
            key.path.rpartition(f".{key.expert}.")[0] if of_experts else key.path,
            tensors.scale,
            int(tensors.a.shape[1]),
            int(tensors.b.shape[0]),
            len(experts) if of_experts else None,
        )


def _magnitudes(adapter: Adapter) -> str | None:
    if not adapter.is_dora:
        return None
    return "normalised" if adapter.magnitudes_normalized else "not normalised by a base"


def _initialisation(adapter: Adapter, initial: Adapter | None) -> str | None:
    if not adapter.base_changing_init:
        return None
    if initial is not None:
        return f"{adapter.base_changing_init}, which changed the base: served with the initial adapter in its directory"
    return f"{adapter.base_changing_init}, which changed the base: can only be served with the initial adapter"


def describe_converted_adapter(path: Path) -> AdapterDescription:
    """Describes an adapter in TensorRT-LLM's form. Raises AdapterError for other files."""
    config, weights = (_load_array(path / name) for name in (LORA_CONFIG, LORA_WEIGHTS))
    config = config[0] if config.ndim == 3 and config.shape[0] == 1 else config
    if config.ndim != 2 or config.shape[1] not in (3, 4) or config.dtype != np.int32:
        raise AdapterError(
            f"{path / LORA_CONFIG}: is {config.dtype} {list(config.shape)}; expected int32 [rows, 3 or 4] or [1, ...]"
        )
    names = {module.id: module.name for module in lora_modules()}
    unknown = sorted(set(config[:, 0].tolist()) - set(names))
    if unknown:
        raise AdapterError(f"{path / LORA_CONFIG}: module ids {unknown} are unknown; accepted: 0 to {max(names)}")
    dtype = "bfloat16" if weights.dtype == np.dtype("V2") else weights.dtype.name
    return AdapterDescription(
        str(path),
        "converted adapter",
        None,
        f"{dtype} {list(weights.shape)}, {format_bytes(weights.nbytes)}",
        [
            AdapterModule(names[module], layer, rank, bool(vectors & MAGNITUDE), bool(vectors & SHIFT))
            for module, layer, rank, vectors in ((*row, 0)[:4] for row in config.tolist())
        ],
    )


def _load_array(path: Path) -> np.ndarray[Any, np.dtype[Any]]:
    try:
        array: np.ndarray[Any, np.dtype[Any]] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError, SyntaxError) as reason:
        raise AdapterError(f"{path}: cannot be read: {reason}") from None
    return array


def print_adapter(adapter: AdapterDescription) -> None:
    """Prints a table of the adapter, then one line for each combination of module, rank and scale, with its layers."""
    rows = {
        "kind": adapter.kind,
        "weights": adapter.weights,
        "rows": None if adapter.virtual_tokens else str(len(adapter.modules)),
        "virtual tokens": _before_prompts(adapter.virtual_tokens),
        "magnitudes": adapter.magnitudes,
        "initialisation": adapter.initialisation,
        "trained tokens": None if adapter.trained_tokens is None else str(adapter.trained_tokens),
        "new tokens": None if adapter.new_tokens is None else str(adapter.new_tokens),
        "absent tokens": None if adapter.absent_tokens is None else str(adapter.absent_tokens),
        "positions": None if adapter.rotary_factor is None else f"divided by {adapter.rotary_factor}",
        "trained whole": None if adapter.whole_weights is None else ", ".join(adapter.whole_weights),
        "served by": adapter.engine,
    }
    print_table(f"{adapter.path}: {adapter.form}", {name: value for name, value in rows.items() if value is not None})
    layers_of: dict[tuple[str, str], list[int]] = {}
    for row in adapter.modules:
        how = f"rank {row.rank}" + (f", scale {row.scale:g}" if row.scale is not None else "")
        vectors = [name for name, has in (("magnitudes", row.dora), ("biases", row.shift)) if has]
        how += f" with {' and '.join(vectors)}" if vectors else ""
        how += f", {row.experts} experts" if row.experts is not None else ""
        layers_of.setdefault((row.module, how), []).append(row.layer)
    width = max((len(name) for name, _ in layers_of), default=0)
    for (name, how), layers in layers_of.items():
        where = "biases of norms" if name == NORM else f"{how} in layers"
        print(f"  {name:<{width}}  {where} {_ranges(sorted(layers))}")


def _before_prompts(virtual_tokens: int | None) -> str | None:
    return None if virtual_tokens is None else f"{virtual_tokens}, inserted before every prompt"


def _ranges(numbers: list[int]) -> str:
    """Formats 0, 1, 2, 3, 5 as "0-3, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def print_table(title: str, rows: Mapping[str, str]) -> None:
    """Prints a title, and named values below it."""
    print(title)
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"  {name:<{width}}  {value}")
