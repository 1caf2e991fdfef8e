"""Every family against transformers + PEFT in float32: the same greedy tokens, logits within a stated tolerance."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import adaptrt
from adaptrt._core import CheckpointError, DType, QuantAlgo
from adaptrt.builder.build import build
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.builder.network.onnx_graph import NetworkOptions
from adaptrt.formats.checkpoint.quantization import QuantConfig
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from support.families import FAMILIES, GEMMA4, LATENT, RECURRENT, RELATIVES, Family, save_family
from support.models import Reference, save_adapter
from support.oracle import NetworkOracle, SequenceChunk
from support.serving import Answer, collect, make_request

# Both sides sum in float32 in different orders, and exp, tanh and erf are polynomials here. Over a few layers the
# differences stay near 1e-6 of the range.
FLOAT32_TOLERANCE = 1e-4
# test_parity.py gives the reason; soft caps and multipliers amplify the same rounding errors.
SIXTEEN_BIT_TOLERANCES = {DType.BFLOAT16: 0.08, DType.FLOAT16: 0.008}
CONFIG = BuildConfig(
    max_batch_size=8,
    max_num_tokens=128,
    max_seq_len=256,
    tokens_per_block=8,
    lora_config=LoraBuildConfig(max_lora_rank=16),
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
)
ADAPTERS = {
    "lora": {"r": 5, "layers_to_transform": [0, 2]},
    "rslora": {"r": 16, "use_rslora": True, "rank_pattern": {r"(layers|h)\.1\..+": 3}},
    "dora": {"r": 4, "use_dora": True},
}
LENGTHS = [3, 17, 40, 90]


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng((seed, length)).integers(2, 61, length).tolist()


class Served:
    """A family's model, its adapters on every linear layer, and its engine."""

    def __init__(self, family: Family, directory: Path) -> None:
        self.model = save_family(family, directory / "model")
        self.adapters: dict[str, Path | None] = {"base": None}
        for seed, (name, settings) in enumerate(ADAPTERS.items()):
            fields = {"target_modules": family.targets, **settings}
            if isinstance(family.targets, str):  # PEFT accepts layers only with a list of modules
                fields.pop("layers_to_transform", None)
            if family.parameters and not settings.get("use_dora"):
                fields["target_parameters"] = list(family.parameters)
            self.adapters[name] = save_adapter(self.model, directory / name, seed, **fields)
        convert_checkpoint(self.model, directory / "checkpoint")
        build(directory / "checkpoint", CONFIG, directory / "engine")
        self.has_experts = bool(family.parameters)
        self.directory = directory
        self.engine = directory / "engine"
        self.lora = cache(self._lora)

    def _lora(self, number: int, name: str) -> adaptrt.LoraConfig | None:
        adapter = self.adapters[name]
        return None if adapter is None else adaptrt.LoraConfig.from_peft(number, adapter, self.engine)

    def answers(self, cases: list[tuple[str, list[int]]], **fields: object) -> list[Answer]:
        """Returns the answer to each (adapter, prompt), all in one batch."""
        names = list(self.adapters)
        config = adaptrt.ExecutorConfig(**fields)
        with adaptrt.Executor(self.engine, adaptrt.ModelType.DECODER_ONLY, config) as executor:
            requests = [make_request(prompt, 10, self.lora(names.index(name), name)) for name, prompt in cases]
            return [collect(executor, request_id) for request_id in executor.enqueue_requests(requests)]

    def answers_alone(self, cases: list[tuple[str, list[int]]]) -> list[Answer]:
        """Returns the answer to each (adapter, prompt), one after the other; no blocks are reused."""
        names = list(self.adapters)
        config = adaptrt.ExecutorConfig(num_threads=1, kv_cache_config=adaptrt.KvCacheConfig(enable_block_reuse=False))
        with adaptrt.Executor(self.engine, adaptrt.ModelType.DECODER_ONLY, config) as executor:
            requests = [make_request(prompt, 10, self.lora(names.index(name), name)) for name, prompt in cases]
            return [collect(executor, executor.enqueue_request(request)) for request in requests]


@pytest.fixture(scope="module", params=FAMILIES)
def served(request, tmp_path_factory) -> Served:
    return Served(FAMILIES[request.param], tmp_path_factory.mktemp(request.param))


def cases(served: Served) -> list[tuple[str, list[int]]]:
    return [
        (name, prompt_of(length, seed))
        for seed, (name, length) in enumerate(zip(served.adapters, LENGTHS, strict=True))
    ]


def test_every_kind_of_adapter_in_one_batch(served: Served) -> None:
    check_against_transformers(served)


