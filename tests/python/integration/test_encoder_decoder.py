"""T5 and BART engines against transformers + PEFT in float32, alone and in batches with other requests."""

from __future__ import annotations

import dataclasses
import string
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models

import adaptrt
from adaptrt._core import CheckpointError, ConfigError, DType, QuantAlgo, RequestError
from adaptrt.builder.build import build
from adaptrt.builder.cli import main as command_line
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.formats.checkpoint.quantization import QuantConfig
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from support.encoder_decoders import (
    MODELS,
    VOCAB_SIZE,
    Seq2SeqReference,
    save_adapter_of,
    save_encoder_decoder,
    tokens_of,
)

# The same tolerance as in test_families.py: both sides sum in float32, in different orders.
TOLERANCE = 1e-4
CONFIG = BuildConfig(
    max_batch_size=8,
    max_num_tokens=64,
    max_seq_len=64,
    max_encoder_input_len=48,
    max_beam_width=3,
    tokens_per_block=8,
    lora_config=LoraBuildConfig(max_lora_rank=16),
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
)
ADAPTERS = {"lora": {"r": 5}, "rslora": {"r": 16, "use_rslora": True}, "dora": {"r": 4, "use_dora": True}}
MAX_TOKENS = 10


@dataclasses.dataclass(frozen=True)
class Case:
    """A request: an adapter's name, the encoder's tokens, and the tokens that the decoder starts with."""

    adapter: str
    encoder: list[int]
    start: list[int]


CASES = [
    Case(name, tokens_of(length, 3), tokens_of(start, 4))
    for name, length, start in (
        ("base", 33, 1),
        ("lora", 1, 3),
        ("dora", 48, 1),
        ("rslora", 17, 12),
        ("base", 8, 1),
        ("dora", 20, 5),
    )
]


class Served:
    """A model, its adapters on every linear layer, and its engine."""

    def __init__(self, name: str, directory: Path) -> None:
        self.kind = MODELS[name]
        self.directory = directory
        self.model = save_encoder_decoder(self.kind, directory / "model")
        self.adapters: dict[str, Path | None] = {"base": None}
        for seed, (adapter, fields) in enumerate(ADAPTERS.items()):
            self.adapters[adapter] = save_adapter_of(self.kind, self.model, directory / adapter, seed, **fields)
        convert_checkpoint(self.model, directory / "checkpoint")
        self.engine = directory / "engine"
        build(directory / "checkpoint", CONFIG, self.engine)
        self.lora = cache(self._lora)

    def _lora(self, adapter: str, engine: Path) -> adaptrt.LoraConfig | None:
        directory = self.adapters[adapter]
        number = list(self.adapters).index(adapter)
        return None if directory is None else adaptrt.LoraConfig.from_peft(number, directory, engine)

    def request(self, case: Case, **fields: object) -> adaptrt.Request:
        settings: dict[str, object] = {
            "lora_config": self.lora(case.adapter, self.engine),
            "output_config": adaptrt.OutputConfig(
                return_context_logits=True,
                return_generation_logits=True,
                exclude_input_from_output=True,
                return_encoder_output=True,
            ),
        }
        return adaptrt.Request(case.start, MAX_TOKENS, encoder_input_token_ids=case.encoder, **{**settings, **fields})

    def answers(self, cases: list[Case], **fields: object) -> list[adaptrt.Result]:
        """Returns the result of each case, all in one batch."""
        config = adaptrt.ExecutorConfig(**fields)
        with adaptrt.Executor(self.engine, adaptrt.ModelType.ENCODER_DECODER, config) as executor:
            ids = executor.enqueue_requests([self.request(case) for case in cases])
            return [finish(executor, request_id) for request_id in ids]


def finish(executor: adaptrt.Executor, request_id: int) -> adaptrt.Result:
    (response,) = executor.await_responses(request_id)
    assert not response.has_error(), response.error_msg
    assert response.result.is_final
    return response.result


