"""Reads PEFT adapter directories: groups the tensors by module and checks them against the config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..._core import AdapterError
from ...common.safetensors_stream import SafetensorsReader
from ..checkpoint.joined_rows import in_order_of_rows
from ..gguf.adapter_directory import PAIRS, ROW_ORDER_KEY
from ..network.adapter_sites import HEAD_MODULES, AdaptedModules
from .adapter import MAGNITUDES_KEY, MAGNITUDES_NORMALIZED, Adapter, Array, ModuleTensors, TokenRows, WholeWeight
from .biases import add_trained_biases, is_trained_bias, path_of_bias, trained_biases
from .classifier_head import ClassifierHead, fields_without_head, head_of, is_classifier, tensors_without_head
from .expert_parameters import split_expert_parameters
from .folding import FOLDINGS, Folding, Source
from .module_parts import ModuleParts, parts_by_module, ranks_above
from .names import ModuleKey, Role
from .new_embeddings import read_new_embeddings
from .peft_config import PeftConfig, parse_peft_config
from .peft_fields import TRAINABLE_TOKENS
from .pickled import read_pickle
from .pooler import AdaptedPooler, adapted_pooler, tensors_of
from .problems import join_problems
from .recognise import CONFIG_FILE, PICKLE_FILE, SAFETENSORS_FILE, refuse_lfs_pointer
from .token_rows import is_token_rows, read_token_rows
from .vera import is_projection, vera_projections
from .whole_weights import read_whole_weights, whole_weights

_NAMES = {
    "LORA": "LoRA",
    "ADALORA": "AdaLoRA",
    "VERA": "VeRA",
    "LOHA": "LoHa",
    "LOKR": "LoKr",
    "IA3": "IA3",
    TRAINABLE_TOKENS: "trained tokens",
}


def read_peft_adapter(
    directory: Path, fields: Mapping[str, Any], modules: AdaptedModules | None, max_rank: int | None
) -> Adapter:
    """Reads adapter_model.safetensors, or else adapter_model.bin, according to the fields of adapter_config.json.

    fields: as recognise() returns them.
    modules, max_rank: as for read_adapter().

    Raises AdapterError that names every field and tensor that cannot be used, and why.
    """
    problems: list[str] = []
    config: PeftConfig | None = None
    has_head = is_classifier(fields)
    if has_head:
        fields = fields_without_head(fields)
    try:
        config = parse_peft_config(fields, str(directory / CONFIG_FILE))
    except AdapterError as error:
        problems.append(str(error))
    try:
        file, tensors, metadata = _read_file(directory)
        if has_head:
            tensors = tensors_without_head(tensors)
    except AdapterError as error:
        raise AdapterError("; ".join([*problems, str(error)])) from error
    new_embeddings = read_new_embeddings(directory)
    folding = FOLDINGS[fields["peft_type"]]
    kinds = _sort_tensors(tensors, modules)
    split = split_expert_parameters(kinds.factors, modules)
    found: dict[ModuleKey, ModuleParts] = {}
    tensor_problems: list[str] = []
    if kinds.factors or not kinds.has_others:
        found, tensor_problems = parts_by_module(split.tensors, folding.layout, modules)
    biases, bias_problems = trained_biases(kinds.biases, modules)
    weights, weight_problems = read_whole_weights(tensors, kinds.whole, config)
    tensor_problems += [*split.problems, *bias_problems, *weight_problems]
    token_rows: dict[ModuleKey, TokenRows] = {}
    if config is not None:
        token_rows, token_problems = read_token_rows(kinds.token_rows, config, modules)
        tensor_problems += token_problems
        tensor_problems += _unexpected(config, kinds.biases, weights, token_rows)
    parameters = dict(split.parameters)
    if config is not None and not tensor_problems:
        parameters |= _routers(found, config)
        tensor_problems = _disagreements(found, config, folding, parameters) or ranks_above(
            max_rank, {key: folding.served_rank(parts.sizes) for key, parts in found.items()}
        )
    state = metadata.get(MAGNITUDES_KEY)
    if state not in (None, MAGNITUDES_NORMALIZED):
        tensor_problems.append(f"metadata {MAGNITUDES_KEY} = '{state}'; accepted: {MAGNITUDES_NORMALIZED}")
    if ROW_ORDER_KEY in metadata and not tensor_problems:
        tensor_problems = _put_rows_in_order(found, metadata[ROW_ORDER_KEY], modules)
    if tensor_problems:
        problems.append(f"{file}: " + join_problems(tensor_problems))
    if problems or config is None:
        raise AdapterError("; ".join(problems))
    try:
        served = folding.fold(_source(tensors, found, config, modules, parameters), found)
        served = add_trained_biases(_inputs_in_order(served, modules), biases, modules)
    except AdapterError as error:
        raise AdapterError(f"{file}: {error}") from None
    return Adapter(
        directory,
        file,
        _kind(config),
        served,
        tensors,
        config.fan_in_fan_out,
        config.use_dora,
        state == MAGNITUDES_NORMALIZED,
        weights,
        config.ties_weights,
        token_rows,
        config.base_changing_init,
        config.invocation_tokens,
        context_length=config.context_length,
        new_embeddings=new_embeddings,
        changes_elsewhere=kinds.changes_elsewhere,
    )


@dataclass(frozen=True)
class _SortedTensors:
    """The tensors of an adapter's file by what they change."""

    factors: dict[str, Array]
    """Matrices, magnitudes and the like of linear layers in the program."""
    biases: dict[str, Array]
    """Trained biases of the base's layers."""
    token_rows: dict[str, Array]
    whole: dict[str, ModuleKey]
    """Names of whole weights."""
    changes_elsewhere: bool
    """True if some belong to another network, such as the vision tower."""
    has_others: bool
    """True if the file has tensors other than factors."""


