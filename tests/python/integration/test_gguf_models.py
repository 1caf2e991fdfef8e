"""Models in GGUF files become the checkpoints of the models that they were made from, and are found by every name."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.numpy import load_file

import adaptrt
from adaptrt import CheckpointError, ConfigError
from adaptrt._core import DType
from adaptrt.builder import cli
from adaptrt.builder.build import build
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.builder.conversion.published.kept_layers import linear_weights
from adaptrt.builder.model_cache.first_use import engine_for
from adaptrt.builder.model_cache.options import EngineOptions
from adaptrt.builder.network.onnx_graph import NetworkOptions
from adaptrt.builder.network.rotary_frequencies import inverse_frequencies
from adaptrt.common.file_lock import file_lock
from adaptrt.common.progress import format_bytes
from adaptrt.formats.checkpoint.config import CheckpointConfig
from adaptrt.formats.checkpoint.quantizer import dequantize_rows
from adaptrt.formats.engine.build_config import BuildConfig
from adaptrt.formats.engine.engine_config import EngineConfig
from adaptrt.formats.models.registry import load_config
from adaptrt.formats.sources import find_model
from adaptrt.formats.sources.gguf_models import GgufModels
from adaptrt.runtime.engine import load_engine
from support.engines import SMALL
from support.families import FAMILIES, LONGROPE, RELATIVES, SIZES, Family, rope, save_family
from support.models import save_adapter
from support.oracle import NetworkOracle, SequenceChunk, step_inputs
from support.ranks import answers_of_ranks
from support.serving import collect, make_request
from support.tokenizers import byte_level

gguf = pytest.importorskip("gguf")
gguf_files = pytest.importorskip("support.gguf_files")

LLAMA3 = rope(
    "llama3", 500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
GEMMA3 = dataclasses.replace(
    FAMILIES["gemma3"],
    fields={
        **FAMILIES["gemma3"].fields, "num_hidden_layers": 7, "layer_types": None, "query_pre_attn_scalar": 20,
    },
)  # fmt: skip


def family(config_class: Any, **fields: Any) -> Family:
    return Family(config_class, [], {**SIZES, **fields})


CASES: dict[str, tuple[str, Family]] = {
    "llama": ("llama", family(transformers.LlamaConfig, head_dim=20, attention_bias=True, mlp_bias=True)),
    "llama-tied": ("llama", family(
        transformers.LlamaConfig, tie_word_embeddings=True, rope_parameters=rope("linear", factor=4.0))),
    "llama3": ("llama", family(transformers.LlamaConfig, rope_parameters=LLAMA3)),
    "llama-yarn": ("llama", family(
        transformers.LlamaConfig, rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=128))),
    "mistral": ("llama", family(transformers.MistralConfig, head_dim=20, sliding_window=None)),
    "mixtral": ("llama", FAMILIES["mixtral"]),
    "qwen2": ("qwen2", family(transformers.Qwen2Config)),
    "qwen3": ("qwen3", family(transformers.Qwen3Config, head_dim=20)),
    "qwen3moe": ("qwen3moe", family(
        transformers.Qwen3MoeConfig, head_dim=20, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=22,
        norm_topk_prob=True)),
    "gemma": ("gemma", RELATIVES["gemma"]),
    "gemma2": ("gemma2", dataclasses.replace(
        FAMILIES["gemma2"], fields={**FAMILIES["gemma2"].fields, "query_pre_attn_scalar": 20})),
    "gemma3": ("gemma3", GEMMA3),
    "phi3": ("phi3", FAMILIES["phi3"]),
    "phi3-longrope": ("phi3", family(
        transformers.Phi3Config, hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
        rope_parameters=LONGROPE, original_max_position_embeddings=24, tie_word_embeddings=True)),
    "granite": ("granite", FAMILIES["granite"]),
    "gpt2": ("gpt2", FAMILIES["gpt2"]),
    "starcoder2": ("starcoder2", family(transformers.Starcoder2Config, sliding_window=None)),
    "olmo2": ("olmo2", FAMILIES["olmo2"]),
    "olmo3": ("olmo2", RELATIVES["olmo3"]),
    "qwen2moe": ("qwen2moe", family(
        transformers.Qwen2MoeConfig, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=22,
        shared_expert_intermediate_size=26)),
    "olmoe": ("olmoe", FAMILIES["olmoe"]),
    "gpt-oss": ("gpt-oss", RELATIVES["gpt-oss"]),
    "gpt-oss-unscaled": ("gpt-oss", dataclasses.replace(
        RELATIVES["gpt-oss"], fields={**RELATIVES["gpt-oss"].fields, "rope_parameters": rope()})),
    "command-r": ("command-r", FAMILIES["cohere"]),
    "cohere2": ("cohere2", family(
        transformers.Cohere2Config, logit_scale=0.7, num_hidden_layers=5, sliding_window=10)),
    "glm4": ("glm4", FAMILIES["glm4"]),
    "smollm3": ("smollm3", family(transformers.SmolLM3Config, num_hidden_layers=5)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory))
    return directory


def comparable(config: CheckpointConfig) -> dict[str, Any]:
    """Fields that must be equal: files have no token ids without a tokenizer, and not every name of the same thing."""
    fields = dataclasses.asdict(config)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "rotary_scaling", "architecture"):
        del fields[name]
    return fields


def assert_same_rotation(found: CheckpointConfig, expected: CheckpointConfig) -> None:
    scaled = [
        inverse_frequencies(getattr(config, "rotary_size", config.head_size), config.rotary_base, config.rotary_scaling)
        for config in (found, expected)
    ]
    np.testing.assert_allclose(scaled[0][0], scaled[1][0], rtol=1e-6)
    assert scaled[0][1] == pytest.approx(scaled[1][1], rel=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_the_checkpoint_is_that_of_the_original(case: str, tmp_path: Path) -> None:
    architecture, own = CASES[case]
    original = save_family(own, tmp_path / "original")
    model = transformers.AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
    parts = 3 if case == "qwen2" else 1
    extra = {"tokenizer.ggml.model": "none"}
    file = gguf_files.write_model(model, architecture, tmp_path / "model.gguf", parts=parts, extra=extra)
    convert_checkpoint(original, tmp_path / "expected")
    convert_checkpoint(find_model(file).directory, tmp_path / "found")
    found, expected = load_config(tmp_path / "found"), load_config(tmp_path / "expected")
    if found.architecture != expected.architecture:
        assert (found.architecture, case) == ("LlamaForCausalLM", "mistral")
    assert comparable(found) == comparable(expected)
    if own.config().model_type != "gpt2":
        assert_same_rotation(found, expected)
    tensors = load_file(tmp_path / "found" / "rank0.safetensors")
    for name, values in load_file(tmp_path / "expected" / "rank0.safetensors").items():
        # Files have Gemma's norms plus one, which rounds them.
        atol = 1e-7 if architecture.startswith("gemma") and values.ndim == 1 else 0
        np.testing.assert_allclose(tensors.pop(name), values, rtol=0, atol=atol, err_msg=name)
    assert not tensors


BLOCKS = {"Q4_K": 12, "Q6_K": 14, "Q8_0": 8, "IQ4_XS": 23}


def random_blocks(name: str, values: np.ndarray) -> tuple[np.ndarray, int | None]:
    """Replaces matrices by random blocks with small scales, whose type depends on the name."""
    if values.ndim < 2 or values.shape[-1] % 256 != 0:
        return values, None
    number = sorted(BLOCKS.values())[zlib.crc32(name.encode()) % len(BLOCKS)]
    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)]
    random = np.random.default_rng(len(name) + values.shape[0])
    blocks = random.integers(0, 256, (values.size // size, num_bytes), dtype=np.uint8)
    scale = {12: 2e-4, 14: 4e-5, 8: 2e-3, 23: 8e-5}[number]
    half = np.array([scale], np.float16).view(np.uint8)
    blocks[:, -2:] = half if number == 14 else blocks[:, -2:]
    if number != 14:
        blocks[:, :2] = half
    if number == 12:
        blocks[:, 2:4] = half
    return blocks.reshape(*values.shape[:-1], -1), number


Quantize = Callable[[str, np.ndarray], tuple[np.ndarray, int | None]]


def write_quantized(file: Path, quantize: Quantize, **fields: Any) -> tuple[Path, Any]:
    """Writes a Llama with a tokenizer and a chat template; returns also transformers' model of the same values."""
    tokenizer = byte_level()
    own = family(
        transformers.LlamaConfig, vocab_size=tokenizer.get_vocab_size(), num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=2, rope_parameters=LLAMA3, **fields,
    )  # fmt: skip
    model = own.random_model().eval()
    stored: dict[str, tuple[np.ndarray, int]] = {}

    def remember(name: str, values: np.ndarray) -> tuple[np.ndarray, int | None]:
        blocks, number = quantize(name, values)
        if number is not None:
            stored[name] = blocks, number
        return blocks, number

    keys = gguf_files.tokenizer_keys(
        tokenizer, "gpt-2", bos_token_id=0, eos_token_id=1, add_bos_token=True
    ) | {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"}  # fmt: skip
    gguf_files.write_model(model, "llama", file, keys, quantize=remember)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            found = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2).get_name(name, try_suffixes=(".weight",))
            if found not in stored:
                continue
            values = gguf.dequantize(stored[found][0], gguf.GGMLQuantizationType(stored[found][1]))
            heads = {"attn_q": 4, "attn_k": 2}.get(found.split(".")[-2])
            if heads is not None:  # back to the order of transformers
                values = values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
            parameter.copy_(torch.from_numpy(values.copy()))
    return file, model


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A file with matrices of four types."""
    numbers = set()

    def quantize(name: str, values: np.ndarray) -> tuple[np.ndarray, int | None]:
        blocks, number = random_blocks(name, values)
        numbers.add(number)
        return blocks, number

    file = tmp_path_factory.mktemp("quantized") / "tiny-Q4_K.gguf"
    written = write_quantized(file, quantize, hidden_size=256, intermediate_size=256)
    assert numbers - {None} == set(BLOCKS.values())
    return written


def assert_logits_of_transformers(file: Path, model: Any, engine_dir: Path) -> None:
    """Builds an engine of float32 and compares a prompt's logits, which are sums in another order."""
    assert cli.main(["build", "--model_dir", str(file), "--dtype", "float32", "--max_seq_len", "64", "--output_dir",
                     str(engine_dir)]) == 0  # fmt: skip
    assert_logits_of_models(engine_dir, [(model, None)])


