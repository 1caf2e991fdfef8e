"""Compares conversion with the libraries of published formats on the same tensors, if the libraries are installed."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import adaptrt
from adaptrt.builder.build import build
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.formats.checkpoint.hf_weights import HfWeights
from adaptrt.formats.engine.build_config import BuildConfig
from adaptrt.formats.hugging_face.published.config import read_published_format
from support.models import ModelSpec, save_model
from support.published import SCHEMES, Scheme, bits4, publish, write
from support.serving import collect, make_request

SPEC = ModelSpec(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=128)
CONFIG = BuildConfig(max_batch_size=2, max_num_tokens=64, max_seq_len=32)
SOURCE = "model.layers.0.mlp.down_proj"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def read(directory: Path, config: dict[str, Any]) -> torch.Tensor:
    """Returns SOURCE's weight as conversion reads it, in a torch dtype with the same bits."""
    problems: list[str] = []
    found = read_published_format(config, problems)
    assert found is not None, problems
    weights = HfWeights(directory)
    values = weights.with_matrices(found.matrices(weights)).joined_rows(f"{SOURCE}.weight")
    return torch.from_numpy(values.view(np.uint8).copy()).view(DTYPES[str(values.dtype)])


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.dtype == theirs.dtype and torch.equal(ours.view(torch.uint8), theirs.contiguous().view(torch.uint8))


def written(scheme: Scheme, directory: Path, shape: tuple[int, int] = (64, 128)) -> dict[str, torch.Tensor]:
    """Writes a quantised layer and returns its tensors by the suffix after the layer's name."""
    rng = np.random.default_rng(0)
    layer = scheme.quantize(rng.normal(scale=0.1, size=shape).astype(np.float32), rng)
    write(directory, {}, {SOURCE + suffix: tensor for suffix, tensor in layer.tensors.items()})
    return {name.removeprefix(SOURCE): tensor for name, tensor in load_file(directory / "model.safetensors").items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", [(64, 128), (7, 33), (300, 128)], ids=str)
def test_four_bits_of_bitsandbytes(kind: str, nested: bool, dtype: str, shape: tuple[int, int], tmp_path: Path) -> None:
    """Checks tensors that the library made and tensors that the tests' writer made.

    No row has 96 values: on CPUs bitsandbytes 0.50 is wrong for rows that are whole half blocks but not whole blocks.
    """
    functional = pytest.importorskip("bitsandbytes").functional
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DTYPES[dtype])
    packed, state = functional.quantize_4bit(matrix, quant_type=kind, compress_statistics=nested)
    tensors = {f"{SOURCE}.weight": packed}
    tensors |= {f"{SOURCE}.weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    (tmp_path / "theirs").mkdir()
    save_file(tensors, tmp_path / "theirs" / "model.safetensors")
    scheme = bits4(kind, dtype, nested=nested)
    expected = functional.dequantize_4bit(packed, state).reshape(shape)
    assert same_bits(read(tmp_path / "theirs", scheme.config), expected)

    own = written(scheme, tmp_path / "ours", shape)
    stats = {name.removeprefix(".weight."): tensor for name, tensor in own.items() if name != ".weight"}
    state = functional.QuantState.from_dict(stats, torch.device("cpu"))
    expected = functional.dequantize_4bit(own[".weight"], state).reshape(shape)
    assert same_bits(read(tmp_path / "ours", scheme.config), expected)


def test_llm_int8_of_bitsandbytes(tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    tensors = written(SCHEMES["llm-int8"], tmp_path / "model")
    expected = functional.int8_vectorwise_dequant(tensors[".weight"], tensors[".SCB"])
    assert same_bits(read(tmp_path / "model", SCHEMES["llm-int8"].config), expected)


@pytest.mark.parametrize(
    "name", [name for name in SCHEMES if name.startswith(("float8", "packed"))]
)  # fmt: skip
def test_compressed_tensors(name: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    config = SCHEMES[name].config
    tensors = written(SCHEMES[name], tmp_path / "model")
    local = {suffix.removeprefix("."): tensor for suffix, tensor in tensors.items()}
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    try:
        scheme = QuantizationScheme(**copy.deepcopy(config["config_groups"]["group_0"]))
    except ValueError as reason:
        if "actorder='group' has been removed" in str(reason):
            pytest.skip("this release reads no such files")
        raise
    expected = compressor.decompress(local, scheme)
    assert same_bits(read(tmp_path / "model", config), expected["weight"])


@pytest.mark.parametrize("name", ["fp8-blocks", "fp8-blocks-bfloat16"])
def test_fp8_of_transformers(name: str, tmp_path: Path) -> None:
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    if not hasattr(getattr(module, "Fp8Dequantize", None), "_dequantize_one"):
        pytest.skip("this release of transformers dequantises elsewhere")
    # transformers accepts only whole blocks.
    shape = (128, 256) if name.endswith("bfloat16") else (64, 128)
    tensors = written(SCHEMES[name], tmp_path / "model", shape)
    made = module.Fp8Dequantize(None)._dequantize_one(tensors[".weight"], tensors[".weight_scale_inv"], torch.float32)
    assert same_bits(read(tmp_path / "model", SCHEMES[name].config), made)


@pytest.mark.parametrize(
    ("name", "library", "tolerance"),
    [
        # The weights have the same bits; on CPUs with AVX512-BF16, bitsandbytes computes the products in bfloat16.
        ("nf4-double", "bitsandbytes", 0.03),
        ("fp4", "bitsandbytes", 0.03),
        ("float8-channel-float32", "compressed_tensors", 1e-4),
        # transformers loads the scales in float32 and does not round their products to float16.
        ("packed-4-float16", "compressed_tensors", 2e-3),
    ],
)
def test_logits_of_transformers_with_the_library(name: str, library: str, tolerance: float, tmp_path: Path) -> None:
    pytest.importorskip(library)
    published = publish(save_model(SPEC, tmp_path / "model"), tmp_path, SCHEMES[name])
    path = published / "config.json"
    config = json.loads(path.read_text())
    for group in config["quantization_config"].get("config_groups", {}).values():
        group["input_activations"] = None  # otherwise the library rounds the activations
    path.write_text(json.dumps(config))
    prompt = np.random.default_rng(3).integers(2, SPEC.vocab_size, 20).tolist()
    reference = transformers.AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0].float().numpy()
    build(Checkpoint.of_model(published), CONFIG, tmp_path / "engine")
    with adaptrt.Executor(tmp_path / "engine", adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
        answer = collect(executor, executor.enqueue_request(make_request(prompt, 1)))
    assert np.abs(answer.context_logits - expected).max() <= tolerance * (expected.max() - expected.min())
