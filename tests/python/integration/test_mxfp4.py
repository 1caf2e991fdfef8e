"""GPT-OSS in MXFP4, as published, against transformers on the same bytes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import adaptrt
from adaptrt._core import CheckpointError, ConfigError, DType, QuantAlgo, cpu_kernels
from adaptrt.builder import cli
from adaptrt.builder.build import build
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.formats.adapter import convert_adapter
from adaptrt.formats.checkpoint.quantization import QuantConfig
from adaptrt.formats.checkpoint.quantizer import dequantize_rows
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from support.families import ATTENTION, SIZES, Family, rope, save_family
from support.models import Reference, save_adapter
from support.serving import collect, make_request

EXPERTS, HIDDEN, INNER, LAYERS = 5, 64, 96, 2
FAMILY = Family(
    transformers.GptOssConfig, ATTENTION,
    {**SIZES, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "head_dim": 20,
     "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": EXPERTS, "num_experts_per_tok": 2,
     "sliding_window": 20, "rope_parameters": rope(
         "yarn", 300.0, factor=8.0, truncate=False, original_max_position_embeddings=16)},
)  # fmt: skip
CONFIG = BuildConfig(
    max_batch_size=4,
    max_num_tokens=64,
    max_seq_len=64,
    tokens_per_block=8,
    lora_config=LoraBuildConfig(max_lora_rank=8),
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
)
PARAMETERS = ["experts.gate_up_proj", "experts.down_proj", "mlp.router.weight"]
PROMPTS = [np.random.default_rng(seed).integers(2, 61, 20 + seed).tolist() for seed in range(4)]
# The same tolerance as in test_parity.py, because the values are the same.
FLOAT32_TOLERANCE = 1e-4
NAMES = {"gate_proj": ("gate_up_proj", 0, 2), "up_proj": ("gate_up_proj", 1, 2), "down_proj": ("down_proj", 0, 1)}
OURS = {"gate_proj": "fc", "up_proj": "gate", "down_proj": "proj"}


def packed(stack: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Returns blocks and scales for [experts, in, out]; the values are random, and the scales fit the stack's range."""
    blocks = stack.transpose(0, 2, 1).reshape(len(stack), stack.shape[2], -1, 32)
    exponents = np.floor(np.log2(np.abs(blocks).max(axis=3) / 6 + 1e-9)) + 1
    numbers = rng.integers(0, 16, blocks.shape, np.uint8)
    return numbers[..., 0::2] | numbers[..., 1::2] << 4, (exponents + 127).astype(np.uint8)


def publish(model: Path, place: Path, change: Callable[[dict[str, np.ndarray]], None] | None = None) -> Path:
    """Writes `place`/published with experts in MXFP4 and the rest in bfloat16, and transformers' values to
    `place`/values."""
    rng = np.random.default_rng(5)
    published: dict[str, np.ndarray] = {}
    values: dict[str, np.ndarray] = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        if tensor.ndim == 3:
            published[f"{name}_blocks"], published[f"{name}_scales"] = packed(tensor, rng)
        else:
            published[name] = values[name] = tensor.astype(ml_dtypes.bfloat16)
    if change is not None:
        change(published)
    for name in [name for name in published if name.endswith("_blocks")]:
        source = name.removesuffix("_blocks")
        pair = (torch.from_numpy(published[f"{source}{kind}"]) for kind in ("_blocks", "_scales"))
        made = convert_moe_packed_tensors(*pair, dtype=torch.bfloat16)
        values[source] = made.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    config = json.loads((model / "config.json").read_text())
    write(place / "values", {**config, "dtype": "bfloat16"}, values)
    del config["dtype"]  # OpenAI's config has no dtype
    config["quantization_config"] = {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        "quant_method": "mxfp4",
    }
    return write(place / "published", config, published)


