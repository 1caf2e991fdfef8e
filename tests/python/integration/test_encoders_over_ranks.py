"""Encoders, and encoders before decoders, whose layers are cut over ranks: the results of one process."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import adaptrt
from adaptrt._core import ConfigError
from adaptrt.builder.build import build
from adaptrt.builder.config import BuildConfig, LoraBuildConfig, PluginConfig
from adaptrt.builder.conversion.convert import convert_checkpoint
from support import encoder_decoders, encoders
from support.encoder_rank_script import Answer, answer_batches, answers_of_ranks
from support.pooled import hidden_states, load_bare, pooled, save_pooled_adapter, save_word_tokenizer

# As in test_ranks.py: sums over ranks are in another order.
TOLERANCE = 1e-4
CONFIG = BuildConfig(
    max_batch_size=8,
    max_num_tokens=256,
    tokens_per_block=8,
    lora_config=LoraBuildConfig(max_lora_rank=16),
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
)
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"r": 5},
    "rslora": {"r": 16, "use_rslora": True},
    "dora": {"r": 3, "use_dora": True},
}
# Sizes that four ranks can divide, and that are odd for panels.
BERT_SIZES = {"hidden_size": 40, "num_attention_heads": 4, "intermediate_size": 76}
ENCODER_SIZES = {
    "bert": BERT_SIZES,
    "roberta": BERT_SIZES,
    "distilbert": {"dim": 40, "n_heads": 4, "hidden_dim": 76},
    "modernbert with biases": BERT_SIZES,
}
T5_SIZES = {"num_heads": 4, "d_ff": 76}
DECODER_SIZES = {
    "t5": T5_SIZES,
    "flan-t5": T5_SIZES,
    "bart": {
        "d_model": 40,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 76,
        "decoder_ffn_dim": 84,
    },
}


class Cut:
    """A model, its adapters on every linear layer, requests of each, and engines by their number of ranks."""

    model_type = "ENCODER_ONLY"

    def __init__(self, name: str, directory: Path) -> None:
        self.directory = directory
        self.kind = self.kind_of(name)
        self.model = self.save_model()
        self.adapters: dict[str, Path | None] = {"base": None}
        for seed, (adapter, fields) in enumerate(ADAPTERS.items()):
            self.adapters[adapter] = self.save_adapter(directory / adapter, seed, fields)

    def kind_of(self, name: str) -> Any:
        kind = encoders.MODELS[name]
        return dataclasses.replace(kind, fields={**kind.fields, **ENCODER_SIZES[name]})

    def save_model(self) -> Path:
        return encoders.save_encoder(self.kind, self.directory / "model")

    def save_adapter(self, directory: Path, seed: int, fields: dict[str, Any]) -> Path:
        targets = [*self.kind.targets, *([self.kind.embedding] if "use_rslora" in fields else [])]
        settings = {"task_type": "FEATURE_EXTRACTION", "target_modules": targets, **fields}
        return save_pooled_adapter(load_bare(self.model), directory, seed, **settings)

    def engine(self, tp_size: int, *, fully_sharded: bool = False) -> Path:
        made = self.directory / f"engine{tp_size}{'-sharded' if fully_sharded else ''}"
        if not made.is_dir():
            checkpoint = self.directory / f"{made.name}-checkpoint"
            convert_checkpoint(self.model, checkpoint, tp_size=tp_size)
            lora = dataclasses.replace(CONFIG.lora_config, fully_sharded_loras=fully_sharded)
            build(checkpoint, self.config(dataclasses.replace(CONFIG, lora_config=lora)), made)
        return made

    def config(self, config: BuildConfig) -> BuildConfig:
        return config

    def cases(self) -> list[dict[str, Any]]:
        """A request of each adapter; of kinds of tokens, where the model tells them apart."""
        has_types = self.kind.fields.get("type_vocab_size", 1) > 1
        lengths = zip(self.adapters.values(), (1, 40, 90, 17), strict=True)
        return [
            {
                "adapter": None if adapter is None else str(adapter),
                "task": number,
                "prompt": encoder_decoders.tokens_of(length, number),
                "types": [at * 2 // length for at in range(length)] if has_types else None,
                "encoder": None,
            }
            for number, (adapter, length) in enumerate(lengths)
        ]

    def check(self, answers: list[Answer]) -> None:
        """Against transformers + PEFT."""
        for adapter, case, answer in zip(self.adapters.values(), self.cases(), answers, strict=True):
            types = None if case["types"] is None else np.array(case["types"])
            close(answer["rows"], self.states(adapter, case["prompt"], types))

    def states(self, adapter: Path | None, prompt: list[int], types: np.ndarray | None) -> np.ndarray:
        model = load_bare(self.model, adapter)
        return hidden_states(model, prompt) if types is None else typed_states(model, prompt, types)


class CutEncoderDecoder(Cut):
    """The same of a model whose encoder has a decoder behind it."""

    model_type = "ENCODER_DECODER"

    def kind_of(self, name: str) -> Any:
        kind = encoder_decoders.MODELS[name]
        return dataclasses.replace(kind, fields={**kind.fields, **DECODER_SIZES[name]})

    def save_model(self) -> Path:
        return encoder_decoders.save_encoder_decoder(self.kind, self.directory / "model")

    def save_adapter(self, directory: Path, seed: int, fields: dict[str, Any]) -> Path:
        return encoder_decoders.save_adapter_of(self.kind, self.model, directory, seed, **fields)

    def config(self, config: BuildConfig) -> BuildConfig:
        return dataclasses.replace(config, max_num_tokens=64, max_seq_len=64, max_encoder_input_len=48)

    def cases(self) -> list[dict[str, Any]]:
        """Two requests have the same encoder input, of different adapters."""
        sizes = zip(self.adapters.values(), ((33, 1), (48, 3), (1, 1), (48, 12)), strict=True)
        return [
            {
                "adapter": None if adapter is None else str(adapter),
                "task": number,
                "prompt": encoder_decoders.tokens_of(start, 4),
                "types": None,
                "encoder": encoder_decoders.tokens_of(length, 3),
            }
            for number, (adapter, (length, start)) in enumerate(sizes)
        ]

    def check(self, answers: list[Answer]) -> None:
        for adapter, case, answer in zip(self.adapters.values(), self.cases(), answers, strict=True):
            reference = encoder_decoders.Seq2SeqReference(self.model, adapter)
            tokens = answer["tokens"].tolist()
            expected = reference.logits(case["encoder"], [*case["prompt"], *tokens[:-1]])
            close(answer["logits"], expected)
            assert tokens == expected[len(case["prompt"]) - 1 :].argmax(axis=1).tolist()
            close(answer["encoder_output"], reference.encoder_output(case["encoder"]))


def typed_states(model: Any, prompt: list[int], types: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        output = model(torch.tensor([prompt]), token_type_ids=torch.from_numpy(types)[None])
    return output.last_hidden_state[0].numpy()


def close(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= TOLERANCE * float(np.ptp(expected))


def same_bits(one: Answer, other: Answer) -> bool:
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


def orchestrated(cut: Cut, engine: Path, batches: list[list[dict[str, Any]]]) -> list[list[Answer]]:
    parallel = adaptrt.ParallelConfig(
        communication_mode=adaptrt.CommunicationMode.ORCHESTRATOR, orchestrator_config=adaptrt.OrchestratorConfig()
    )
    config = adaptrt.ExecutorConfig(parallel_config=parallel, num_threads=1)
    with adaptrt.Executor(engine, getattr(adaptrt.ModelType, cut.model_type), config) as executor:
        return answer_batches(executor, batches)


@pytest.fixture(scope="module", params=[*ENCODER_SIZES, *DECODER_SIZES])
def cut(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Cut:
    kind = Cut if request.param in ENCODER_SIZES else CutEncoderDecoder
    return kind(request.param, tmp_path_factory.mktemp("cut"))


@pytest.mark.parametrize("fully_sharded", [False, True])
def test_two_ranks_compute_what_one_does(cut: Cut, fully_sharded: bool, tmp_path: Path) -> None:
    """Every kind of adapter in one batch and each request alone, in leader mode and in orchestrator mode."""
    engine, cases = cut.engine(2, fully_sharded=fully_sharded), cut.cases()
    batches = [cases, *([case] for case in reversed(cases))]
    crowd, *alone = answers_of_ranks(2, engine, cut.model_type, batches, tmp_path, num_threads=1)
    cut.check(crowd)
    assert all(same_bits(answer, by_itself) for answer, (by_itself,) in zip(crowd, reversed(alone), strict=True))
    (of_workers,) = orchestrated(cut, engine, [cases])
    assert all(same_bits(answer, other) for answer, other in zip(crowd, of_workers, strict=True))


def test_four_ranks(cut: Cut, tmp_path: Path) -> None:
    (answers,) = answers_of_ranks(4, cut.engine(4), cut.model_type, [cut.cases()], tmp_path, num_threads=1)
    cut.check(answers)


def test_llm_starts_the_workers_of_an_encoder(tmp_path: Path) -> None:
    cut = Cut("bert", tmp_path)
    save_word_tokenizer(cut.model, encoders.VOCAB_SIZE)
    text, prompt = "t5 t6 t7", [5, 6, 7, 1]
    with adaptrt.LLM(cut.engine(2), tokenizer=cut.model) as llm:
        llm.executor.add_adapter("dora", cut.adapters["dora"])
        (row,) = llm.embed([text], lora="dora", pooling_type=adaptrt.PoolingType.MEAN, normalize=True)
    expected = pooled(cut.states(cut.adapters["dora"], prompt, None), adaptrt.PoolingType.MEAN, normalize=True)
    close(row, expected)


def test_pipelines_are_refused_by_name(tmp_path: Path) -> None:
    encoder = encoders.save_encoder(encoders.MODELS["bert"], tmp_path / "bert")
    convert_checkpoint(encoder, tmp_path / "checkpoint", pp_size=3)
    with pytest.raises(
        ConfigError, match="BertModel cannot be cut into pp_size 3 stages: its attention looks both ways"
    ):
        build(tmp_path / "checkpoint", CONFIG, tmp_path / "engine")
    model = encoder_decoders.save_encoder_decoder(encoder_decoders.MODELS["t5"], tmp_path / "t5")
    with pytest.raises(ConfigError, match="a model with an encoder is not cut into pipelines"):
        convert_checkpoint(model, tmp_path / "refused", pp_size=3)


def test_both_widths_of_an_mlp_must_be_cut(tmp_path: Path) -> None:
    kind = encoder_decoders.MODELS["bart"]
    fields = {**kind.fields, **DECODER_SIZES["bart"], "encoder_ffn_dim": 77}
    model = encoder_decoders.save_encoder_decoder(dataclasses.replace(kind, fields=fields), tmp_path / "bart")
    with pytest.raises(ConfigError, match="tp_size 2 does not divide encoder_intermediate_size 77"):
        convert_checkpoint(model, tmp_path / "refused", tp_size=2)
