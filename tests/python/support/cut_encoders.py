"""Encoders, with and without a decoder, that can be split over ranks, their adapters, and engines of several ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import adaptrt
from adaptrt.runtime.orchestrator.mode import num_ranks_at

from . import cut_models, encoder_decoders, encoders
from .cut_models import CONFIG, FLOAT32_TOLERANCE, CutModel
from .encoder_rank_script import Answer, Batches, answer_batches, answers_of_engines
from .loading import find_adapted
from .pooled import hidden_states, load_bare, save_pooled_adapter

ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": cut_models.ADAPTERS["lora"],
    # The scale is 2, as for the other adapters: T5 does not scale its scores, so a larger one enlarges differences.
    "rslora": {"r": 16, "lora_alpha": 8, "use_rslora": True},
    "dora": cut_models.ADAPTERS["dora"],
}
# Four ranks can divide the sizes, which do not fill panels; two and four stages can divide the numbers of layers.
BERT_SIZES = {"hidden_size": 40, "num_attention_heads": 4, "intermediate_size": 76, "num_hidden_layers": 4}
ENCODER_SIZES = {
    "bert": BERT_SIZES,
    "roberta": BERT_SIZES,
    "distilbert": {"dim": 40, "n_heads": 4, "hidden_dim": 76, "n_layers": 4},
    "modernbert with biases": BERT_SIZES,
}
T5_SIZES = {"num_heads": 4, "d_ff": 76, "num_layers": 4, "num_decoder_layers": 8}
DECODER_SIZES = {
    "t5": T5_SIZES,
    "flan-t5": {**T5_SIZES, "num_layers": 8, "num_decoder_layers": 4},
    "bart": {
        "d_model": 40,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 76,
        "decoder_ffn_dim": 84,
        "encoder_layers": 8,
        "decoder_layers": 4,
    },
}
NAMES = (*ENCODER_SIZES, *DECODER_SIZES)
# Models that differ in their ops; the others have other positions, activations or names.
DIFFERENT = ("bert", "modernbert with biases", "t5", "bart")
# Models whose ranks also run as workers of this process. Only the transport of messages differs.
ORCHESTRATED = ("bert", "t5")
# Tokens of the step in which the longest encoder inputs of cases() start together.
MOST_TOKENS = 160


class CutEncoder(CutModel):
    """An encoder, adapters on every linear layer, and requests for each adapter."""

    model_type = "ENCODER_ONLY"
    config = dataclasses.replace(CONFIG, max_num_tokens=256, max_seq_len=None)

    def __init__(self, name: str, directory: Path) -> None:
        self.kind = self.kind_of(name)
        super().__init__(directory, self.save_model(directory / "model"), self.config)
        for seed, (adapter, fields) in enumerate(ADAPTERS.items()):
            self.adapters[adapter] = self.save_adapter(directory / adapter, seed, fields)

    def kind_of(self, name: str) -> Any:
        kind = encoders.MODELS[name]
        return dataclasses.replace(kind, fields={**kind.fields, **ENCODER_SIZES[name]})

    def save_model(self, directory: Path) -> Path:
        return encoders.save_encoder(self.kind, directory)

    def save_adapter(self, directory: Path, seed: int, fields: dict[str, Any]) -> Path:
        targets = [*self.kind.targets, *([self.kind.embedding] if "use_rslora" in fields else [])]
        settings = {"task_type": "FEATURE_EXTRACTION", "target_modules": targets, **fields}
        return save_pooled_adapter(load_bare(self.model), directory, seed, kept_for=self.model, **settings)

    def cases(self) -> list[dict[str, Any]]:
        """Returns a request for each adapter, with token types if the model distinguishes them."""
        has_types = self.kind.fields.get("type_vocab_size", 1) > 1
        lengths = zip(self.adapters.values(), (1, 90, 40, 33), strict=True)
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

    def batches(self) -> Batches:
        """Returns batches: cases() in a crowd, then each alone, the last one first."""
        cases = self.cases()
        return [cases, *([case] for case in reversed(cases))]

    def check(self, answers: list[Answer]) -> None:
        """Compares answers with transformers + PEFT."""
        for adapter, case, answer in zip(self.adapters.values(), self.cases(), answers, strict=True):
            types = None if case["types"] is None else np.array(case["types"])
            close(answer["rows"], self.states(adapter, case["prompt"], types), (self.model, adapter))

    def states(self, adapter: Path | None, prompt: list[int], types: np.ndarray | None) -> np.ndarray:
        model = self.reference(adapter)
        return hidden_states(model, prompt) if types is None else typed_states(model, prompt, types)

    def load_reference(self, adapter: Path | None) -> Any:
        kept = None if adapter is None else find_adapted(self.model, adapter)
        return load_bare(self.model, adapter) if kept is None else kept


class CutEncoderDecoder(CutEncoder):
    """The same for an encoder-decoder model."""

    model_type = "ENCODER_DECODER"
    config = dataclasses.replace(
        CONFIG, max_num_tokens=MOST_TOKENS, max_seq_len=64, max_encoder_input_len=48, max_beam_width=2
    )

    def kind_of(self, name: str) -> Any:
        kind = encoder_decoders.MODELS[name]
        return dataclasses.replace(kind, fields={**kind.fields, **DECODER_SIZES[name]})

    def save_model(self, directory: Path) -> Path:
        return encoder_decoders.save_encoder_decoder(self.kind, directory)

    def save_adapter(self, directory: Path, seed: int, fields: dict[str, Any]) -> Path:
        return encoder_decoders.save_adapter_of(self.kind, self.model, directory, seed, **fields)

    def cases(self) -> list[dict[str, Any]]:
        """Returns the requests. Two of them have the same encoder input and different adapters."""
        sizes = zip(self.adapters.values(), ((33, 1), (48, 3), (20, 1), (48, 12)), strict=True)
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
            reference = self.reference(adapter)
            tokens = answer["tokens"].tolist()
            expected = reference.logits(case["encoder"], [*case["prompt"], *tokens[:-1]])
            close(answer["logits"], expected, (self.model, adapter))
            assert tokens == expected[len(case["prompt"]) - 1 :].argmax(axis=1).tolist(), (self.model, adapter)
            close(answer["encoder_output"], reference.encoder_output(case["encoder"]), (self.model, adapter))

    def load_reference(self, adapter: Path | None) -> Any:
        return encoder_decoders.Seq2SeqReference(self.model, adapter)


def typed_states(model: Any, prompt: list[int], types: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        output = model(torch.tensor([prompt]), token_type_ids=torch.from_numpy(types)[None])
    return output.last_hidden_state[0].numpy()


def close(actual: np.ndarray, expected: np.ndarray, what: object = "") -> None:
    assert actual.shape == expected.shape, what
    assert np.abs(actual - expected).max() <= FLOAT32_TOLERANCE * float(np.ptp(expected)), what


def same_bits(one: Answer, other: Answer) -> bool:
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


def executor_of(cut: CutEncoder, engine: Path, **fields: Any) -> adaptrt.Executor:
    """Makes an executor in this process; an engine of several ranks gets workers."""
    parallel = adaptrt.ParallelConfig(
        communication_mode=adaptrt.CommunicationMode.ORCHESTRATOR, orchestrator_config=adaptrt.OrchestratorConfig()
    )
    config = adaptrt.ExecutorConfig(
        parallel_config=parallel if num_ranks_at(engine) > 1 else None, num_threads=1, **fields
    )
    return adaptrt.Executor(engine, getattr(adaptrt.ModelType, cut.model_type), config)


def answers_of(cut: CutEncoder, engine: Path, batches: Batches) -> list[list[Answer]]:
    """Returns the answers of such an executor."""
    with executor_of(cut, engine) as executor:
        return answer_batches(executor, batches)


def cut_of(name: str, directory: Path) -> CutEncoder:
    """Makes a model of NAMES."""
    return (CutEncoder if name in ENCODER_SIZES else CutEncoderDecoder)(name, directory)


def cuts_in(directory: Path) -> dict[str, CutEncoder]:
    """Makes all models of NAMES."""
    return {name: cut_of(name, directory / name) for name in NAMES}


def some_of(cuts: Mapping[str, CutEncoder]) -> dict[str, CutEncoder]:
    """Returns the models of DIFFERENT, for splits of which another test runs all models."""
    return {name: cuts[name] for name in DIFFERENT}


def answers_of_ranks(
    ranks: int, cuts: Mapping[str, CutEncoder], place: Path, *, each_alone: bool = False, **engine: Any
) -> dict[str, list[list[Answer]]]:
    """Returns, by model name, the answers to cases(), together and alone. engine: arguments of CutModel.engine()."""
    engines = [
        (cut.engine(**engine), cut.model_type, cut.batches() if each_alone else [cut.cases()]) for cut in cuts.values()
    ]
    return dict(zip(cuts, answers_of_engines(ranks, engines, place, num_threads=1), strict=True))