def logits_of(result: adaptrt.Result) -> np.ndarray:
    return np.concatenate([np.asarray(result.context_logits), np.asarray(result.generation_logits)[0][1:]])


def bits_of(result: adaptrt.Result) -> tuple[list[int], bytes, bytes]:
    return result.output_token_ids[0], logits_of(result).tobytes(), np.asarray(result.encoder_output).tobytes()


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(request.param, tmp_path_factory.mktemp(request.param))


def assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: float = TOLERANCE) -> None:
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= tolerance * (expected.max() - expected.min())


def test_every_kind_of_adapter_in_one_batch(served: Served) -> None:
    for case, result in zip(CASES, served.answers(CASES), strict=True):
        reference = Seq2SeqReference(served.model, served.adapters[case.adapter])
        tokens = result.output_token_ids[0]
        expected = reference.logits(case.encoder, [*case.start, *tokens[:-1]])
        assert_close(logits_of(result), expected)
        assert tokens == expected[len(case.start) - 1 :].argmax(axis=1).tolist()
        assert_close(np.asarray(result.encoder_output), reference.encoder_output(case.encoder))


@pytest.mark.parametrize("policy", ["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"])
def test_a_crowd_changes_no_bit(served: Served, policy: str) -> None:
    # Blocks for about three requests, so that some wait and, if the policy allows it, some are preempted.
    crowd = served.answers(
        [*CASES, *CASES],
        num_threads=3,
        enable_chunked_context=True,
        scheduler_config=adaptrt.SchedulerConfig(getattr(adaptrt.CapacitySchedulerPolicy, policy)),
        kv_cache_config=adaptrt.KvCacheConfig(max_tokens=64),
    )
    alone = {id(case): bits_of(served.answers([case], num_threads=1)[0]) for case in CASES}
    for case, result in zip([*CASES, *CASES], crowd, strict=True):
        assert bits_of(result) == alone[id(case)]


SHORT = adaptrt.OutputConfig(return_context_logits=True, return_generation_logits=True, exclude_input_from_output=True)


def without_output(served: Served, case: Case, **fields: object) -> adaptrt.Request:
    """Makes a request that does not ask for the encoder's output, so that the encoder need not run for it."""
    return served.request(case, output_config=SHORT, **fields)


def cross_stats(executor: adaptrt.Executor) -> adaptrt.KvCacheStats:
    stats = executor.get_latest_iteration_stats()[-1].cross_kv_cache_stats
    assert stats is not None
    return stats


def answer_bits(result: adaptrt.Result) -> tuple[list[int], bytes]:
    return result.output_token_ids[0], logits_of(result).tobytes()


