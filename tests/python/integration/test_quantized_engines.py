"""Engines with quantised weights against transformers + PEFT with the values that those weights stand for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import adaptrt
from adaptrt._core import QuantAlgo
from adaptrt.builder import cli
from adaptrt.builder.network.onnx_graph import NetworkOptions
from adaptrt.formats.checkpoint.quantization import QuantConfig
from adaptrt.formats.engine.engine_config import EngineConfig
from adaptrt.runtime.engine import load_engine
from support.dequantized import dequantized_model
from support.models import ModelSpec, Reference, save_adapter, save_model
from support.oracle import NetworkOracle, SequenceChunk, step_inputs
from support.serving import Answer, build_engine, collect, make_request, run_command

SPEC = ModelSpec(hidden_size=72, head_dim=24, intermediate_size=70, vocab_size=97)
# Weight-only products use the same values on both sides, and sum them in float32 in different orders.
FLOAT32_TOLERANCE = 1e-4
# Every linear layer also rounds activations to bfloat16; see test_parity.py.
BFLOAT16_TOLERANCE = 0.06
# W8A8 and W4A8 round each token's activations to 1 / 254 of their maximum at every linear layer: errors of about 0.5 %
# of a layer's output, which add up over the layers.
INT8_ACTIVATIONS_TOLERANCE = 0.1

ZEROS_32 = ("--group_size", "32", "--has_zero_point")
BUILDS = {
    "w8a16": ((), QuantConfig(quant_algo=QuantAlgo.W8A16)),
    "w4a16": ((), QuantConfig(quant_algo=QuantAlgo.W4A16, group_size=128)),
    "w4a16 zeros": (ZEROS_32, QuantConfig(quant_algo=QuantAlgo.W4A16, group_size=32, has_zero_point=True)),
    "w8a8": ((), QuantConfig(quant_algo=QuantAlgo.W8A8)),
    "w4a8": ((), QuantConfig(quant_algo=QuantAlgo.W4A8, group_size=128)),
    "w4a8 zeros": (ZEROS_32, QuantConfig(quant_algo=QuantAlgo.W4A8, group_size=32, has_zero_point=True)),
}
ROUND_ACTIVATIONS = (QuantAlgo.W8A8, QuantAlgo.W4A8)


def answers_of(engine: Path, prompts: list[list[int]], adapters: list[Path | None]) -> list[Answer]:
    """Returns the answers to all prompts in one batch, each with its adapter."""
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
        requests = [
            make_request(
                prompt, 6, adaptrt.LoraConfig.from_peft(task_id, directory, engine) if directory is not None else None
            )
            for task_id, (prompt, directory) in enumerate(zip(prompts, adapters, strict=True))
        ]
        return [collect(executor, request_id) for request_id in executor.enqueue_requests(requests)]


def worst_difference(answer: Answer, reference: Reference, prompt: list[int]) -> float:
    """Returns the largest logit error, teacher-forced with the engine's tokens, relative to the reference's range."""
    expected = reference.logits(prompt, answer.tokens).numpy()
    actual = np.concatenate([answer.context_logits, answer.generation_logits[1:]])
    return float(np.abs(actual - expected).max() / (expected.max() - expected.min()))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[Path | None]]:
    """Returns a model, its float32 checkpoint, and adapters: none, LoRA, DoRA."""
    directory = tmp_path_factory.mktemp("quantized")
    model = save_model(SPEC, directory / "model")
    run_command("convert-checkpoint", "--model_dir", model, "--output_dir", directory / "checkpoint")
    lora = save_adapter(model, directory / "lora", 1, r=5)
    dora = save_adapter(model, directory / "dora", 2, r=4, use_dora=True)
    return model, directory / "checkpoint", [None, lora, dora]


@pytest.mark.parametrize("name", BUILDS)
def test_engines_serve_the_quantised_weights_with_every_kind_of_adapter(name: str, served, tmp_path: Path) -> None:
    model, _, adapters = served
    flags, config = BUILDS[name]
    settings = {"quantization": name.split()[0]}
    if flags:
        settings["group_size"] = "32"
    engine = build_quantized_engine(model, tmp_path, settings, flags)
    rng = np.random.default_rng(7)
    prompts = [rng.integers(2, SPEC.vocab_size, length).tolist() for length in (1, 23, 40)]
    answers = answers_of(engine, prompts, adapters)
    dequantized = dequantized_model(model, tmp_path / "dequantized", config)
    tolerance = INT8_ACTIVATIONS_TOLERANCE if config.quant_algo in ROUND_ACTIVATIONS else FLOAT32_TOLERANCE
    for prompt, adapter, answer in zip(prompts, adapters, answers, strict=True):
        assert worst_difference(answer, Reference(dequantized, adapter), prompt) <= tolerance
        (alone,) = answers_of(engine, [prompt], [adapter])
        assert alone.tokens == answer.tokens
        np.testing.assert_array_equal(alone.context_logits, answer.context_logits)
        np.testing.assert_array_equal(alone.generation_logits, answer.generation_logits)


@pytest.mark.parametrize(("quantization", "same_as"), [("w4a16", "w4a8"), ("w8a16", "w8a8")])
def test_int8_activations_make_what_the_quantisation_that_rounds_them_makes(
    quantization: str, same_as: str, served, tmp_path: Path
) -> None:
    _, checkpoint, _ = served
    for name, flags in ((quantization, ("--int8_activations",)), (same_as, ())):
        run_command(
            "build", "--checkpoint_dir", checkpoint, "--output_dir", tmp_path / name, "--quantization", name, *flags
        )
    assert EngineConfig.load(tmp_path / quantization).pretrained_config.quantization == (
        EngineConfig.load(tmp_path / same_as).pretrained_config.quantization
    )
    first, second = ((tmp_path / name / "rank0.engine").read_bytes() for name in (quantization, same_as))
    assert first == second


def build_quantized_engine(model: Path, directory: Path, settings: dict[str, str], flags: tuple[str, ...]) -> Path:
    """Runs build_engine with flags that take no value in addition to the settings."""
    if "--has_zero_point" not in flags:
        return build_engine(model, directory, **settings)
    run_command("convert-checkpoint", "--model_dir", model, "--output_dir", directory / "checkpoint")
    run_command(
        "build", "--checkpoint_dir", directory / "checkpoint", "--output_dir", directory / "engine",
        "--quantization", settings["quantization"], *flags, "--lora_plugin", "auto", "--dora_plugin", "enable",
        "--max_batch_size", "8", "--max_num_tokens", "128", "--max_seq_len", "128",
    )  # fmt: skip
    return directory / "engine"


def test_bfloat16_engines(served, tmp_path: Path) -> None:
    model, _, _ = served
    engine = build_engine(model, tmp_path, "bfloat16", quantization="w8a16")
    prompt = np.random.default_rng(3).integers(2, SPEC.vocab_size, 30).tolist()
    (answer,) = answers_of(engine, [prompt], [None])
    assert worst_difference(answer, Reference(model), prompt) <= BFLOAT16_TOLERANCE


CONVERSIONS = {
    "int8": ((), QuantConfig(quant_algo=QuantAlgo.W8A16)),
    "int4": ((), QuantConfig(quant_algo=QuantAlgo.W4A16)),
    "int4 groups": (("--per_group", "--group_size", "64"), QuantConfig(quant_algo=QuantAlgo.W4A16, group_size=64)),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_checkpoints_are_quantised_as_builds_are_and_their_network_says_so(name: str, tmp_path: Path) -> None:
    flags, config = CONVERSIONS[name]
    spec = ModelSpec(hidden_size=72, head_dim=24, intermediate_size=70, tie_word_embeddings=True)
    model = save_model(spec, tmp_path / "model")
    run_command(
        "convert-checkpoint", "--model_dir", model, "--output_dir", tmp_path / "quantized",
        "--use_weight_only", "--weight_only_precision", name.split()[0], *flags,
    )  # fmt: skip
    run_command("convert-checkpoint", "--model_dir", model, "--output_dir", tmp_path / "plain")
    sizes = ("--max_batch_size", "8", "--max_num_tokens", "64", "--max_seq_len", "64", "--tokens_per_block", "4")
    run_command("build", "--checkpoint_dir", tmp_path / "quantized", "--output_dir", tmp_path / "engine", *sizes)
    group = () if config.quant_algo is QuantAlgo.W8A16 else ("--group_size", config.group_size or 0)
    run_command(
        "build", "--checkpoint_dir", tmp_path / "plain", "--output_dir", tmp_path / "built",
        "--quantization", config.quant_algo.name.lower(), *group, *sizes,
    )  # fmt: skip
    assert (tmp_path / "engine" / "rank0.engine").read_bytes() == (tmp_path / "built" / "rank0.engine").read_bytes()

    engine = load_engine(tmp_path / "engine")
    assert engine.config.pretrained_config.quantization == config
    native = adaptrt._core.CpuEngine(engine.program, engine.storage, 2)
    native.allocate_kv_blocks(8)
    oracle = NetworkOracle(tmp_path / "quantized", tmp_path, NetworkOptions(tokens_per_block=4), num_blocks=8)
    chunk = SequenceChunk(np.random.default_rng(4).integers(0, 61, 11).tolist(), 0, 11, [3, 0, 6])
    expected = oracle.step([chunk])
    inputs = step_inputs([chunk])
    del inputs["adapter_slots"]
    actual = native.step(token_ids=inputs.pop("input_ids"), **inputs)
    assert np.abs(actual - expected).max() <= FLOAT32_TOLERANCE * (expected.max() - expected.min())


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--quantization", "w4a16", "--group_size", "48"], "group_size is 48; accepted: 16, 32, 64, 128"),
        (["--quantization", "w8a8", "--group_size", "64"], "group_size is given, but W8A8 has one scale per output"),
        (["--quantization", "w8a16", "--group_size", "64"], "group_size is given, but W8A16 always has one scale"),
        (["--quantization", "w8a16", "--has_zero_point"], "has_zero_point is given, but W8A16 is always symmetric"),
        (["--quantization", "w4a16", "--group_size", "-1"], "accepted: 16, 32, 64, 128; or 0 for one scale per output"),
        (["--group_size", "64"], "group_size: without quantization"),
        (["--quantization", "w8a16", "--timing_cache", "cache"], "/checkpoint: timing_cache cache needs backend"),
        (["--quantization", "w8a16", "--output_dir", "/"], "/: is neither empty nor an engine of AdaptRT"),
        (["--quantization", "w4a16"], "'transformer.layers.0.mlp.proj.weight' has 37 inputs; W4A16 packs two"),
        (["--quantization", "w8a16", "--backend", "tensorrt"], "quantization needs backend native"),
    ],
)
def test_unsupported_quantisations_are_refused(
    flags: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_model(ModelSpec(), tmp_path / "model")
    run_command("convert-checkpoint", "--model_dir", model, "--output_dir", tmp_path / "checkpoint")
    before = sorted(tmp_path.iterdir())
    command = ["build", "--checkpoint_dir", str(tmp_path / "checkpoint"), "--output_dir", str(tmp_path / "engine")]
    assert cli.main([*command, *flags]) == cli.EXIT_USER_ERROR
    assert complaint in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_a_quantised_checkpoint_is_not_quantised_again(
    served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, _, _ = served
    checkpoint = tmp_path / "checkpoint"
    run_command("convert-checkpoint", "--model_dir", model, "--output_dir", checkpoint, "--use_weight_only")
    command = ["build", "--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "engine")]
    assert cli.main([*command, "--quantization", "w8a16"]) == cli.EXIT_USER_ERROR
    assert "the weights are already W8A16" in capsys.readouterr().err


def test_a_tensor_that_is_not_quantised_as_the_config_says_is_refused(served, tmp_path: Path) -> None:
    model, _, _ = served
    checkpoint = tmp_path / "checkpoint"
    run_command("convert-checkpoint", "--model_dir", model, "--output_dir", checkpoint, "--use_weight_only")
    tensors = load_file(checkpoint / "rank0.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.float32)
    del tensors["transformer.layers.0.mlp.fc.per_channel_scale"]
    save_file(tensors, checkpoint / "rank0.safetensors")
    with pytest.raises(adaptrt.CheckpointError) as caught:
        adaptrt.builder.conversion.checkpoint.Checkpoint.open(checkpoint)
    assert "'transformer.layers.0.mlp.fc.per_channel_scale' is missing" in str(caught.value)
    assert "'lm_head.weight' is float32 [97, 72], but config.json makes it int8 [97, 72]" in str(caught.value)


def test_an_engine_that_is_quantised_otherwise_than_its_config_says_is_refused(served, tmp_path: Path) -> None:
    _, checkpoint, _ = served
    engine = tmp_path / "engine"
    run_command(
        "build", "--checkpoint_dir", checkpoint, "--output_dir", engine, "--quantization", "w8a16",
        "--max_batch_size", "2", "--max_num_tokens", "16",
    )  # fmt: skip
    config = EngineConfig.load(engine)
    other = replace(config.pretrained_config, quantization=QuantConfig(quant_algo=QuantAlgo.W8A8))
    replace(config, pretrained_config=other).save(engine)
    with pytest.raises(adaptrt.EngineError, match=r"quant_algo is W8A8 in config.json and W8A16 in the engine file"):
        load_engine(engine)
