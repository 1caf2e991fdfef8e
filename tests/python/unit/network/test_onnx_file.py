"""The ONNX file that --dump_onnx writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from adaptrt._core import DType
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.builder.network.onnx_file import dump_onnx, external_bytes
from adaptrt.builder.network.onnx_graph import NetworkOptions
from adaptrt.plugins import DOMAIN
from support.engines import make_graph
from support.models import ModelSpec, save_model

OPTIONS = NetworkOptions(tokens_per_block=4, max_lora_rank=8, dora=True)


def dumped(spec: ModelSpec, directory: Path, dtype: DType | None = None) -> tuple[Checkpoint, Path]:
    save_model(spec, directory / "model")
    convert_checkpoint(directory / "model", directory / "checkpoint", dtype=dtype)
    checkpoint = Checkpoint.open(directory / "checkpoint")
    written: list[int] = []
    model = make_graph(checkpoint, OPTIONS)
    dump_onnx(model, checkpoint.directory, directory / "network.onnx", written.append)
    assert sum(written) == external_bytes(model) == sum(s.num_bytes for s in checkpoint.ranks[0].reader.specs.values())
    return checkpoint, directory / "network.onnx"


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_checker_accepts_it_and_the_weights_are_the_checkpoints(family: str, dtype: DType, tmp_path: Path) -> None:
    checkpoint, path = dumped(ModelSpec(family=family), tmp_path, dtype)
    assert path.stat().st_size < 100_000
    model = onnx.load(path)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    for name in checkpoint.ranks[0].reader.specs:
        assert numpy_helper.to_array(stored[name]).tobytes() == checkpoint.ranks[0].reader.array(name).tobytes()


def test_plugin_nodes_look_as_tensorrts_parser_wants_them(tmp_path: Path) -> None:
    _, path = dumped(ModelSpec(), tmp_path)
    model = onnx.load(path, load_external_data=False)
    plugins = [node for node in model.graph.node if node.domain == DOMAIN]
    assert {node.op_type for node in plugins} == {"Dora", "PagedAttention"}
    for node in plugins:
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        assert attributes["plugin_version"] == b"1"
        assert attributes["plugin_namespace"] == b"adaptrt"
    assert {opset.domain: opset.version for opset in model.opset_import} == {"": 23, DOMAIN: 1}


def test_a_tied_lm_head_is_the_embeddings_initializer(tmp_path: Path) -> None:
    _, path = dumped(ModelSpec(tie_word_embeddings=True), tmp_path)
    graph = onnx.load(path, load_external_data=False).graph
    readers = [node for node in graph.node if "transformer.vocab_embedding.weight" in node.input]
    assert [node.op_type for node in readers] == ["Gather", "Gemm"]


def test_half_precision_graphs_are_strongly_typed(tmp_path: Path) -> None:
    """Matrix products use the engine's dtype; the residual stream, the norms and the logits are float32."""
    _, path = dumped(ModelSpec(family="qwen3"), tmp_path, DType.BFLOAT16)
    model = onnx.shape_inference.infer_shapes(
        onnx.load(path, load_external_data=False), check_type=True, strict_mode=True
    )
    graph = model.graph
    types = {v.name: v.type.tensor_type.elem_type for v in (*graph.value_info, *graph.input, *graph.output)}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in graph.node:
        operands = {types[name] for name in (*node.input, *node.output)}
        if node.op_type == "Gemm":
            assert operands == {TensorProto.BFLOAT16}
        if node.op_type == "RMSNormalization":
            assert operands == {TensorProto.FLOAT}
    assert types["logits"] == TensorProto.FLOAT
    assert types["kv_pool.0"] == types["kv_pool_out.0"] == TensorProto.BFLOAT16


def test_external_tensors_begin_at_pages(tmp_path: Path) -> None:
    _, path = dumped(ModelSpec(), tmp_path)
    for tensor in onnx.load(path, load_external_data=False).graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            fields = {entry.key: entry.value for entry in tensor.external_data}
            assert fields["location"] == "network.onnx.data"
            assert int(fields["offset"]) % 4096 == 0


def test_reduced_precision_of_the_weights_is_kept(tmp_path: Path) -> None:
    torch.manual_seed(0)
    checkpoint, path = dumped(ModelSpec(), tmp_path, DType.FLOAT16)
    (norm,) = [t for t in onnx.load(path).graph.initializer if t.name == "transformer.ln_f.weight"]
    assert numpy_helper.to_array(norm).dtype == np.float16
    assert checkpoint.config.dtype is DType.FLOAT16