def check_against_transformers(served: Served) -> None:
    for (name, prompt), answer in zip(cases(served), served.answers(cases(served)), strict=True):
        expected = Reference(served.model, served.adapters[name]).logits(prompt, answer.tokens).numpy()
        actual = np.concatenate([answer.context_logits, answer.generation_logits[1:]])
        scale = expected.max() - expected.min()
        assert np.abs(actual - expected).max() <= FLOAT32_TOLERANCE * scale, name
        assert answer.tokens == expected[len(prompt) - 1 :].argmax(axis=1).tolist()


def test_a_crowd_changes_no_bit(served: Served) -> None:
    chunks = {"enable_chunked_context": True, "max_num_tokens": 16, "num_threads": 3}
    together = served.answers(cases(served), **chunks)
    for case, answer, alone in zip(cases(served), together, served.answers_alone(cases(served)), strict=True):
        assert answer.same_bits(alone), case[0]


@pytest.mark.parametrize("name", [*RELATIVES, *RECURRENT, *LATENT, *GEMMA4])
def test_relatives(name: str, tmp_path: Path) -> None:
    """Other tests compare the ops; this checks only that these families use the right ones.

    test_linear_attention.py compares those of RECURRENT, test_latent_attention.py those of LATENT.
    """
    check_against_transformers(Served({**RELATIVES, **RECURRENT, **LATENT, **GEMMA4}[name], tmp_path))


@pytest.mark.parametrize(("dtype", "tolerance"), SIXTEEN_BIT_TOLERANCES.items())
def test_sixteen_bit_engines(served: Served, dtype: DType, tolerance: float, tmp_path: Path) -> None:
    convert_checkpoint(served.model, tmp_path / "checkpoint", dtype=dtype)
    build(tmp_path / "checkpoint", CONFIG, tmp_path / "engine")
    prompt = prompt_of(40, 5)
    logits = prompt_logits(tmp_path / "engine", prompt, served.adapters["dora"])
    expected = Reference(served.model, served.adapters["dora"]).logits(prompt).numpy()
    check_rows(served, logits, expected, tolerance)


# The graph multiplies the values that the integers stand for. W8A8 and W4A8 round each token's activations to 1 / 254
# of their maximum before every linear layer, and these errors add up over the layers.
QUANTISED_TOLERANCES = {
    QuantAlgo.W8A16: FLOAT32_TOLERANCE,
    QuantAlgo.W4A16: FLOAT32_TOLERANCE,
    QuantAlgo.W8A8: 0.1,
    QuantAlgo.W4A8: 0.1,
}


@pytest.mark.parametrize(("algo", "tolerance"), QUANTISED_TOLERANCES.items())
def test_quantised_weights(served: Served, algo: QuantAlgo, tolerance: float, tmp_path: Path) -> None:
    how = QuantConfig(quant_algo=algo, group_size=32 if algo in (QuantAlgo.W4A16, QuantAlgo.W4A8) else None)
    convert_checkpoint(served.model, tmp_path / "checkpoint", quantization=how)
    build(tmp_path / "checkpoint", CONFIG, tmp_path / "engine")
    prompt = prompt_of(33, 6)
    logits = prompt_logits(tmp_path / "engine", prompt)
    oracle = NetworkOracle(tmp_path / "checkpoint", tmp_path, NetworkOptions(tokens_per_block=8))
    expected = oracle.step([SequenceChunk(prompt, 0, len(prompt), [5, 3, 9, 1, 2])])
    check_rows(served, logits, expected, tolerance)
    assert np.abs(logits - expected).max() > 0