def test_encoder_inputs_are_computed_once(served: Served) -> None:
    """Inputs are told apart by tokens, adapter and salt, and reused ones give the same bits as computed ones."""
    computed = {id(case): bits_of(served.answers([case])[0])[:2] for case in CASES}
    config = adaptrt.ExecutorConfig(request_stats_max_iterations=1)
    with adaptrt.Executor(served.engine, adaptrt.ModelType.ENCODER_DECODER, config) as executor:
        for case in CASES:
            finish(executor, executor.enqueue_request(without_output(served, case)))
        before = cross_stats(executor)
        num_blocks = sum(-(-len(case.encoder) // CONFIG.tokens_per_block) for case in CASES)
        assert (before.reused_blocks, before.missed_blocks) == (0, num_blocks)
        assert (before.alloc_new_blocks, before.used_num_blocks) == (num_blocks, 0)
        for case in CASES:
            result = finish(executor, executor.enqueue_request(without_output(served, case)))
            assert answer_bits(result) == computed[id(case)]
            (of_request,) = executor.get_latest_request_stats()[-1].request_stats
            assert of_request.reused_blocks_per_request == -(-len(case.encoder) // CONFIG.tokens_per_block)
        stats = cross_stats(executor)
        assert (stats.reused_blocks, stats.missed_blocks) == (num_blocks, num_blocks)
        assert stats.reused_tokens == sum(len(case.encoder) for case in CASES)
        assert stats.alloc_new_blocks == num_blocks
        for fields in ({"cache_salt_id": 3}, {"lora_config": served.lora("rslora", served.engine)}):
            finish(executor, executor.enqueue_request(without_output(served, CASES[1], **fields)))
        assert cross_stats(executor).reused_blocks == num_blocks


def test_the_encoders_output_is_computed_whatever_is_kept(served: Served) -> None:
    case = CASES[2]
    (expected,) = served.answers([case])
    with adaptrt.Executor(served.engine, adaptrt.ModelType.ENCODER_DECODER) as executor:
        finish(executor, executor.enqueue_request(without_output(served, case)))
        assert bits_of(finish(executor, executor.enqueue_request(served.request(case)))) == bits_of(expected)
        assert cross_stats(executor).reused_blocks == 0
        result = finish(executor, executor.enqueue_request(without_output(served, case)))
        assert answer_bits(result) == bits_of(expected)[:2]
        assert cross_stats(executor).reused_blocks == 6


def test_encoder_inputs_of_a_replaced_adapter_are_computed_again(served: Served) -> None:
    case = Case("lora", tokens_of(20, 5), tokens_of(2, 6))
    config = adaptrt.ExecutorConfig(request_stats_max_iterations=1)
    with adaptrt.Executor(served.engine, adaptrt.ModelType.ENCODER_DECODER, config) as executor:
        for adapter in ("lora", "rslora"):
            directory = served.adapters[adapter]
            assert directory is not None
            (expected,) = served.answers([dataclasses.replace(case, adapter=adapter)])
            weights = adaptrt.LoraConfig.from_peft(9, directory, served.engine, replace=True)
            for lora, reused in ((weights, 0), (adaptrt.LoraConfig(9), 3)):
                result = finish(executor, executor.enqueue_request(without_output(served, case, lora_config=lora)))
                assert answer_bits(result) == bits_of(expected)[:2]
                (newest,) = executor.get_latest_request_stats()[-1].request_stats
                assert newest.reused_blocks_per_request == reused


def test_adapters_are_asked_for_by_name(served: Served) -> None:
    case = next(case for case in CASES if case.adapter == "lora")
    (expected,) = served.answers([case])
    directory = served.adapters["lora"]
    assert directory is not None
    with adaptrt.Executor(served.engine, adaptrt.ModelType.ENCODER_DECODER, adaptrt.ExecutorConfig()) as executor:
        executor.add_adapter("named", directory)
        request = served.request(case, lora_config=None)
        assert bits_of(finish(executor, executor.enqueue_request(request, adapter="named"))) == bits_of(expected)


def test_sampled_sequences_share_their_encoder_input(served: Served) -> None:
    sampling = adaptrt.SamplingConfig(temperature=1.5, seed=5)
    with adaptrt.Executor(served.engine, adaptrt.ModelType.ENCODER_DECODER) as executor:
        case = CASES[2]
        together = executor.enqueue_request(served.request(case, sampling_config=sampling, num_return_sequences=3))
        found: dict[int, list[int]] = {}
        while len(found) < 3:
            for response in executor.await_responses(together):
                assert not response.has_error(), response.error_msg
                found[response.result.sequence_index] = response.result.output_token_ids[0]
        for index, tokens in found.items():
            seeded = adaptrt.SamplingConfig(temperature=1.5, seed=5 + index)
            alone = executor.enqueue_request(served.request(case, sampling_config=seeded))
            assert finish(executor, alone).output_token_ids[0] == tokens


def test_beams_share_their_encoder_input(served: Served) -> None:
    case = CASES[2]
    sampling = adaptrt.SamplingConfig(beam_width=3)
    output = adaptrt.OutputConfig(exclude_input_from_output=True)
    config = adaptrt.ExecutorConfig(max_beam_width=3)
    with adaptrt.Executor(served.engine, adaptrt.ModelType.ENCODER_DECODER, config) as executor:
        request = served.request(case, sampling_config=sampling, output_config=output)
        beams = finish(executor, executor.enqueue_request(request)).output_token_ids
    reference = Seq2SeqReference(served.model, served.adapters[case.adapter])
    assert beams == search(reference, case, 3)


def search(reference: Seq2SeqReference, case: Case, width: int) -> list[list[int]]:
    """Returns the beams of a search in which no token ends a beam, best first."""
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(MAX_TOKENS):
        longer = []
        for score, tokens in beams:
            logits = torch.from_numpy(reference.logits(case.encoder, [*case.start, *tokens])[-1])
            log_probs = torch.log_softmax(logits, dim=-1).tolist()
            longer += [(score + log_prob, [*tokens, token]) for token, log_prob in enumerate(log_probs)]
        beams = sorted(longer, reverse=True)[:width]
    return [tokens for _, tokens in beams]


@pytest.mark.parametrize(("dtype", "tolerance"), [(DType.BFLOAT16, 0.04), (DType.FLOAT16, 0.004)])
def test_sixteen_bit_engines(served: Served, dtype: DType, tolerance: float, tmp_path: Path) -> None:
    convert_checkpoint(served.model, tmp_path / "checkpoint", dtype=dtype)
    build(tmp_path / "checkpoint", CONFIG, tmp_path / "engine")
    check_logits(served, tmp_path / "engine", tolerance)


@pytest.mark.parametrize(("algo", "tolerance"), [(QuantAlgo.W8A16, 0.04), (QuantAlgo.W8A8, 0.08)])
def test_quantised_engines(served: Served, algo: QuantAlgo, tolerance: float, tmp_path: Path) -> None:
    build(Checkpoint.of_model(served.model), CONFIG, tmp_path / "engine", quantization=QuantConfig(quant_algo=algo))
    check_logits(served, tmp_path / "engine", tolerance)


def test_an_int8_kv_cache_holds_encoder_inputs_too(served: Served, tmp_path: Path) -> None:
    build(Checkpoint.of_model(served.model), CONFIG, tmp_path / "engine", int8_kv_cache=True)
    check_logits(served, tmp_path / "engine", 0.02)


def check_logits(served: Served, engine: Path, tolerance: float) -> None:
    """Compares the logits of a prompt of many tokens."""
    case = Case("dora", tokens_of(40, 7), tokens_of(30, 8))
    with adaptrt.Executor(engine, adaptrt.ModelType.ENCODER_DECODER) as executor:
        request = served.request(case, lora_config=served.lora("dora", engine))
        result = finish(executor, executor.enqueue_request(request))
    expected = Seq2SeqReference(served.model, served.adapters["dora"]).logits(case.encoder, case.start)
    assert_close(np.asarray(result.context_logits), expected, tolerance)


BAD_REQUESTS = {
    "no encoder input": ({"encoder_input_token_ids": None}, "encoder_input_token_ids is None"),
    "an empty one": ({"encoder_input_token_ids": []}, "encoder_input_token_ids is empty"),
    "a long one": ({"encoder_input_token_ids": [3] * 49}, "has 49 tokens; the engine's max_encoder_input_len is 48"),
    "a foreign token": (
        {"encoder_input_token_ids": [3, VOCAB_SIZE]},
        rf"encoder_input_token_ids\[1\] is {VOCAB_SIZE}",
    ),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_requests_are_refused(served: Served, name: str) -> None:
    fields, message = BAD_REQUESTS[name]
    with adaptrt.Executor(served.engine, adaptrt.ModelType.ENCODER_DECODER) as executor:
        with pytest.raises(RequestError, match=message):
            executor.enqueue_request(adaptrt.Request([3], 4, **fields))
        good = executor.enqueue_request(adaptrt.Request([3], 4, encoder_input_token_ids=[5, 6]))
        assert len(finish(executor, good).output_token_ids[0]) == 5


def test_bad_configurations_are_refused(served: Served, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model_type is DECODER_ONLY; .* is an engine of ENCODER_DECODER"):
        adaptrt.Executor(served.engine, adaptrt.ModelType.DECODER_ONLY)
    for fields, message in (
        ({"cross_kv_cache_fraction": 0.0}, "cross_kv_cache_fraction is 0.*above 0"),
        ({"host_cache_size": 1 << 20, "host_cache_dir": str(tmp_path)}, "a decoder's KV depends on its encoder"),
    ):
        config = adaptrt.ExecutorConfig(kv_cache_config=adaptrt.KvCacheConfig(**fields))
        with pytest.raises(ConfigError, match=message):
            adaptrt.Executor(served.engine, adaptrt.ModelType.ENCODER_DECODER, config)
    few = adaptrt.ExecutorConfig(kv_cache_config=adaptrt.KvCacheConfig(max_tokens=24))
    with (
        adaptrt.Executor(served.engine, adaptrt.ModelType.ENCODER_DECODER, few) as executor,
        pytest.raises(RequestError, match="an encoder input of 48 tokens needs 6 blocks of 8 tokens; there are 3"),
    ):
        executor.enqueue_request(adaptrt.Request([3], 4, encoder_input_token_ids=[5] * 48))


def test_builds_that_cannot_be_are_refused(served: Served, tmp_path: Path) -> None:
    checkpoint = served.directory / "checkpoint"
    for fields, message in (
        ({"max_encoder_input_len": 65}, "max_encoder_input_len 65 must be 1 to max_num_tokens 64"),
        ({"backend": "tensorrt"}, "has an encoder and cross attention, which need backend native"),
    ):
        with pytest.raises(ConfigError, match=message):
            build(checkpoint, dataclasses.replace(CONFIG, **fields), tmp_path / "engine")
    with pytest.raises(ConfigError, match=r"pp_size is 4; expected at most (num_hidden|encoder)_layers 3"):
        convert_checkpoint(served.model, tmp_path / "checkpoint", pp_size=4)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    model = save_encoder_decoder(MODELS["bart"], tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    del tensors["final_logits_bias"]
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(CheckpointError, match="missing tensors: final_logits_bias"):
        convert_checkpoint(model, tmp_path / "checkpoint")


def test_text_goes_to_the_encoder(served: Served, tmp_path: Path) -> None:
    pieces = ["<s>", "</s>", "<unk>", *string.ascii_letters, *"0123456"]
    tokenizer = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[]))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with adaptrt.LLM(served.engine, tokenizer=tmp_path) as llm:
        assert llm.executor.engine.model_type == adaptrt.ModelType.ENCODER_DECODER
        completion = llm.generate("attention", max_tokens=5)
        same = llm.generate(["attention", "before", "behind"], max_tokens=5)[0]
    start = llm.executor.engine.config.pretrained_config.decoder_start_ids
    tokens = [*completion.token_ids]
    expected = Seq2SeqReference(served.model).logits(
        [pieces.index(letter) for letter in "attention"], [*start, *tokens]
    )
    greedy = expected[len(start) - 1 :].argmax(axis=1).tolist()
    assert tokens == greedy[: len(tokens)]
    assert same.token_ids == completion.token_ids


def test_inspect_tells_of_the_encoder(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["inspect", str(served.engine)]) == 0
    said = capsys.readouterr().out
    assert "of the encoder and" in said
    assert "max_encoder_input_len 48" in said
    assert command_line(["inspect", str(served.adapters["lora"]), "--engine", str(served.engine)]) == 0
    assert "cross_attn_dense  rank 5" in capsys.readouterr().out
