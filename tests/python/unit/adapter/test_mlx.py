"""Adapters made by MLX-LM's own layers: outputs are the same, module by module."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from adaptrt.formats.adapter import convert_adapter
from support.adapters import CONFIG, base_weights, merged_by_us
from support.models import ModelSpec, save_model

mx = pytest.importorskip("mlx.core", reason="pip install mlx[cpu] mlx-lm")
nn = pytest.importorskip("mlx.nn")
lora = pytest.importorskip("mlx_lm.tuner.lora", reason="pip install mlx[cpu] mlx-lm")
dora = pytest.importorskip("mlx_lm.tuner.dora")

# MLX also sums in float32, in another order.
FLOAT32_TOLERANCE = 1e-5
KEYS = ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"]


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_outputs_of_mlx_layers(kind: str, tmp_path: Path) -> None:
    model = save_model(ModelSpec(), tmp_path / "model")
    base = base_weights(model)
    mx.random.seed(4)
    layers = {}
    tensors = {}
    for path in (f"model.layers.1.{key}" for key in KEYS):
        linear = nn.Linear(*reversed(base[path].shape), bias=False)
        linear.weight = mx.array(base[path])
        of_kind = lora.LoRALinear if kind == "lora" else dora.DoRALinear
        layer = of_kind.from_base(linear, r=3, scale=2.5)
        layer.lora_b = 0.2 * mx.random.normal(layer.lora_b.shape)
        if kind == "dora":
            layer.m = layer.m * (1 + 0.2 * mx.random.normal(layer.m.shape))
        layers[path] = layer
        names = ("lora_a", "lora_b", "m")[: 2 if kind == "lora" else 3]
        tensors |= {f"{path}.{name}": getattr(layer, name) for name in names}
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    mx.save_safetensors(str(adapter / "adapters.safetensors"), tensors)
    parameters = {"rank": 3, "scale": 2.5, "dropout": 0.0, "keys": KEYS}
    fields = {"fine_tune_type": kind, "num_layers": 1, "lora_parameters": parameters, "iters": 600}
    (adapter / CONFIG).write_text(json.dumps(fields))

    rows = convert_adapter(adapter, storage_dtype="float32", base=model)
    assert {f"model.{path}" for path in rows.paths} == layers.keys()
    merged = merged_by_us({path.removeprefix("model."): base[path] for path in layers}, rows)
    for path, layer in layers.items():
        x = np.random.default_rng(1).standard_normal((5, base[path].shape[1]), np.float32)
        expected = np.array(layer(mx.array(x)))
        actual = x @ merged[path.removeprefix("model.")].T
        assert np.abs(actual - expected).max() <= FLOAT32_TOLERANCE * np.abs(expected).max()