def write(directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(contiguous, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_family(FAMILY, tmp_path_factory.mktemp("mxfp4") / "model")


@pytest.fixture(scope="module")
def published(model: Path, tmp_path_factory) -> Path:
    return publish(model, tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="module")
def adapters(published: Path, tmp_path_factory) -> list[Path | None]:
    place, values = tmp_path_factory.mktemp("adapters"), published.parent / "values"
    lora = save_adapter(values, place / "lora", 1, r=4, target_modules=ATTENTION, target_parameters=PARAMETERS)
    dora = save_adapter(values, place / "dora", 2, r=3, target_modules=ATTENTION, use_dora=True)
    return [None, lora, dora, None]


def expected_weights(published: Path, layer: int, expert: int) -> dict[str, np.ndarray]:
    """Returns the [out, in] weights of each linear layer of an expert."""
    values = load_file(published.parent / "values" / "model.safetensors")
    return {
        name: values[f"model.layers.{layer}.mlp.experts.{source}"][expert].T[first::step]
        for name, (source, first, step) in NAMES.items()
    }


@pytest.mark.parametrize("dtype", [None, DType.FLOAT32])
def test_the_checkpoint_keeps_the_published_numbers(dtype: DType | None, published: Path, tmp_path: Path) -> None:
    converted = convert_checkpoint(published, tmp_path / "checkpoint", dtype=dtype)
    assert converted.config.dtype is (dtype or DType.BFLOAT16)
    assert converted.dequantization is None
    assert converted.kept is not None
    assert len(converted.kept.matrices) == 3 * EXPERTS * LAYERS
    stored = load_file(published / "model.safetensors")
    in_bytes = sum(tensor.nbytes for name, tensor in stored.items() if name.endswith(("_blocks", "_scales")))
    assert converted.kept.published_bytes == in_bytes
    opened = Checkpoint.open(tmp_path / "checkpoint")
    how = opened.config.quantization
    assert how is not None
    assert how.describe().startswith("W4A16 of E2M1 in groups of 32, but for ")
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for name, wanted in expected_weights(published, layer, expert).items():
                tensor = f"transformer.layers.{layer}.mlp.experts.{expert}.{OURS[name]}.weight"
                pieces = opened.ranks[0].quantized_rows(tensor, range(len(wanted)), 7)
                found = np.concatenate([dequantize_rows(piece, how) for piece in pieces])
                # The signs of zeros are equal too.
                assert found.astype(np.float32).tobytes() == wanted.astype(np.float32).tobytes()


def test_dequantised_ones_are_what_transformers_makes(published: Path) -> None:
    checkpoint = Checkpoint.of_model(published, keeps_published=False)
    assert checkpoint.dequantization is not None
    assert "MXFP4" in checkpoint.dequantization.describe()
    for expert in range(EXPERTS):
        for name, wanted in expected_weights(published, 1, expert).items():
            tensor = f"transformer.layers.1.mlp.experts.{expert}.{OURS[name]}.weight"
            found = np.concatenate(list(checkpoint.ranks[0].rows(tensor, range(len(wanted)))))
            assert found.dtype == ml_dtypes.bfloat16
            assert found.tobytes() == wanted.tobytes()


def answers(engine: Path, adapters: list[Path | None], **config: Any):
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig(**config)) as executor:
        requests = []
        for task_id, (adapter, prompt) in enumerate(zip(adapters, PROMPTS, strict=True)):
            lora = None if adapter is None else adaptrt.LoraConfig.from_peft(task_id, adapter, engine)
            requests.append(make_request(prompt, 6, lora))
        return [collect(executor, request_id) for request_id in executor.enqueue_requests(requests)]


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT32])
def test_kept_ones_give_the_bits_of_the_values_stored(
    dtype: DType, published: Path, adapters: list[Path | None], tmp_path: Path
) -> None:
    """Compares every kernel table, with LoRA and DoRA adapters on experts."""
    values = published.parent / "values"
    reports = [
        build(Checkpoint.of_model(source, dtype), CONFIG, tmp_path / source.name) for source in (published, values)
    ]
    assert reports[0].engine_bytes < reports[1].engine_bytes
    for kernels in cpu_kernels():
        kept, plain = (answers(tmp_path / source.name, adapters, kernels=kernels) for source in (published, values))
        for found, expected in zip(kept, plain, strict=True):
            assert found.same_bits(expected), kernels


def test_experts_that_are_read_when_they_are_taken(
    published: Path, adapters: list[Path | None], tmp_path: Path
) -> None:
    """Experts' 4-bit weights are read from the engine file when they are needed; their biases stay in memory."""
    engine = tmp_path / "engine"
    build(Checkpoint.of_model(published), CONFIG, engine)
    with pytest.raises(ConfigError, match="weight_memory is 1; accepted: ") as error:
        answers(engine, adapters, weight_memory=1)
    least = int(str(error.value).split("accepted: ")[1].split()[0])
    assert least < (engine / "rank0.engine").stat().st_size
    for found, expected in zip(answers(engine, adapters, weight_memory=least), answers(engine, adapters), strict=True):
        assert found.same_bits(expected)


def test_float32_engines_against_transformers(published: Path, adapters: list[Path | None], tmp_path: Path) -> None:
    build(Checkpoint.of_model(published, DType.FLOAT32), CONFIG, tmp_path / "engine")
    made = answers(tmp_path / "engine", adapters)
    for adapter, prompt, answer in zip(adapters, PROMPTS, made, strict=True):
        expected = Reference(published.parent / "values", adapter).logits(prompt, answer.tokens).numpy()
        actual = np.concatenate([answer.context_logits, answer.generation_logits[1:]])
        assert np.abs(actual - expected).max() <= FLOAT32_TOLERANCE * (expected.max() - expected.min())