def check_rows(served: Served, logits: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    errors = np.abs(logits - expected).max(axis=1) / (expected.max() - expected.min())
    # If two experts score nearly the same for a token, rounding decides which one it takes and everything after that,
    # so some rows may differ unless the engine is float32.
    share = 0.7 if served.has_experts and tolerance > FLOAT32_TOLERANCE else 1.0
    assert np.mean(errors <= tolerance) >= share


def prompt_logits(engine: Path, prompt: list[int], adapter: Path | None = None) -> np.ndarray:
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
        lora = adaptrt.LoraConfig.from_peft(1, adapter, engine) if adapter is not None else None
        return collect(executor, executor.enqueue_request(make_request(prompt, 1, lora))).context_logits


def test_the_graph_computes_the_same(served: Served, tmp_path: Path) -> None:
    check_graph(served.model, served.directory / "checkpoint", tmp_path)


@pytest.mark.parametrize("name", ["olmo", "llama4-plain"])
def test_graphs_of_relatives(name: str, tmp_path: Path) -> None:
    """Norms without weights, and experts whose inputs are scaled."""
    model = save_family(RELATIVES[name], tmp_path / "model")
    convert_checkpoint(model, tmp_path / "checkpoint")
    check_graph(model, tmp_path / "checkpoint", tmp_path)


def check_graph(model: Path, checkpoint: Path, directory: Path) -> None:
    oracle = NetworkOracle(checkpoint, directory, NetworkOptions(tokens_per_block=8))
    prompt = prompt_of(40, 5)
    logits = [
        oracle.step([SequenceChunk(prompt[first:last], first, len(prompt), [5, 3, 9, 1, 2])])
        for first, last in ((0, 23), (23, 39), (39, 40))
    ]
    expected = Reference(model).logits(prompt).numpy()
    scale = expected.max() - expected.min()
    assert np.abs(np.concatenate(logits) - expected).max() <= FLOAT32_TOLERANCE * scale


def test_a_bare_decoder_is_the_same_model(tmp_path: Path) -> None:
    """GPT-2's own files have neither the prefix of the model around the decoder nor lm_head."""
    model = save_family(FAMILIES["gpt2"], tmp_path / "model")
    convert_checkpoint(model, tmp_path / "checkpoint")
    tensors = load_file(model / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    bare["h.0.attn.bias"] = np.ones((1, 1, 8, 8), np.float32)  # the causal mask that old files contain
    save_file(bare, model / "model.safetensors")
    convert_checkpoint(model, tmp_path / "bare")
    assert (tmp_path / "bare" / "rank0.safetensors").read_bytes() == (
        tmp_path / "checkpoint" / "rank0.safetensors"
    ).read_bytes()
    del bare["h.1.mlp.c_fc.bias"]
    save_file(bare, model / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing tensors: transformer\.h\.1\.mlp\.c_fc\.bias"):
        convert_checkpoint(model, tmp_path / "bare")


@pytest.mark.parametrize("name", ["gemma2", "phi4-mini-longrope", "gpt-neox", "glm4"])
def test_ranks_together_have_every_row_and_column(name: str, tmp_path: Path) -> None:
    """Two tensor-parallel ranks split columns of row layers, heads of q, k and v, and rows of gate and up."""
    family = FAMILIES[name]
    fields = {"num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 70}
    if name != "gpt-neox":
        fields["num_key_value_heads"] = 2
    model = save_family(dataclasses.replace(family, fields={**family.fields, **fields}), tmp_path / "model")
    whole_config = convert_checkpoint(model, tmp_path / "whole").config
    assert type(whole_config).from_dict(whole_config.to_dict(), subject="again") == whole_config
    convert_checkpoint(model, tmp_path / "cut", tp_size=2)
    whole = load_file(tmp_path / "whole" / "rank0.safetensors")
    ranks = [load_file(tmp_path / "cut" / f"rank{rank}.safetensors") for rank in range(2)]
    for name, tensor in whole.items():
        first, second = (rank[name] for rank in ranks)
        if name.endswith("attention.qkv.weight") or name.endswith("attention.qkv.bias"):
            groups = len(tensor) // (4 + 2 * fields.get("num_key_value_heads", 4))
            sizes = [4 * groups, fields.get("num_key_value_heads", 4) * groups]
            q, k, v = np.split(tensor, np.cumsum([*sizes]))
            for rank, found in enumerate((first, second)):
                np.testing.assert_array_equal(found, np.concatenate([np.split(part, 2)[rank] for part in (q, k, v)]))
        elif name.endswith((".dense.weight", ".proj.weight")):
            np.testing.assert_array_equal(np.concatenate([first, second], axis=1), tensor)
        elif name.endswith((".fc.weight", ".fc.bias", ".gate.weight", "lm_head.weight")):
            np.testing.assert_array_equal(np.concatenate([first, second])[: len(tensor)], tensor)
        else:
            np.testing.assert_array_equal(first, tensor)
            np.testing.assert_array_equal(second, tensor)


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("hidden_act", "silu", "hidden_act is silu; GPT2LMHeadModel accepts gelu_tanh or gelu"),
        (
            "position_embedding_type",
            "rope_gptj",
            "position_embedding_type is rope_gptj; GPT2LMHeadModel accepts learned_absolute",
        ),
        ("scale_attn_by_inverse_layer_idx", 1, "scale_attn_by_inverse_layer_idx is 1; expected true or false"),
    ],
)
def test_a_checkpoint_of_what_its_family_is_not_is_refused(
    field: str, value: object, complaint: str, tmp_path: Path
) -> None:
    model = save_family(FAMILIES["gpt2"], tmp_path / "model")
    convert_checkpoint(model, tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(CheckpointError, match=complaint):
        build(tmp_path / "checkpoint", CONFIG, tmp_path / "engine")
