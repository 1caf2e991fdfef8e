"""Engines that store bfloat16 weights in twelve bits give the same bits as engines with the plain weights."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import adaptrt
from adaptrt._core import EngineError
from adaptrt.builder import cli
from adaptrt.formats.engine.engine_config import EngineConfig
from adaptrt.formats.engine.plan import LinearOp
from adaptrt.runtime.engine import load_engine
from support.models import ModelSpec, save_adapter, save_model
from support.serving import Answer, collect, make_request, run_command

# The last panels of gate, up and lm_head have fewer than 64 outputs, and stay uncompressed.
SPEC = ModelSpec(
    hidden_size=128, head_dim=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=200, vocab_size=250
)
SIZES = ("--max_batch_size", "4", "--max_num_tokens", "128", "--max_seq_len", "160", "--tokens_per_block", "16")
LORA = ("--lora_plugin", "auto", "--dora_plugin", "enable")
ADAPTERS = ({"r": 8}, {"r": 20, "use_dora": True})
RARE = 0.05
"""Share of one matrix's weights that have rare upper bytes: too many to store as exceptions."""


def convert(model: Path, directory: Path, dtype: str = "bfloat16", *flags: str) -> Path:
    run_command("convert-checkpoint", "--model_dir", model, "--output_dir", directory, "--dtype", dtype, *flags)
    return directory


def build(checkpoint: Path, directory: Path, *flags: str) -> Path:
    run_command("build", "--checkpoint_dir", checkpoint, "--output_dir", directory, *SIZES, *flags)
    return directory


def model_with_rare_weights(directory: Path) -> Path:
    """Saves a model with zeros, tiny and huge weights in one matrix, and too many of them to compress in another
    one."""
    model = save_model(SPEC, directory)
    weights = load_file(model / "model.safetensors")
    few = weights["model.layers.0.mlp.down_proj.weight"]
    few[3, 5], few[3, 6], few[70, 191], few[127, 0] = 0.0, -0.0, 1e-30, -40.0
    many = weights["model.layers.1.self_attn.o_proj.weight"]
    generator = np.random.default_rng(5)
    rare = generator.random(many.shape) < RARE
    many[rare] = 2.0 ** generator.integers(-100, -20, int(rare.sum()))
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    return model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_with_rare_weights(tmp_path_factory.mktemp("compressed") / "model")


@pytest.fixture(scope="module")
def checkpoint(model: Path) -> Path:
    return convert(model, model.parent / "checkpoint")


@pytest.fixture(scope="module")
def engines(checkpoint: Path) -> tuple[Path, Path]:
    """Returns an engine with plain weights and one with compressed weights."""
    plain = build(checkpoint, checkpoint.parent / "plain", *LORA)
    return plain, build(checkpoint, checkpoint.parent / "compressed", *LORA, "--compress_weights")


def answers_of(engine: Path, adapters: list[Path], crowd: int) -> list[Answer]:
    """Answers `crowd` prompts of 1 to 120 tokens at a time, in turn without and with each adapter."""
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
        configs = [None, *(adaptrt.LoraConfig.from_peft(i, adapters[i], engine) for i in range(len(adapters)))]
        lengths = (1, 7, 30, 120)
        prompts = [np.random.default_rng(length).integers(2, SPEC.vocab_size, length).tolist() for length in lengths]
        requests = [make_request(prompt, 12, configs[i % len(configs)]) for i, prompt in enumerate(prompts)]
        answers = []
        for first in range(0, len(requests), crowd):
            ids = executor.enqueue_requests(requests[first : first + crowd])
            answers += [collect(executor, request_id) for request_id in ids]
        return answers


@pytest.mark.parametrize("crowd", [1, 4])
def test_answers_have_the_bits_of_the_weights_as_they_are(
    crowd: int, engines: tuple[Path, Path], model: Path, tmp_path: Path
) -> None:
    adapters = [save_adapter(model, tmp_path / str(seed), seed, **lora) for seed, lora in enumerate(ADAPTERS)]
    expected, actual = (answers_of(engine, adapters, crowd) for engine in engines)
    assert len(expected) == 4
    for theirs, ours in zip(expected, actual, strict=True):
        assert ours.same_bits(theirs)