def _sort_tensors(tensors: Mapping[str, Array], modules: AdaptedModules | None) -> _SortedTensors:
    elsewhere = tensors_of(set() if modules is None else modules.elsewhere, tensors)
    # A pooler is not part of the program: read_pooler() reads the adapter's changes to it.
    outside = tensors_of(set() if modules is None else modules.pooler_paths | modules.ignored, tensors) | elsewhere
    biases = {name: tensor for name, tensor in tensors.items() if is_trained_bias(name) and name not in outside}
    whole = whole_weights(tensors, modules)
    token_rows = {name: tensor for name, tensor in tensors.items() if is_token_rows(name)}
    others = {*biases, *token_rows, *outside, *whole}
    factors = {name: tensor for name, tensor in tensors.items() if not is_projection(name) and name not in others}
    return _SortedTensors(factors, biases, token_rows, whole, bool(elsewhere), bool(others))


def _put_rows_in_order(found: Mapping[ModuleKey, ModuleParts], order: str, modules: AdaptedModules | None) -> list[str]:
    """Puts the rows of q's and k's lora_B into transformers' order: a head has the first elements of all pairs that are
    rotated together, then the second ones. Returns problems."""
    if order != PAIRS:
        return [f"metadata {ROW_ORDER_KEY} = '{order}'; accepted: {PAIRS}"]
    for key, parts in found.items():
        if key.module.name not in HEAD_MODULES:
            continue
        module = None if modules is None else modules.find(key.path)
        if module is None:
            return [
                f"module '{key.path}' is in llama.cpp's order, which depends on the model; expected an engine or the "
                "base model (--base_model)"
            ]
        rows = parts.arrays[Role.B]
        if len(rows) % (2 * module.heads) != 0:
            return [f"module '{key.path}' has {len(rows)} outputs; expected pairs in {module.heads} heads"]
        pairs = rows.reshape(module.heads, -1, 2, rows.shape[1])
        parts.arrays[Role.B] = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
    return []


def _inputs_in_order(
    served: dict[ModuleKey, ModuleTensors], modules: AdaptedModules | None
) -> dict[ModuleKey, ModuleTensors]:
    """Puts the inputs of layers that read joined rows in the order of the rows, as the network has them."""
    for key, tensors in served.items():
        module = None if modules is None else modules.find(key.path)
        if module is not None and module.joined_rows > 1:
            served[key] = replace(tensors, a=in_order_of_rows(tensors.a, module.joined_rows))
    return served


def read_classifier_head(directory: Path, fields: Mapping[str, Any]) -> ClassifierHead:
    """Reads the head of a classifier's adapter, whose adapter_config.json has `fields`. Raises AdapterError."""
    file, tensors, _ = _read_file(directory)
    return head_of(directory, fields, file, tensors)


def read_pooler(directory: Path, fields: Mapping[str, Any], modules: AdaptedModules) -> AdaptedPooler | None:
    """Reads the adapter's changes to the model's pooler; None if there are none. The adapter must have been checked.

    Raises AdapterError.
    """
    if not modules.pooler_paths or fields.get("peft_type") not in FOLDINGS:
        return None
    has_head = is_classifier(fields)
    config = parse_peft_config(fields_without_head(fields) if has_head else fields, str(directory / CONFIG_FILE))
    file, tensors, _ = _read_file(directory)
    if has_head:
        tensors = tensors_without_head(tensors)
    return adapted_pooler(tensors_of(modules.pooler_paths, tensors), config, file)


def _kind(config: PeftConfig) -> str:
    name = "DoRA" if config.use_dora else _NAMES[config.peft_type]
    if config.invocation_tokens:
        name = f"aLoRA, invoked by tokens {list(config.invocation_tokens)}"
    return name + (", rsLoRA scaling" if config.use_rslora else "")


def _source(
    tensors: Mapping[str, Array],
    found: Mapping[ModuleKey, ModuleParts],
    config: PeftConfig,
    modules: AdaptedModules | None,
    parameters: Mapping[str, str],
) -> Source:
    shared = vera_projections(tensors, found, config, modules) if config.peft_type == "VERA" else {}
    return Source(config, shared, modules, parameters)