def test_transformers_reads_the_same_model(published: Path) -> None:
    """transformers loads the published directory itself and dequantises it."""
    how = transformers.Mxfp4Config(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        published, dtype=torch.bfloat16, quantization_config=how
    ).state_dict()
    values = load_file(published.parent / "values" / "model.safetensors")
    for name, wanted in values.items():
        found = theirs[name].contiguous().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        assert np.array_equal(found, wanted), name


def test_magnitudes_are_normalised_by_the_same_weights(published: Path, adapters: list[Path | None]) -> None:
    found, expected = (
        convert_adapter(adapters[2], storage_dtype="float32", base=base)
        for base in (published, published.parent / "values")
    )
    assert np.array_equal(found.weights, expected.weights)


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"tp_size": 2, "moe_ep_size": 2}])
def test_a_cut_over_ranks(sizes: dict[str, int], model: Path, tmp_path: Path) -> None:
    """Each of two ranks gets 48 of 96 inputs, which are not whole groups, so experts that are split are dequantised."""
    published = publish(model, tmp_path)
    values = tmp_path / "values"
    for directory in (published, values):
        config = json.loads((directory / "config.json").read_text())
        if "moe_ep_size" in sizes:  # an even number of experts
            config["num_local_experts"] = EXPERTS - 1
            tensors = {
                name: tensor[: EXPERTS - 1] if "experts" in name or "router" in name else tensor
                for name, tensor in load_file(directory / "model.safetensors").items()
            }
            save_file(
                {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()},
                directory / "model.safetensors",
            )
        (directory / "config.json").write_text(json.dumps(config))
    converted = convert_checkpoint(published, tmp_path / "cut", **sizes)
    convert_checkpoint(values, tmp_path / "expected", **sizes)
    how = converted.config.quantization
    assert (how is None) == ("moe_ep_size" not in sizes)
    opened = Checkpoint.open(tmp_path / "cut")
    for rank in range(2):
        for name, wanted in load_file(tmp_path / "expected" / f"rank{rank}.safetensors").items():
            is_kept = how is not None and ".experts." in name and name.endswith(".weight")
            if is_kept:
                pieces = [
                    dequantize_rows(piece, how) for piece in opened.ranks[rank].quantized_rows(name, range(len(wanted)))
                ]
            else:
                pieces = list(opened.ranks[rank].rows(name, range(len(wanted))))
            assert np.array_equal(np.concatenate(pieces).astype(np.float32), wanted.astype(np.float32)), name


def test_a_build_that_is_asked_to_rounds_the_values(published: Path, tmp_path: Path) -> None:
    how = QuantConfig(quant_algo=QuantAlgo.W8A16)
    for source in (published, published.parent / "values"):
        build(Checkpoint.of_model(source, DType.FLOAT32), CONFIG, tmp_path / source.name, quantization=how)
    found, expected = ((tmp_path / name / "rank0.engine").read_bytes() for name in ("published", "values"))
    assert found == expected


def of_first(kind: str) -> str:
    return f"model.layers.0.mlp.experts.gate_up_proj{kind}"


def with_scale(stored: int) -> Callable[[dict[str, np.ndarray]], None]:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[of_first("_scales")][3, 4, 1] = stored

    return change


def test_powers_of_two_at_the_edges(model: Path, tmp_path: Path) -> None:
    """2^-127 is subnormal in bfloat16 but still exact; 6 * 2^126 exceeds bfloat16's range."""
    published = publish(model, tmp_path / "small", with_scale(0))
    assert Checkpoint.of_model(published).dequantization is None
    convert_checkpoint(published, tmp_path / "checkpoint")
    opened = Checkpoint.open(tmp_path / "checkpoint")
    wanted = expected_weights(published, 0, 3)["gate_proj"]
    pieces = opened.ranks[0].quantized_rows("transformer.layers.0.mlp.experts.3.fc.weight", range(INNER))
    found = np.concatenate([dequantize_rows(piece, opened.config.quantization) for piece in pieces])
    assert np.array_equal(found.astype(np.float32), wanted.astype(np.float32))
    assert (np.abs(wanted[2, 32:].astype(np.float32)) < 2.0**-120).all()
    large = publish(model, tmp_path / "large", with_scale(253))
    with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj_blocks': holds inf; weights must be finite"):
        convert_checkpoint(large, tmp_path / "large-checkpoint")