def test_compressible_matrices_are_stored_in_twelve_bits(engines: tuple[Path, Path]) -> None:
    plain, compressed = (load_engine(engine) for engine in engines)
    assert EngineConfig.load(engines[1]).build_config.compress_weights
    matrices = {}
    for engine in (plain, compressed):
        program = engine.storage.program
        parts = [part.weight for op in (*program.body, *program.head) if isinstance(op, LinearOp) for part in op.parts]
        matrices[engine.directory] = {matrix.tensor: matrix for matrix in parts}
    assert all(matrix.outliers is None for matrix in matrices[plain.directory].values())
    kept = {name for name, matrix in matrices[compressed.directory].items() if matrix.outliers is None}
    assert kept == {"transformer.layers.1.attention.dense.weight"}
    assert matrices[compressed.directory]["transformer.layers.0.mlp.proj.weight"].outliers >= 2
    stored = {
        engine.directory: sum(
            engine.storage.tensors[name].nbytes for name in matrices[engine.directory] if name not in kept
        )
        for engine in (plain, compressed)
    }
    assert 0.75 * stored[plain.directory] < stored[compressed.directory] < 0.77 * stored[plain.directory]


def test_dora_magnitudes_are_normalised_by_the_same_weights(engines: tuple[Path, Path], model: Path) -> None:
    plain, compressed = (load_engine(engine).base_weights() for engine in engines)
    assert plain._pieces
    for key, (piece,) in plain._pieces.items():
        (other,) = compressed._pieces[key]
        left, right = piece.part.weight, other.part.weight
        np.testing.assert_array_equal(left.rows(0, left.n), right.rows(0, right.n))


def test_a_matrix_that_is_the_embedding_too_stays_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = ModelSpec(
        hidden_size=64, head_dim=16, num_attention_heads=4, num_key_value_heads=4, intermediate_size=64, vocab_size=128,
        tie_word_embeddings=True,
    )  # fmt: skip
    checkpoint = convert(save_model(spec, tmp_path / "model"), tmp_path / "checkpoint")
    answers = []
    for name, flags in {"plain": (), "compressed": ("--compress_weights",)}.items():
        engine = build(checkpoint, tmp_path / name, *flags)
        with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
            answers.append(collect(executor, executor.enqueue_request(make_request([3, 4, 5], 8))))
    assert answers[0].same_bits(answers[1])
    (summary,) = re.findall(r"compression +(.*?) *\n", capsys.readouterr().out)
    assert summary == "14 of 15 matrices, losslessly in 12 bits per weight"


def refusal(checkpoint: Path, directory: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Runs a build with compression that fails, and returns its message on stderr as one line."""
    arguments = ("--checkpoint_dir", checkpoint, "--output_dir", directory, "--compress_weights", *flags)
    capsys.readouterr()
    assert cli.main(["build", *map(str, arguments)]) == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("dtype", "flags", "reason"),
    [
        ("float16", (), "compress_weights needs bfloat16 weights, .* the checkpoint's are float16"),
        ("bfloat16", ("--quantization", "w8a16"), "compress_weights and quantization: .* choose one"),
        ("bfloat16", ("--backend", "tensorrt", "--compute_capability", "8.0"), "compress_weights needs backend native"),
    ],
)
def test_other_weights_are_refused(
    dtype: str,
    flags: tuple[str, ...],
    reason: str,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoint = convert(model, tmp_path / "checkpoint", dtype)
    assert re.search(reason, refusal(checkpoint, tmp_path / "engine", capsys, *flags))
    assert not (tmp_path / "engine").exists()


def test_quantised_checkpoints_are_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = convert(model, tmp_path / "checkpoint", "bfloat16", "--use_weight_only")
    assert "does not work with the checkpoint's W8A16 weights" in refusal(checkpoint, tmp_path / "engine", capsys)


def test_damaged_engines_are_refused(engines: tuple[Path, Path], tmp_path: Path) -> None:
    """The file's checksum covers every byte of the weights."""
    copy = tmp_path / "engine"
    copy.mkdir()
    for file in engines[1].iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    content = bytearray((copy / "rank0.engine").read_bytes())
    content[-100] ^= 1
    (copy / "rank0.engine").write_bytes(content)
    with pytest.raises(EngineError, match=re.escape(str(copy))):
        load_engine(copy)