def _read_file(directory: Path) -> tuple[Path, dict[str, Array], Mapping[str, str]]:
    safetensors, pickle = directory / SAFETENSORS_FILE, directory / PICKLE_FILE
    if safetensors.is_file():
        refuse_lfs_pointer(safetensors)
        reader = SafetensorsReader(safetensors, AdapterError, in_memory=True)
        return safetensors, {name: reader.array(name) for name in reader.specs}, reader.metadata
    if pickle.is_file():
        refuse_lfs_pointer(pickle)
        return pickle, read_pickle(pickle), {}
    raise AdapterError(f"{directory}: has neither {SAFETENSORS_FILE} nor {PICKLE_FILE}")


def _unexpected(
    config: PeftConfig,
    biases: Iterable[str],
    weights: Sequence[WholeWeight],
    token_rows: Mapping[ModuleKey, TokenRows],
) -> list[str]:
    """Lists tensors of other kinds that adapter_config.json does not mention, and modules_to_save without tensors."""
    problems = []
    own = {weight.key.path: weight.name for weight in weights if weight.is_own}
    names = sorted([*biases, *own.values(), *(rows.name for rows in token_rows.values())])
    if config.invocation_tokens and names:
        problems.append(f"tensor '{names[0]}': acts on whole sequences, but aLoRA only on a part")
    problems += [
        f"tensor '{name}': a trained bias, but adapter_config.json's bias is none"
        for name in biases
        if not config.trains_biases and not config.saves(path_of_bias(name))
    ]
    return problems + [
        f"modules_to_save names '{name}', but the file has no accepted weight of it; accepted: "
        "lm_head and the embedding of tokens"
        for name in config.saved_modules
        if not any(path.endswith(name) for path in own)
    ]


def _routers(modules: Mapping[ModuleKey, ModuleParts], config: PeftConfig) -> dict[str, str]:
    """Paths of routers that are adapted as parameters: transformers 5 has router classes that are not linear layers."""
    weights = {key.path: f"{key.path}.weight" for key in modules if key.module.name == "moe_router"}
    return {path: weight for path, weight in weights.items() if config.targets_parameter(weight)}


def _disagreements(
    modules: Mapping[ModuleKey, ModuleParts], config: PeftConfig, folding: Folding, parameters: Mapping[str, str]
) -> list[str]:
    """Lists tensors that PEFT would not use as the file has them."""
    known = set(parameters.values())
    problems = [
        f"target_parameters names '{name}', but no tensor belongs to such a parameter of the model"
        for name in config.target_parameters
        if not any(path == name or path.endswith(f".{name}") for path in known)
    ]
    for key, parts in modules.items():
        parameter = parameters.get(key.path)
        if parameter is not None and not config.targets_parameter(parameter):
            problems.append(f"'{parameter}' has tensors, but adapter_config.json's target_parameters leave it out")
        if parameter is None and not config.targets(key.path):
            problems.append(
                f"module '{key.path}' has tensors, but adapter_config.json's target_modules, exclude_modules "
                "and layers_to_transform leave it out"
            )
        expected = folding.expected_rank(config, parameter or key.path)
        for dimension in ("rank", "rank_1"):
            if (rank := parts.sizes.get(dimension, expected)) != expected:
                role = next(role for role, names in folding.layout.shapes.items() if dimension in names)
                problems.append(
                    f"module '{key.path}': the rank is {rank} in {role}, but {expected} by adapter_config.json"
                )
        if config.use_dora and Role.MAGNITUDE not in parts.names:
            problems.append(f"module '{key.path}' has no DoRA magnitude, but adapter_config.json says use_dora")
        if not config.use_dora and Role.MAGNITUDE in parts.names:
            name = parts.names[Role.MAGNITUDE]
            problems.append(f"tensor '{name}': a magnitude, but adapter_config.json's use_dora is not true")
        if config.lora_bias != (Role.SHIFT in parts.names) and folding is FOLDINGS["LORA"]:
            has, says = ("no bias of lora_B", "true") if config.lora_bias else ("a bias of lora_B", "not true")
            problems.append(f"module '{key.path}' has {has}, but adapter_config.json's lora_bias is {says}")
    return problems


def acts_on(directory: Path, paths: Iterable[str]) -> bool:
    """True if the adapter has tensors of layers at or below `paths` in the model.

    Raises AdapterError for unreadable files.
    """
    safetensors = directory / SAFETENSORS_FILE
    if safetensors.is_file():
        refuse_lfs_pointer(safetensors)
        names: Iterable[str] = SafetensorsReader(safetensors, AdapterError).specs
    else:
        names = _read_file(directory)[1]
    return bool(tensors_of(paths, dict.fromkeys(names, np.empty(0))))