def test_numbers_that_are_not_normal_have_the_same_bits_kept_and_stored(model: Path, tmp_path: Path) -> None:
    """Subnormals give the same bits with every kernel table, however its instructions treat them."""

    def without_outputs(tensors: dict[str, np.ndarray]) -> None:
        tensors[of_first("_scales")][:, ::3] = 0
        tensors[of_first("_scales")][:, 1::3] = 2

    published = publish(model, tmp_path, without_outputs)
    for source in (published, tmp_path / "values"):
        build(Checkpoint.of_model(source), CONFIG, tmp_path / f"{source.name}-engine")
    for kernels in cpu_kernels():
        kept, plain = (
            answers(tmp_path / f"{name}-engine", [None] * 4, kernels=kernels) for name in ("published", "values")
        )
        for found, expected in zip(kept, plain, strict=True):
            assert found.same_bits(expected), kernels


def missing_scales(tensors: dict[str, np.ndarray]) -> None:
    del tensors[of_first("_scales")]


def float_scales(tensors: dict[str, np.ndarray]) -> None:
    tensors[of_first("_scales")] = tensors[of_first("_scales")].astype(np.float32)


def flat_blocks(tensors: dict[str, np.ndarray]) -> None:
    tensors[of_first("_blocks")] = tensors[of_first("_blocks")].reshape(EXPERTS, 2 * INNER, -1)


def of_another_layer(tensors: dict[str, np.ndarray]) -> None:
    tensors["model.layers.0.self_attn.q_proj_blocks"] = np.zeros((1, 2, 2, 16), np.uint8)


def fewer_scales(tensors: dict[str, np.ndarray]) -> None:
    tensors[of_first("_scales")] = np.ascontiguousarray(tensors[of_first("_scales")][:, :, :1])


def both(tensors: dict[str, np.ndarray]) -> None:
    tensors[of_first("")] = np.zeros((EXPERTS, HIDDEN, 2 * INNER), np.float32)


def none_at_all(tensors: dict[str, np.ndarray]) -> None:
    for name in [name for name in tensors if name.endswith("_blocks")]:
        del tensors[name]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            with_scale(255),
            "gate_up_proj_scales': expert 3 has a scale of 255, which is not a number; accepted: 0 to 254, for 2^-127 "
            "to 2^127",
        ),
        (missing_scales, "tensor 'model.layers.0.mlp.experts.gate_up_proj_scales' is missing"),
        (float_scales, "gate_up_proj_scales': is of float32; accepted: uint8"),
        (fewer_scales, f"gate_up_proj_scales': is [{EXPERTS}, {2 * INNER}, 1]; expected [{EXPERTS}, {2 * INNER}, 2]"),
        (flat_blocks, "expected [experts, out, in / 32, 16], out a multiple of 2"),
        (of_another_layer, "q_proj_blocks': is not a layer of experts; accepted: gate_up_proj, down_proj"),
        (both, "is there next to"),
        (none_at_all, "quantization_config says MXFP4, but no tensor is named *_blocks"),
    ],
)
def test_damage_is_named(
    change: Callable[[dict[str, np.ndarray]], None], complaint: str, published: Path, tmp_path: Path
) -> None:
    tensors = load_file(published / "model.safetensors")
    change(tensors)
    damaged = write(tmp_path / "damaged", json.loads((published / "config.json").read_text()), tensors)
    with pytest.raises(CheckpointError, match=re.escape(complaint)):
        convert_checkpoint(damaged, tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()


def test_float16_is_refused(published: Path) -> None:
    complaint = "dtype float16 would round the weights of MXFP4.*accepted: --dtype float32 or bfloat16"
    with pytest.raises(CheckpointError, match=complaint):
        Checkpoint.of_model(published, DType.FLOAT16)


SIZES_OF_ENGINE = ("--max_batch_size", "2", "--max_num_tokens", "64", "--max_seq_len", "32")


def test_the_commands_say_what_became_of_them(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    where = ["--model_dir", str(published), "--output_dir"]
    said = r"30 matrices of MXFP4, \d+\.\d KiB, as W4A16 of E2M1 in groups of 32, \d+\.\d KiB"
    assert cli.main(["convert-checkpoint", *where, str(tmp_path / "checkpoint")]) == 0
    printed = capsys.readouterr().out
    assert re.search(f"kept: {said}", printed), printed
    assert cli.main(["build", *where, str(tmp_path / "engine"), *SIZES_OF_ENGINE]) == 0
    printed = capsys.readouterr().out
    assert re.search(f"kept +{said}", printed), printed
    assert cli.main(["inspect", str(tmp_path / "engine")]) == 0
    printed = capsys.readouterr().out
    assert "E2M1" in printed, printed


def test_without_torch(published: Path, tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from adaptrt.builder.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = ["build", "--model_dir", published, "--output_dir", tmp_path / "engine", *SIZES_OF_ENGINE]
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, command)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    with adaptrt.Executor(tmp_path / "engine", adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
        assert len(collect(executor, executor.enqueue_request(make_request(PROMPTS[0], 4))).tokens) == 4
