"""Converted checkpoints against the state_dict of the transformers model that they came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from adaptrt import _core
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.formats.models.registry import load_config
from support.models import ModelSpec, save_model

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
TENSOR_PARALLEL = ModelSpec(
    num_attention_heads=4, num_key_value_heads=2, intermediate_size=44, num_hidden_layers=4, vocab_size=61
)
TORCH_DTYPES = {
    _core.DType.FLOAT32: torch.float32,
    _core.DType.FLOAT16: torch.float16,
    _core.DType.BFLOAT16: torch.bfloat16,
}


def model_state(directory: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """Loads a model directory with transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    return model, model.state_dict()


def expected_rank(
    model: Any,
    state: dict[str, torch.Tensor],
    tp_size: int,
    tp_rank: int,
    layers: range,
    first: bool,
    last: bool,
) -> dict[str, torch.Tensor]:
    """Computes the tensors of one rank with torch: chunks heads, and repeats them if there are too few."""
    config = model.config
    head_dim = model.model.layers[0].self_attn.head_dim
    repeats = max(1, tp_size // config.num_key_value_heads)

    def by_heads(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unflatten(0, (-1, head_dim))

    def column(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(tp_size, dim=0)[tp_rank]

    def qkv(prefix: str, kind: str) -> torch.Tensor:
        q, k, v = (by_heads(state[f"{prefix}self_attn.{name}_proj.{kind}"]) for name in "qkv")
        k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
        return torch.cat([column(q).flatten(0, 1), column(k).flatten(0, 1), column(v).flatten(0, 1)])

    result = {}
    if first:
        result["transformer.vocab_embedding.weight"] = state["model.embed_tokens.weight"]
    for index, layer in enumerate(layers):
        ours, theirs = f"transformer.layers.{index}.", f"model.layers.{layer}."
        result[ours + "input_layernorm.weight"] = state[theirs + "input_layernorm.weight"]
        result[ours + "post_layernorm.weight"] = state[theirs + "post_attention_layernorm.weight"]
        for kind in ("weight", "bias"):
            if theirs + f"self_attn.q_proj.{kind}" in state:
                result[ours + f"attention.qkv.{kind}"] = qkv(theirs, kind)
            for name, source in (("fc", "gate_proj"), ("gate", "up_proj")):
                if theirs + f"mlp.{source}.{kind}" in state:
                    result[ours + f"mlp.{name}.{kind}"] = column(state[theirs + f"mlp.{source}.{kind}"])
        for name, source in (("attention.dense", "self_attn.o_proj"), ("mlp.proj", "mlp.down_proj")):
            result[ours + name + ".weight"] = state[theirs + source + ".weight"].chunk(tp_size, dim=1)[tp_rank]
            if theirs + source + ".bias" in state:
                result[ours + name + ".bias"] = state[theirs + source + ".bias"]
        for norm in "qk":
            if theirs + f"self_attn.{norm}_norm.weight" in state:
                result[ours + f"attention.{norm}_layernorm.weight"] = state[theirs + f"self_attn.{norm}_norm.weight"]
    if last:
        result["transformer.ln_f.weight"] = state["model.norm.weight"]
        if not config.tie_word_embeddings or not first or tp_size > 1:
            head = state["lm_head.weight"]
            padding = -head.shape[0] % tp_size
            result["lm_head.weight"] = column(torch.cat([head, torch.zeros(padding, head.shape[1], dtype=head.dtype)]))
    return result


def check(model_dir: Path, output_dir: Path, dtype: torch.dtype, tp_size: int = 1, pp_size: int = 1) -> None:
    """Checks every file, every tensor and every number of a converted checkpoint."""
    model, state = model_state(model_dir)
    per_rank = model.config.num_hidden_layers // pp_size
    assert {path.name for path in output_dir.glob("rank*")} == {
        f"rank{rank}.safetensors" for rank in range(tp_size * pp_size)
    }
    for rank in range(tp_size * pp_size):
        pp_rank, tp_rank = divmod(rank, tp_size)
        layers = range(pp_rank * per_rank, (pp_rank + 1) * per_rank)
        expected = expected_rank(model, state, tp_size, tp_rank, layers, pp_rank == 0, pp_rank == pp_size - 1)
        found = load_file(output_dir / f"rank{rank}.safetensors")
        assert set(found) == set(expected)
        for name, tensor in expected.items():
            assert found[name].dtype == dtype
            assert torch.equal(found[name], tensor.to(dtype)), name


@pytest.mark.parametrize("dtype", list(TORCH_DTYPES), ids=_core.dtype_name)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_that_of_state_dict(tmp_path: Path, family: str, tied: bool, dtype: _core.DType) -> None:
    model_dir = save_model(ModelSpec(family=family, tie_word_embeddings=tied), tmp_path / "hf")
    convert_checkpoint(model_dir, tmp_path / "out", dtype=dtype)
    check(model_dir, tmp_path / "out", TORCH_DTYPES[dtype])


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("target", list(TORCH_DTYPES), ids=_core.dtype_name)
def test_every_cast_is_torchs(tmp_path: Path, source: torch.dtype, target: _core.DType) -> None:
    model_dir = save_model(ModelSpec(), tmp_path / "hf", dtype=source)
    convert_checkpoint(model_dir, tmp_path / "out", dtype=target)
    check(model_dir, tmp_path / "out", TORCH_DTYPES[target])


@pytest.mark.parametrize("source", list(TORCH_DTYPES), ids=_core.dtype_name)
def test_auto_keeps_the_models_type(tmp_path: Path, source: _core.DType) -> None:
    model_dir = save_model(ModelSpec(), tmp_path / "hf", dtype=TORCH_DTYPES[source])
    assert convert_checkpoint(model_dir, tmp_path / "out").config.dtype == source
    check(model_dir, tmp_path / "out", TORCH_DTYPES[source])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (4, 1), (1, 2), (2, 4), (4, 2)])
def test_ranks_of_a_parallel_checkpoint(tmp_path: Path, family: str, tp_size: int, pp_size: int) -> None:
    spec = ModelSpec(**{**TENSOR_PARALLEL.__dict__, "family": family, "tie_word_embeddings": family == "qwen3"})
    model_dir = save_model(spec, tmp_path / "hf")
    converted = convert_checkpoint(model_dir, tmp_path / "out", tp_size=tp_size, pp_size=pp_size, workers=3)
    assert load_config(tmp_path / "out") == converted.config
    assert converted.config.mapping.world_size == tp_size * pp_size
    check(model_dir, tmp_path / "out", torch.float32, tp_size, pp_size)


@pytest.mark.parametrize("key_value_heads", [1, 2, 4])
def test_query_and_key_value_groups(tmp_path: Path, key_value_heads: int) -> None:
    spec = ModelSpec(num_attention_heads=4, num_key_value_heads=key_value_heads, head_dim=10, hidden_size=20)
    model_dir = save_model(spec, tmp_path / "hf")
    config = convert_checkpoint(model_dir, tmp_path / "out", tp_size=1).config
    assert (config.num_key_value_heads, config.head_size, config.hidden_size) == (key_value_heads, 10, 20)
    check(model_dir, tmp_path / "out", torch.float32)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_biases(tmp_path: Path, family: str) -> None:
    extra = (("attention_bias", True), *((("mlp_bias", True),) if family == "llama" else ()))
    spec = ModelSpec(**{**TENSOR_PARALLEL.__dict__, "family": family, "extra": extra})
    model_dir = save_model(spec, tmp_path / "hf")
    config = convert_checkpoint(model_dir, tmp_path / "out", tp_size=2).config
    assert (config.attn_bias, config.attn_dense_bias, config.mlp_bias) == (True, True, family == "llama")
    check(model_dir, tmp_path / "out", torch.float32, tp_size=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_sharded_models(tmp_path: Path, family: str) -> None:
    save_model(ModelSpec(family=family), tmp_path / "whole")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="12KB")
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 2
    convert_checkpoint(tmp_path / "sharded", tmp_path / "out")
    check(tmp_path / "whole", tmp_path / "out", torch.float32)


@pytest.mark.parametrize("sharded", [False, True])
def test_pickled_models(tmp_path: Path, sharded: bool) -> None:
    model_dir = save_model(ModelSpec(), tmp_path / "hf", dtype=torch.bfloat16)
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    state = load_file(model_dir / "model.safetensors")
    if sharded:
        halves = [dict(list(state.items())[:5]), dict(list(state.items())[5:])]
        for index, half in enumerate(halves):
            torch.save(half, pickled / f"part{index}.bin")
        weight_map = {name: f"part{index}.bin" for index, half in enumerate(halves) for name in half}
        (pickled / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    else:
        torch.save(state, pickled / "pytorch_model.bin")
    convert_checkpoint(pickled, tmp_path / "out")
    check(model_dir, tmp_path / "out", torch.bfloat16)


def test_a_model_in_the_hubs_cache_is_behind_symbolic_links(tmp_path: Path) -> None:
    model_dir = save_model(ModelSpec(), tmp_path / "blobs")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in model_dir.iterdir():
        (snapshot / path.name).symlink_to(path)
    convert_checkpoint(snapshot, tmp_path / "out")
    check(model_dir, tmp_path / "out", torch.float32)


def test_a_stored_lm_head_that_equals_the_tied_embedding_is_fine(tmp_path: Path) -> None:
    model_dir = save_model(ModelSpec(tie_word_embeddings=True), tmp_path / "hf")
    state = load_file(model_dir / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, model_dir / "model.safetensors")
    assert convert_checkpoint(model_dir, tmp_path / "out").config.share_embedding_table
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "rank0.safetensors")


def test_buffers_of_old_checkpoints_are_accepted(tmp_path: Path) -> None:
    model_dir = save_model(ModelSpec(), tmp_path / "hf")
    state = load_file(model_dir / "model.safetensors")
    state["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
    save_file(state, model_dir / "model.safetensors")
    convert_checkpoint(model_dir, tmp_path / "out")
    check(model_dir, tmp_path / "out", torch.float32)


def test_files_for_text_are_copied_and_others_are_not(tmp_path: Path) -> None:
    model_dir = save_model(ModelSpec(), tmp_path / "hf")
    (model_dir / "tokenizer.json").write_text('{"a": 1}')
    (model_dir / "notes.txt").write_text("no")
    convert_checkpoint(model_dir, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"a": 1}'
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "generation_config.json",
        "rank0.safetensors",
        "tokenizer.json",
    ]


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    model_dir = save_model(TENSOR_PARALLEL, tmp_path / "hf")
    outputs = [tmp_path / "one", tmp_path / "four"]
    for output, workers in zip(outputs, (1, 4), strict=True):
        convert_checkpoint(model_dir, output, tp_size=4, workers=workers)
    for path in outputs[0].iterdir():
        assert path.read_bytes() == (outputs[1] / path.name).read_bytes()


def test_the_config_has_tensorrt_llms_keys(tmp_path: Path) -> None:
    spec = ModelSpec(family="qwen3", tie_word_embeddings=True)
    model_dir = save_model(spec, tmp_path / "hf", dtype=torch.bfloat16)
    convert_checkpoint(model_dir, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = {
        "architecture": "Qwen3ForCausalLM",
        "dtype": "bfloat16",
        "logits_dtype": "float32",
        "vocab_size": 61,
        "max_position_embeddings": 1024,
        "hidden_size": 36,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_size": 12,
        "hidden_act": "silu",
        "intermediate_size": 37,
        "norm_epsilon": 1e-6,
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": 10000.0,
        "rotary_scaling": None,
        "qk_layernorm": True,
        "share_embedding_table": True,
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        "bos_token_id": 0,
        "eos_token_id": [1],
        "pad_token_id": None,
    }
    assert {name: config[name] for name in expected} == expected
