"""Mutated files of any kind of adapter are converted to rows that an engine accepts, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import peft
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from adaptrt import _core
from adaptrt.formats.adapter import ConvertedAdapter, convert_adapter
from adaptrt.formats.adapter.recognise import MLX_FILE
from support.adapters import CONFIG, TENSORS
from support.examples import examples
from support.kinds import as_mlx, configs, save_kind
from support.models import ALL_MODULES, ModelSpec, save_model

SPEC = ModelSpec(hidden_size=12, head_dim=4, num_attention_heads=3, num_key_value_heads=1, intermediate_size=16)
EXTRA = {"resized": 2, "resized-lora": 3, "resized-tokens": 2}
"""Number of tokens that each kind adds to the base's vocabulary."""
KINDS = (
    *("adalora", "vera", "loha", "lokr", "lokr-in-factors", "ia3", "whole", "tokens", "mlx-lora", "mlx-dora"),
    *EXTRA,
)

SCALARS = [st.none(), st.booleans(), st.integers(-2, 9), st.floats(), st.text(max_size=4)]
values = st.one_of(*SCALARS, st.lists(st.integers(0, 3), max_size=2))
CHANGES = ["drop", "transpose", "truncate", "nan", "flat", "int", "empty", "up_proj", "layers.9", "lora_a"]
edits = st.lists(st.tuples(st.integers(0, 99), st.sampled_from(CHANGES)), max_size=2)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path, dict[str, Path]]:
    root = tmp_path_factory.mktemp("kinds")
    model = save_model(SPEC, root / "model")
    of_peft = {
        **configs(ALL_MODULES, is_transposed=False),
        "whole": peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["lm_head"]),
        "tokens": peft.TrainableTokensConfig(token_indices=[3, 9], target_modules=["embed_tokens"]),
        "resized": peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]),
        "resized-lora": peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["lm_head", "embed_tokens"]),
        "resized-tokens": peft.LoraConfig(
            task_type="CAUSAL_LM",
            target_modules=["q_proj"],
            trainable_token_indices=[3, SPEC.vocab_size, SPEC.vocab_size + 1],
        ),
    }
    made = {}
    for kind in KINDS:
        name = kind.removeprefix("mlx-")
        directory = root / name
        if not directory.exists():
            save_kind(model, directory, of_peft[name], 1, EXTRA.get(name, 0))
        made[kind] = as_mlx(directory, root / kind, num_layers=-1) if kind.startswith("mlx-") else directory
    return root, model, made


def changed(name: str, tensor: np.ndarray, what: str) -> tuple[str, np.ndarray] | None:
    if what == "drop":
        return None
    if what in ("up_proj", "layers.9", "lora_a"):  # another module, layer or role
        old = {"up_proj": "down_proj", "layers.9": "layers.0", "lora_a": "lora_b"}[what]
        return name.replace(old, what), tensor
    arrays = {
        "transpose": tensor.T, "truncate": tensor[:-1], "nan": tensor * np.nan, "flat": tensor.reshape(-1),
        "int": tensor.astype(np.int32), "empty": tensor[:0],
    }  # fmt: skip
    return name, np.ascontiguousarray(arrays[what])


@settings(max_examples=examples(75, 600), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(KINDS),
    fields=st.lists(st.tuples(st.integers(0, 99), values), max_size=2),
    edits=edits,
    cut=st.integers(0, 40),
)
@example(kind="adalora", fields=[], edits=[], cut=0)
@example(kind="resized-lora", fields=[], edits=[(5, "truncate")], cut=0)
def test_rows_or_a_refusal(files, kind: str, fields: list, edits: list, cut: int) -> None:
    root, model, made = files
    mutated = root / "mutated"
    mutated.mkdir(exist_ok=True)
    for path in mutated.iterdir():
        path.unlink()
    config = json.loads((made[kind] / CONFIG).read_text())
    for index, value in fields:
        config[sorted(config)[index % len(config)]] = value
    file = MLX_FILE if kind.startswith("mlx-") else TENSORS
    tensors = load_file(made[kind] / file)
    for index, what in edits:
        name = sorted(tensors)[index % len(tensors)] if tensors else None
        after = None if name is None else changed(name, tensors.pop(name), what)
        if after is not None:
            tensors[after[0]] = after[1]
    (mutated / CONFIG).write_text(json.dumps(config))
    save_file(tensors, mutated / file)
    if cut > 30:
        content = (mutated / file).read_bytes()
        (mutated / file).write_bytes(content[: -(cut - 30)])
    converted, refusal = convert(mutated, model)
    if converted is None:
        assert str(mutated) in refusal
        assert fields or edits or cut > 30, f"nothing was changed: {refusal}"
        return
    rows = converted.config[0]
    assert len(rows) == len(converted.paths) == len({(layer, module) for module, layer, _, _ in rows.tolist()})
    assert (rows[:, 2] > 0).all()
    assert np.isfinite(converted.weights).all()


@pytest.mark.parametrize("kind", ["resized", "resized-lora", "resized-tokens"])
def test_every_tensor_of_new_tokens_has_one_shape(files, kind: str) -> None:
    root, model, made = files
    mutated = root / "reshaped"
    mutated.mkdir(exist_ok=True)
    (mutated / CONFIG).write_bytes((made[kind] / CONFIG).read_bytes())
    tensors = load_file(made[kind] / TENSORS)
    for name, tensor in tensors.items():
        for axis in range(tensor.ndim):
            cut = np.ascontiguousarray(np.delete(tensor, -1, axis=axis))
            save_file({**tensors, name: cut}, mutated / TENSORS)
            converted, refusal = convert(mutated, model)
            # An adapter with one token less has another vocabulary, which may be accepted.
            assert str(mutated) in refusal or converted is not None


def convert(directory: Path, model: Path) -> tuple[ConvertedAdapter | None, str]:
    try:
        return convert_adapter(directory, storage_dtype="float32", base=model), ""
    except _core.AdapterError as error:
        return None, str(error)