def assert_logits_of_models(engine_dir: Path, models: Sequence[tuple[Any, Path | None]]) -> None:
    """Compares the logits of a prompt in one batch: each model of transformers is that of the engine with an adapter,
    or without."""
    tokens = np.random.default_rng(0).integers(4, 250, 40).tolist()
    with adaptrt.Executor(engine_dir, adaptrt.ModelType.DECODER_ONLY) as executor:
        loras = [
            None if adapter is None else adaptrt.LoraConfig.from_peft(number, adapter, engine_dir)
            for number, (_, adapter) in enumerate(models)
        ]
        ids = executor.enqueue_requests([make_request(tokens, 4, lora) for lora in loras])
        answers = [collect(executor, request) for request in ids]
    for answer, (model, _) in zip(answers, models, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([tokens])).logits[0].numpy()
        scale = expected.max() - expected.min()
        np.testing.assert_allclose(answer.context_logits, expected, rtol=0, atol=1e-4 * scale)


SCALES = {
    "Q4_0": 0.01, "Q4_1": 0.01, "Q5_0": 0.005, "Q5_1": 0.005, "Q8_0": 8e-4, "Q2_K": 3e-3, "Q3_K": 6e-4, "Q4_K": 2e-4,
    "Q5_K": 1e-4, "Q6_K": 4e-5, "IQ4_NL": 8e-4, "IQ4_XS": 5e-5,
}  # fmt: skip
HALVES = {
    "Q4_1": {0: 1, 2: -7}, "Q5_1": {0: 1, 2: -15}, "Q2_K": {80: 1, 82: 1}, "Q3_K": {108: 1},
    "Q4_K": {0: 1, 2: 7}, "Q5_K": {0: 1, 2: 15}, "Q6_K": {208: 1},
}  # fmt: skip
"""Bytes of blocks where scales and minimums are, as multiples of SCALES; at byte 0 in other types."""


