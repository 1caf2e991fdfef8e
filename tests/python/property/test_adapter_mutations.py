"""Mutated adapter files: the converted adapter equals PEFT's, or the conversion refuses the files."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from peft import PeftModel
from safetensors.numpy import load_file, save_file

from adaptrt import _core
from adaptrt.formats.adapter import ConvertedAdapter, convert_adapter
from support.adapters import CONFIG, TENSORS, base_weights, merged_by_us
from support.examples import examples
from support.models import ModelSpec, save_adapter, save_model

FLOAT32_TOLERANCE = 5e-6
# Both sides factorise the weights in float32 with different LAPACK libraries; errors grow with the singular values.
FACTORISATION_TOLERANCE = 5e-5
GIVE_BACK = ("pissa", "olora")
"""Initialisations that take the adapter's first change out of the base's weights."""
SPEC = ModelSpec(hidden_size=8, head_dim=4, num_attention_heads=2, num_key_value_heads=1, intermediate_size=9)

pattern_keys = st.sampled_from(
    ["q_proj", "proj", ".*proj", "layers.1.mlp.up_proj", r"^model\.layers\.0\..*", "self_attn", r".*layers\.[01].*q_.*"]
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "r": st.integers(0, 4),
    "lora_alpha": st.integers(-3, 9) | st.floats(-4, 4),
    "rank_pattern": st.dictionaries(pattern_keys, st.integers(1, 3), max_size=2),
    "alpha_pattern": st.dictionaries(pattern_keys, st.integers(-2, 5) | st.floats(0, 2), max_size=3),
    "use_rslora": st.booleans(),
    "use_dora": st.booleans(),
    "fan_in_fan_out": st.booleans(),
    "target_modules": st.sampled_from([
        ["q_proj", "up_proj", "down_proj"], ["q_proj"], ["proj"], ".*proj", r"model\.layers\.1\..*_proj",
        ["model.layers.0.self_attn.q_proj", "up_proj", "down_proj"],
        ["q_proj", "up_proj", "down_proj", "v_proj"], ["self_attn", "mlp"],
    ]),
    "exclude_modules": st.sampled_from([None, ["q_proj"], "up_proj", r".*\.1\..*", ["lm_head"]]),
    "layers_to_transform": st.sampled_from([None, 0, 1, [0], [0, 1], [5], []]),
    "layers_pattern": st.sampled_from([None, "layers", ["h", "layers"], "h"]),
    "bias": st.sampled_from(["none", "all"]),
    "init_lora_weights": st.sampled_from([True, False, "gaussian", "pissa", "olora"]),
    "modules_to_save": st.sampled_from([None, [], ["lm_head"]]),
}  # fmt: skip


def rename(name: str, old: str, new: str) -> str:
    return name.replace(old, new, 1)


renames = st.sampled_from([
    ("layers.1", "layers.0"), ("q_proj", "k_proj"), ("q_proj", "o_proj"), ("up_proj", "gate_proj"),
    ("model.model.", "model."), ("lora_A", "lora_B"), (".weight", ".default.weight"), ("up_proj", "up"),
    ("mlp", "self_attn"), ("layers", "h"),
])  # fmt: skip
tensor_edits = st.lists(
    st.tuples(
        st.integers(0, 99),
        st.one_of(
            st.just(("drop",)), st.tuples(st.just("rename"), renames), st.just(("transpose",)), st.just(("float16",)),
            st.just(("truncate",)), st.just(("nan",)), st.just(("zero",)), st.just(("flat",)),
        ),
    ),
    max_size=2,
)  # fmt: skip


def edit(tensors: dict[str, np.ndarray], index: int, operation: tuple) -> None:
    names = sorted(tensors)
    if not names:
        return
    name = names[index % len(names)]
    tensor = tensors.pop(name)
    if operation[0] == "drop":
        return
    if operation[0] == "rename":
        name = name.replace(*operation[1], 1)
    changed = {
        "transpose": tensor.T, "float16": tensor.astype(np.float16), "truncate": tensor[:-1],
        "nan": tensor * np.nan, "zero": tensor * 0, "flat": tensor.reshape(-1),
    }  # fmt: skip
    tensors[name] = np.ascontiguousarray(changed.get(operation[0], tensor))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("mutations")
    model = save_model(SPEC, directory / "model")
    adapters = [
        save_adapter(model, directory / name, seed, r=2, target_modules=["q_proj", "up_proj", "down_proj"], **fields)
        for seed, (name, fields) in enumerate({"lora": {}, "dora": {"use_dora": True}}.items())
    ]
    return directory, model, base_weights(model), adapters


@settings(max_examples=examples(60, 600), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    is_dora=st.booleans(),
    fields=st.lists(
        st.sampled_from(sorted(FIELDS)).flatmap(lambda name: st.tuples(st.just(name), FIELDS[name])), max_size=3
    ),
    edits=tensor_edits,
)
@example(is_dora=True, fields=[("init_lora_weights", "pissa"), ("alpha_pattern", {"q_proj": 0})], edits=[])
def test_equal_to_peft_or_refused(files, is_dora: bool, fields: list, edits: list) -> None:
    directory, model, base, adapters = files
    mutated = directory / "mutated"
    mutated.mkdir(exist_ok=True)
    config = {**json.loads((adapters[is_dora] / CONFIG).read_text()), **dict(fields)}
    tensors = load_file(adapters[is_dora] / TENSORS)
    for index, operation in edits:
        edit(tensors, index, operation)
    (mutated / CONFIG).write_text(json.dumps(config))
    save_file(tensors, mutated / TENSORS, {"format": "pt"})
    adapter, refusal = convert(mutated, model)
    if adapter is None:
        assert str(mutated) in refusal
        assert fields or edits, f"nothing was changed: {refusal}"
        return
    expected = merged(model, mutated)
    tolerance = FACTORISATION_TOLERANCE if config["init_lora_weights"] in GIVE_BACK else FLOAT32_TOLERANCE
    actual = merged_by_us(base, adapter)
    for path, weight in expected.items():
        atol = tolerance * max(1.0, np.abs(weight).max())
        np.testing.assert_allclose(actual[path], weight, rtol=0, atol=atol, err_msg=path)


def convert(directory: Path, model: Path) -> tuple[ConvertedAdapter | None, str]:
    try:
        return convert_adapter(directory, storage_dtype="float32", base=model), ""
    except _core.AdapterError as error:
        return None, str(error)


def merged(model: Path, directory: Path) -> dict[str, np.ndarray]:
    """Returns the weights that PEFT merges, with B = 0 for modules without tensors in the file, whatever
    init_lora_weights is. Exceptions are initialisations that change the base, whose A and B restore it."""
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = PeftModel.from_pretrained(base, directory)
    present = {name.replace(".default", "") for name in load_file(directory / TENSORS)}
    gives_back = json.loads((directory / CONFIG).read_text())["init_lora_weights"] in GIVE_BACK
    with torch.no_grad():
        for name, parameter in [] if gives_back else loaded.named_parameters():
            if "lora_B" in name and not _is_present(name, present):
                parameter.zero_()
    state = copy.deepcopy(loaded.merge_and_unload()).state_dict()
    return {
        name.removesuffix(".weight"): tensor.numpy() for name, tensor in state.items() if name.endswith("_proj.weight")
    }


def _is_present(name: str, present: set[str]) -> bool:
    bare = name.replace(".default", "").removeprefix("base_model.model.").removeprefix("model.")
    return any(other.endswith(bare) for other in present)
