"""Graphs of networks with states, latent attention, gates and shared keys, against transformers in float32."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from adaptrt._core import ConfigError, DType
from adaptrt.builder.build import build
from adaptrt.builder.compile.emit import emit
from adaptrt.builder.compile.tensorrt.refusal import problems_of_network
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.builder.network.onnx_file import dump_onnx
from adaptrt.builder.network.onnx_graph import NetworkOptions
from adaptrt.formats.engine.build_config import TENSORRT, BuildConfig, TensorRtBuildConfig
from support.engines import make_graph
from support.families import GEMMA4, LATENT, RECURRENT, RELATIVES, Family, save_family
from support.models import Reference
from support.oracle import NetworkOracle, SequenceChunk

TOLERANCE = 1e-5
OPTIONS = NetworkOptions(tokens_per_block=4)
FAMILIES: dict[str, Family] = {
    name: {**RELATIVES, **RECURRENT, **LATENT, **GEMMA4}[name]
    for name in (
        "qwen3.5",
        "olmo-hybrid",
        "lfm2",
        "mamba2",
        "granite4-mamba",
        "falcon-h1",
        "deepseek-v2",
        "gemma4-shared",
        "gemma4-moe",
        "apertus",
    )
}


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng((seed, length)).integers(2, 61, length).tolist()


def check(actual: list[np.ndarray], expected: np.ndarray) -> None:
    logits = np.concatenate(actual)
    assert logits.shape == expected.shape
    assert np.abs(logits - expected).max() <= TOLERANCE * (expected.max() - expected.min())


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    convert_checkpoint(save_family(FAMILIES[request.param], directory / "model"), directory / "checkpoint")
    return directory


def test_two_sequences_in_steps(model: Path, tmp_path: Path) -> None:
    """Prefill in chunks and decode, then slots and blocks that other sequences have used, for one token."""
    oracle = NetworkOracle(model / "checkpoint", tmp_path, OPTIONS)
    prompts = [prompt_of(14, 1), prompt_of(13, 2)]
    blocks, slots = [[5, 3, 9, 1], [8, 0, 2, 4]], [30, 6]
    answers: list[list[np.ndarray]] = [[], []]
    # (sequence, first token, end): the second starts later, stands before the first, and both end in decode steps.
    for step in ([(0, 0, 7)], [(1, 0, 11), (0, 7, 12)], [(0, 12, 13), (1, 11, 12)], [(1, 12, 13), (0, 13, 14)]):
        chunks = [
            SequenceChunk(prompts[of][first:end], first, 14, blocks[of], state_slot=slots[of])
            for of, first, end in step
        ]
        ends = np.cumsum([end - first for _, first, end in step])[:-1]
        for (of, _, _), logits in zip(step, np.split(oracle.step(chunks), ends), strict=True):
            answers[of].append(logits)
    reference = Reference(model / "model")
    for prompt, answer in zip(prompts, answers, strict=True):
        check(answer, reference.logits(prompt).numpy())
    single = prompt_of(1, 3)
    found = oracle.step([SequenceChunk(single, 0, 1, blocks[0], state_slot=slots[1])])
    check([found], reference.logits(single).numpy())


def test_tensorrt_has_no_plans_for_them(model: Path) -> None:
    network = Checkpoint.open(model / "checkpoint").network
    (problem,) = problems_of_network(network)
    assert problem.startswith(f"{network.config.architecture} has ")
    assert problem.endswith(", which need backend native")


def test_a_build_names_what_tensorrt_does_not_have(tmp_path: Path) -> None:
    convert_checkpoint(save_family(RELATIVES["apertus"], tmp_path / "model"), tmp_path / "checkpoint")
    config = BuildConfig(max_seq_len=64, backend=TENSORRT, tensorrt_config=TensorRtBuildConfig())
    with pytest.raises(ConfigError, match="ApertusForCausalLM has Xielu, which need backend native"):
        build(tmp_path / "checkpoint", config, tmp_path / "engine")


def test_sixteen_bit_graphs_pass_the_checker(model: Path, tmp_path: Path) -> None:
    """dump_onnx runs the checker, which compares the types of all nodes' inputs."""
    convert_checkpoint(model / "model", tmp_path / "checkpoint", dtype=DType.BFLOAT16)
    graph = make_graph(Checkpoint.open(tmp_path / "checkpoint"), OPTIONS)
    dump_onnx(graph, tmp_path / "checkpoint", tmp_path / "graph.onnx", lambda num_bytes: None)