def typical_blocks(block_type: str, values: np.ndarray) -> tuple[np.ndarray, int | None]:
    """Random blocks of a type, whose values are small; vectors stay."""
    if values.ndim < 2:
        return values, None
    number = gguf.GGMLQuantizationType[block_type]
    size, num_bytes = gguf.GGML_QUANT_SIZES[number]
    random = np.random.default_rng(zlib.crc32(f"{block_type} {values.shape} {values.sum()}".encode()))
    blocks = random.integers(0, 256, (values.size // size, num_bytes), dtype=np.uint8)
    if block_type == "MXFP4":
        blocks[:, 0] = random.integers(117, 122, len(blocks))
    else:
        scales = SCALES[block_type] * random.uniform(0.5, 1.5, len(blocks))
        for first, factor in HALVES.get(block_type, {0: 1}).items():
            halves = (factor * scales).astype(np.float16)
            blocks[:, first : first + 2] = halves.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(*values.shape[:-1], -1), number


def test_logits_of_blocks_equal_those_of_transformers(quantized: tuple[Path, Any], tmp_path: Path) -> None:
    assert_logits_of_transformers(*quantized, tmp_path / "engine")


@pytest.mark.parametrize(
    ("block_type", "bits"),
    [
        ("Q4_0", 4.5), ("Q4_1", 5), ("Q5_0", 8.5), ("Q5_1", 9), ("Q8_0", 8.5), ("Q2_K", 6), ("Q3_K", 6), ("Q4_K", 6),
        ("Q5_K", 10), ("Q6_K", 10), ("IQ4_NL", 8.5), ("IQ4_XS", 9), ("MXFP4", 4.5),
    ],
)  # fmt: skip
def test_engines_keep_the_numbers_of_blocks(
    block_type: str, bits: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Matrices of layers and lm_head keep their integers and scales. The embedding has none in an engine."""
    width = 256 if gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[block_type]][0] == 256 else 96
    file, model = write_quantized(
        tmp_path / "a.gguf", lambda _, values: typical_blocks(block_type, values), hidden_size=width,
        intermediate_size=width,
    )  # fmt: skip
    assert_logits_of_transformers(file, model, tmp_path / "engine")
    text = " ".join(capsys.readouterr().out.split())
    assert f"kept 15 matrices of {block_type}, " in text
    # k and v have half of the heads.
    size_of_layers = 2 * 6 * width * width + model.config.vocab_size * width
    assert format_bytes(int(size_of_layers * bits / 8)) in text


MIXED = {
    "attn_q": "Q4_0", "attn_k": "Q8_0", "attn_v": "Q4_0", "attn_output": "Q4_0",
    "ffn_gate": "Q5_0", "ffn_up": "Q4_0", "ffn_down": "IQ4_NL", "output": "Q8_0", "token_embd": "Q5_0",
}  # fmt: skip


def mixed_blocks(name: str, values: np.ndarray) -> tuple[np.ndarray, int | None]:
    return typical_blocks(MIXED.get(name.split(".")[-2], "Q4_0"), values)


def test_layers_of_different_types_keep_their_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The parts of a fused layer get a form that holds both types. A checkpoint holds the same numbers."""
    file, model = write_quantized(tmp_path / "a.gguf", mixed_blocks, hidden_size=96, intermediate_size=96)
    assert_logits_of_transformers(file, model, tmp_path / "engine")
    text = " ".join(capsys.readouterr().out.split())
    assert "kept 15 matrices of IQ4_NL and Q4_0 and Q5_0 and Q8_0, " in text
    assert "as W8A16 in groups of 32; 2 layers W4A16 in groups of 32, " in text
    assert "dequantised" not in text
    checkpoint = tmp_path / "checkpoint"
    assert cli.main(["convert-checkpoint", "--model_dir", str(file), "--dtype", "float32", "--output_dir",
                     str(checkpoint)]) == 0  # fmt: skip
    assert cli.main(["build", "--checkpoint_dir", str(checkpoint), "--max_seq_len", "64", "--output_dir",
                     str(tmp_path / "built")]) == 0  # fmt: skip
    assert (tmp_path / "built" / "rank0.engine").read_bytes() == (tmp_path / "engine" / "rank0.engine").read_bytes()
    fields = json.loads((checkpoint / "config.json").read_text())
    fields["quantization"]["quantized_layers"]["transformer.layers.7.mlp.fc"] = {"quant_algo": "W8A16"}
    (checkpoint / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=r"quantized_layers names transformer\.layers\.7\.mlp\.fc"):
        Checkpoint.open(checkpoint)


def test_layers_of_different_types_are_cut_over_ranks(tmp_path: Path) -> None:
    """Each rank has the numbers of its rows and columns, in the layer's own type."""
    file, _ = write_quantized(tmp_path / "a.gguf", mixed_blocks, hidden_size=128, intermediate_size=128)
    directory = find_model(file).directory
    how = convert_checkpoint(directory, tmp_path / "cut", tp_size=2).config.quantization
    convert_checkpoint(directory, tmp_path / "expected", tp_size=2, dtype=DType.FLOAT32, keeps_published=False)
    opened = Checkpoint.open(tmp_path / "cut")
    assert how is not None
    assert how.quantized_layers
    assert not how.exclude_modules
    for rank in range(2):
        values = load_file(tmp_path / "expected" / f"rank{rank}.safetensors")
        names = [f"{weight.name}.weight" for weight in linear_weights(opened.network)]
        assert len(names) == 11  # five matrices in each layer, with one of q, k and v, and lm_head
        for name in names:
            pieces = opened.ranks[rank].quantized_rows(name, range(len(values[name])))
            found = np.concatenate([dequantize_rows(piece, how.of_weight(name)) for piece in pieces])
            np.testing.assert_array_equal(found, values[name], err_msg=name)


Q4_K_M = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K", "token_embd": "Q4_K"}
"""Types of llama.cpp's quantiser; it takes Q6_K for v and down in half of the layers."""


@pytest.fixture(scope="module")
def q4_k_m(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    def quantize(name: str, values: np.ndarray) -> tuple[np.ndarray, int | None]:
        more = name == "output.weight" or name.startswith("blk.0.")
        return typical_blocks(Q4_K_M.get(name.split(".")[-2], "Q4_K") if more else "Q4_K", values)

    file = tmp_path_factory.mktemp("q4_k_m") / "tiny-Q4_K_M.gguf"
    return write_quantized(file, quantize, hidden_size=256, intermediate_size=256)


def test_two_ranks_compute_with_the_numbers_of_a_q4_k_m_file(q4_k_m: tuple[Path, Any], tmp_path: Path) -> None:
    file, model = q4_k_m
    how = convert_checkpoint(find_model(file).directory, tmp_path / "checkpoint", tp_size=2, dtype=DType.FLOAT32)
    assert how.config.quantization is not None
    assert how.config.quantization.quantized_layers
    engine = tmp_path / "engine"
    build(tmp_path / "checkpoint", BuildConfig(max_batch_size=2, max_num_tokens=64, max_seq_len=64), engine, workers=2)
    prompt = np.random.default_rng(0).integers(4, 250, 40).tolist()
    case = {"adapter": None, "prompt": prompt, "tokens": 4}
    ((answer,),) = answers_of_ranks(2, engine, [[case]], tmp_path, num_threads=1)
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0].numpy()
    np.testing.assert_allclose(answer.context_logits, expected, rtol=0, atol=1e-4 * (expected.max() - expected.min()))


def test_a_q4_k_m_file_keeps_all_of_its_numbers(
    q4_k_m: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_logits_of_transformers(*q4_k_m, tmp_path / "engine")
    text = " ".join(capsys.readouterr().out.split())
    assert "kept 15 matrices of Q4_K and Q6_K, " in text
    assert (
        "as W4A16 in groups of 32 with minimums; transformer.layers.0.attention.qkv W8A16 in groups of 16 with "
        "minimums; 2 layers W8A16 in groups of 16, "
    ) in text


def test_adapters_over_kept_blocks_are_those_of_peft(q4_k_m: tuple[Path, Any], tmp_path: Path) -> None:
    """DoRA divides by norms of rows of the base, which the engine computes from its blocks."""
    file, model = q4_k_m
    model.save_pretrained(tmp_path / "model")
    models = [(model, None)]
    for seed, fields in enumerate(({"r": 4}, {"r": 3, "use_dora": True})):
        adapter = save_adapter(tmp_path / "model", tmp_path / f"adapter{seed}", seed, **fields)
        models.append((peft.PeftModel.from_pretrained(copy.deepcopy(model), adapter), adapter))
    assert_logits_of_models(engine_for(file, EngineOptions(max_seq_len=64, dtype=DType.FLOAT32)), models)


def test_blocks_are_dequantised_if_a_user_asks_for_it(
    q4_k_m: tuple[Path, Any], cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, model = q4_k_m
    options = EngineOptions(max_seq_len=64, dtype=DType.FLOAT32)
    kept, plain = (engine_for(file, dataclasses.replace(options, dequantize=asked)) for asked in (False, True))
    assert EngineConfig.load(kept).pretrained_config.quantization is not None
    assert EngineConfig.load(plain).pretrained_config.quantization is None
    assert_logits_of_models(plain, [(model, None)])
    checkpoint = tmp_path / "checkpoint"
    assert cli.main(["convert-checkpoint", "--model_dir", str(file), "--dequantize", "--output_dir",
                     str(checkpoint)]) == 0  # fmt: skip
    assert "dequantised: 15 matrices of Q4_K and Q6_K, " in capsys.readouterr().out
    assert load_config(checkpoint).quantization is None
    model.save_pretrained(tmp_path / "plain")
    for where, flags, message in (
        (tmp_path / "plain", ["--model_dir"], "the model has no pre-quantised layers; leave dequantize out"),
        (checkpoint, ["--checkpoint_dir"], "dequantize needs model_dir: a checkpoint has the weights that it was"),
    ):
        assert cli.main(["build", *flags, str(where), "--dequantize", "--output_dir", str(tmp_path / "engine")]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    with pytest.raises(ConfigError, match="is a checkpoint; dequantize is only for Hugging Face models and GGUF files"):
        engine_for(checkpoint, dataclasses.replace(options, dtype=None, dequantize=True))
    with pytest.raises(ConfigError, match="dequantize: the model has no pre-quantised layers"):
        engine_for(tmp_path / "plain", dataclasses.replace(options, dequantize=True))


def test_the_graph_of_blocks_with_minimums_is_the_engines(q4_k_m: tuple[Path, Any], tmp_path: Path) -> None:
    convert_checkpoint(find_model(q4_k_m[0]).directory, tmp_path / "checkpoint", dtype=DType.FLOAT32)
    build(Checkpoint.open(tmp_path / "checkpoint"), SMALL, tmp_path / "engine")
    engine = load_engine(tmp_path / "engine")
    native = adaptrt._core.CpuEngine(engine.program, engine.storage, 2)
    native.allocate_kv_blocks(8)
    oracle = NetworkOracle(tmp_path / "checkpoint", tmp_path, NetworkOptions(tokens_per_block=4), num_blocks=8)
    chunk = SequenceChunk(np.random.default_rng(4).integers(0, 61, 11).tolist(), 0, 11, [3, 0, 6])
    expected = oracle.step([chunk])
    inputs = step_inputs([chunk])
    del inputs["adapter_slots"]
    actual = native.step(token_ids=inputs.pop("input_ids"), **inputs)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * (expected.max() - expected.min()))


def test_stages_of_a_pipeline_keep_the_most_common_type(tmp_path: Path) -> None:
    file, _ = write_quantized(tmp_path / "a.gguf", mixed_blocks, hidden_size=96, intermediate_size=96)
    convert_checkpoint(find_model(file).directory, tmp_path / "stages", pp_size=2)
    how = load_config(tmp_path / "stages").quantization
    assert how is not None
    assert not how.quantized_layers
    assert how.exclude_modules == (*(f"transformer.layers.{layer}.attention.dense" for layer in range(2)), "lm_head")


def test_a_tied_lm_head_keeps_its_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, model = write_quantized(
        tmp_path / "a.gguf", mixed_blocks, hidden_size=96, intermediate_size=96, tie_word_embeddings=True
    )
    assert_logits_of_transformers(file, model, tmp_path / "engine")
    assert "kept 15 matrices of " in " ".join(capsys.readouterr().out.split())


def test_engines_for_gpus_have_dequantised_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def quantize(name: str, values: np.ndarray) -> tuple[np.ndarray, int | None]:
        if values.ndim < 2:
            return values, None
        return np.zeros((values.shape[0], values.shape[1] // 32 * 34), np.uint8), gguf.GGMLQuantizationType.Q8_0

    file, _ = write_quantized(tmp_path / "a.gguf", quantize, hidden_size=96, intermediate_size=96)
    build = ["build", "--model_dir", str(file), "--max_seq_len", "64", "--backend", "cuda"]
    assert cli.main([*build, "--output_dir", str(tmp_path / "engine")]) == 0
    assert "dequantised 15 matrices of Q8_0, " in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("block_type", "first", "part"), [("Q8_0", 0, "scale"), ("Q4_1", 2, "minimum")])
def test_a_scale_or_minimum_that_is_no_number_is_refused(
    block_type: str, first: int, part: str, tmp_path: Path
) -> None:
    def quantize(name: str, values: np.ndarray) -> tuple[np.ndarray, int | None]:
        blocks, number = typical_blocks(block_type, values)
        if name == "blk.0.ffn_up.weight":
            blocks[5, first : first + 2] = np.array([np.inf], np.float16).view(np.uint8)
        return blocks, number

    file, _ = write_quantized(tmp_path / "a.gguf", quantize, hidden_size=96, intermediate_size=96)
    with pytest.raises(CheckpointError, match=rf"ffn_up\.weight': has a {part} that is too large"):
        convert_checkpoint(find_model(file).directory, tmp_path / "checkpoint")


def test_no_block_of_a_file_with_four_types_is_dequantised(
    quantized: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["build", "--model_dir", str(quantized[0]), "--max_seq_len", "64", "--output_dir",
                     str(tmp_path / "engine")]) == 0  # fmt: skip
    text = " ".join(capsys.readouterr().out.split())
    assert "kept 15 matrices of " in text
    assert "dequantised" not in text


def test_a_file_is_served_by_its_path(quantized: tuple[Path, Any], cache: Path) -> None:
    file, _ = quantized
    with adaptrt.LLM(str(file), max_model_len=64) as llm:
        params = adaptrt.SamplingParams(temperature=0, max_tokens=8)
        first = llm.generate(["hello ."], params)[0].text
        chat = llm.chat([{"role": "user", "content": "hello ."}], sampling_params=params)
        assert chat.text == first  # the template adds the bos token that a prompt gets
        keys = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 8.0}
        random = np.random.default_rng(0)
        lora = {
            f"blk.0.attn_q.weight.lora_{side}": (random.standard_normal(shape).astype(np.float32), None)
            for side, shape in (("a", (2, 256)), ("b", (256, 2)))
        }
        llm.load_lora("own", str(gguf_files.write_file(file.with_name("own.gguf"), "llama", keys, lora)))
        assert [answer.adapter for answer in llm.generate(["hello ."] * 2, params, lora=["own", None])] == ["own", None]
    assert find_model(str(file)).label == "tiny-Q4_K"
    with adaptrt.LLM(file, max_model_len=64) as again:
        assert again.generate(["hello ."], params)[0].text == first
    directories = [entry for entry in (cache / "adaptrt" / "gguf").iterdir() if entry.is_dir()]
    assert len(directories) == 2  # of the model and of the adapter


def test_inspect_describes_a_file(quantized: tuple[Path, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(quantized[0]), "--tensors"]) == 0
    text = capsys.readouterr().out
    for part in (
        "GGUF model",
        "LlamaForCausalLM",
        "an engine of bfloat16 keeps or dequantises them",
        "blk.0.attn_q.weight  ",
        "token_embd.weight",
    ):
        assert part in text
    assert cli.main(["inspect", str(quantized[0]), "--json"]) == 2
    assert "--json: not for GGUF files" in capsys.readouterr().err
    assert cli.main(["cache"]) == 0
    assert "1 GGUF file" in capsys.readouterr().out


def write_llama(path: Path, extra: dict[str, Any] | None = None) -> Path:
    """Writes a tiny Llama, with metadata that is replaced or added."""
    torch.manual_seed(0)
    model = family(transformers.LlamaConfig).random_model()
    return Path(gguf_files.write_model(model, "llama", path, extra={"tokenizer.ggml.model": "none", **(extra or {})}))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"general.type": "adapter"}, "is a LoRA adapter; expected the file of its base model"),
        ({"general.type": "mmproj"}, r"is a vision projector \(mmproj\); expected the file of the language model"),
        ({"llama.unknown": 3}, "'llama.unknown' is 3: an unknown key, which may change what the model computes"),
        ({"other.key": "x"}, "'other.key' is 'x': an unknown key"),
        ({"llama.context_length": "long"}, "'llama.context_length' is 'long'; expected an integer from 1 on"),
        ({"llama.block_count": [3, 4]}, r"'llama.block_count' is .*\(layers that differ are not supported\)"),
        ({"llama.attention.value_length": 8}, "'llama.attention.value_length' is 8; expected .key_length, 12"),
        ({"llama.vocab_size": 60}, "'llama.vocab_size' is not the number of rows of token_embd.weight, 61"),
        ({"llama.rope.dimension_count": 6}, "'llama.rope.dimension_count' is 6; expected the size of a head, 12"),
        ({"llama.rope.scaling.type": "su"}, "'llama.rope.scaling.type' is 'su'; expected one of none, linear"),
        ({"llama.rope.scaling.type": "longrope"}, "is longrope, which needs rope_factors_short.weight"),
        ({"llama.attention.causal": False}, "'llama.attention.causal' is False; only True is supported"),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "epsilon' is 0.0; expected a number above 0"),
        ({"tokenizer.ggml.model": "rwkv"}, "'tokenizer.ggml.model' is 'rwkv'; expected one of gpt2, llama"),
        ({"llama.expert_count": 4}, "'llama.expert_used_count' is missing; expected an integer from 1 on"),
    ],
)
def test_unusual_metadata_is_refused_by_name(extra: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = write_llama(tmp_path / "a.gguf", extra)
    with pytest.raises(CheckpointError, match=message):
        find_model(file)


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    values = np.zeros((4, 4), np.float32)
    for architecture, message in (
        ("mamba", "general.architecture is 'mamba', which is not read"),
        ("clip", "projector"),
    ):
        file = gguf_files.write_file(tmp_path / "a.gguf", architecture, {}, {"token_embd.weight": (values, None)})
        with pytest.raises(CheckpointError, match=message):
            find_model(file)
    vocabulary = gguf_files.write_file(tmp_path / "b.gguf", "llama", {}, {})
    with pytest.raises(CheckpointError, match="expected a whole model, not a vocabulary"):
        find_model(vocabulary)


def test_unknown_tensors_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = family(transformers.LlamaConfig).random_model()
    extra = {"tokenizer.ggml.model": "none"}
    file = gguf_files.write_model(
        model, "llama", tmp_path / "a.gguf", extra=extra, added={"blk.0.ffn_sub_norm.weight": np.ones(38, np.float32)}
    )
    with pytest.raises(
        CheckpointError, match=rf"^{re.escape(str(file))}: unexpected tensors: blk\.0\.ffn_sub_norm\.weight"
    ):
        convert_checkpoint(find_model(file).directory, tmp_path / "checkpoint")


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    file = write_llama(tmp_path / "a.gguf")
    first = find_model(file)
    key = first.directory.parent.name
    with file_lock(GgufModels().lock_file(key), on_wait=lambda: None):  # an entry is used without its lock
        assert find_model(file).directory == first.directory
    write_llama(file, {"llama.context_length": 256})
    second = find_model(file)
    assert second.directory != first.directory
    assert json.loads((second.directory / "config.json").read_text())["max_position_embeddings"] == 256


def test_an_error_about_values_names_the_file_and_its_tensor(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = family(transformers.LlamaConfig).random_model()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[2, 3] = float("nan")
    extra = {"tokenizer.ggml.model": "none"}
    file = gguf_files.write_model(model, "llama", tmp_path / "a.gguf", extra=extra)
    with pytest.raises(
        CheckpointError, match=rf"^{re.escape(str(file))}: tensor 'blk\.1\.ffn_down\.weight'.*holds nan"
    ):
        convert_checkpoint(find_model(file).directory, tmp_path / "checkpoint")