def test_residual_streams_stay_float32(tmp_path: Path) -> None:
    save_family(RECURRENT["falcon-h1"], tmp_path / "model")
    convert_checkpoint(tmp_path / "model", tmp_path / "checkpoint", dtype=DType.BFLOAT16)
    checkpoint = Checkpoint.open(tmp_path / "checkpoint")
    network = checkpoint.network

    def made() -> tuple[bytes, object]:
        return make_graph(checkpoint, OPTIONS).SerializeToString(), emit(network, lora=False).body

    graph, program = made()
    at, op = next((at, op) for at, op in enumerate(network.ops) if getattr(op, "is_stream", False))
    network.ops[at] = dataclasses.replace(op, is_stream=False)
    rounded_graph, rounded_program = made()
    assert rounded_graph != graph
    assert rounded_program != program


def test_factors_of_sums_reach_the_graph(tmp_path: Path) -> None:
    """Gemma 4 normalises what follows from one of them, so logits hardly show it."""
    convert_checkpoint(save_family(GEMMA4["gemma4-shared"], tmp_path / "model"), tmp_path / "checkpoint")
    checkpoint = Checkpoint.open(tmp_path / "checkpoint")
    graph, network = make_graph(checkpoint, OPTIONS), checkpoint.network
    scaled = [(at, op) for at, op in enumerate(network.ops) if isinstance(getattr(op, "sum_scale", None), float)]
    assert scaled
    for at, op in scaled:
        network.ops[at] = dataclasses.replace(op, sum_scale=None)
    assert make_graph(checkpoint, OPTIONS) != graph


def test_the_bound_of_xielu(tmp_path: Path) -> None:
    """Models have -1e-6, which hardly changes a logit."""
    model = save_family(RELATIVES["apertus"], tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    bounds = [name for name in tensors if name.endswith("act_fn.eps")]
    assert bounds
    for name in bounds:
        tensors[name] = np.full_like(tensors[name], -0.5)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    convert_checkpoint(model, tmp_path / "checkpoint")
    oracle = NetworkOracle(tmp_path / "checkpoint", tmp_path, OPTIONS)
    prompt = prompt_of(9, 4)
    expected = Reference(model).logits(prompt).numpy()
    check([oracle.step([SequenceChunk(prompt, 0, 9, [5, 3, 9])])], expected)


def test_states_are_inputs_and_outputs(tmp_path: Path) -> None:
    convert_checkpoint(save_family(RECURRENT["qwen3.5"], tmp_path / "model"), tmp_path / "checkpoint")
    graph = make_graph(Checkpoint.open(tmp_path / "checkpoint"), OPTIONS).graph
    inputs, outputs = ({value.name for value in ends} for ends in (graph.input, graph.output))
    states = {f"{kind}_state.{layer}" for kind in ("convolution", "recurrent") for layer in (0, 2)}
    assert {name for name in inputs if "state" in name} == {"state_slots", *states}
    assert outputs == {"logits", "kv_pool_out.1", *(name.replace(".", "_out.") for name in states)}


@pytest.mark.parametrize(
    ("family", "complaint"),
    [
        (RECURRENT["qwen3.5"], "adapters of linear_attn_qkv, linear_attn_z"),
        (LATENT["deepseek-v2"], "adapters of attn_kv_a"),
    ],
)
def test_adapters_of_newer_modules_are_refused(family: Family, complaint: str, tmp_path: Path) -> None:
    convert_checkpoint(save_family(family, tmp_path / "model"), tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match=f"{complaint} cannot be written as ONNX; build with --lora_plugin disable"):
        make_graph(Checkpoint.open(tmp_path / "checkpoint"), NetworkOptions(max_lora_rank=8))
