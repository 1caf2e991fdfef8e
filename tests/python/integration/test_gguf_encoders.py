"""Encoders in GGUF files make the embeddings and classes of the Hugging Face models that they were made from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from tokenizers import Tokenizer

import adaptrt
from adaptrt import CheckpointError
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.formats.models.registry import load_config
from adaptrt.formats.sources import find_model
from support.encoders import BERT_FIELDS, DISTILBERT_FIELDS, ROBERTA_FIELDS, Encoder, save_encoder
from support.families import GEMMA, LLAMA, rope
from support.pooled import Dense, load_bare, save_pooled_adapter, save_sentence_transformer
from support.tokenizers import roberta, unigram, word_piece

pytest.importorskip("gguf")
gguf_files = pytest.importorskip("support.gguf_files")

# Both engines sum in the same order; files hold float32.
TOLERANCE = 1e-6
TEXTS = ["Hello world, it's 2024", "Zwölf Boxkämpfer jagen Viktor", "你好,世界 and é"]
MEAN, CLS, RANK = 1, 2, 4


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def roberta_keys(tokenizer: Tokenizer) -> dict[str, Any]:
    ids = {name: tokenizer.token_to_id(text) for name, text in (
        ("bos_token_id", "<s>"), ("eos_token_id", "</s>"), ("unknown_token_id", "<unk>"), ("cls_token_id", "<s>"),
        ("seperator_token_id", "</s>"), ("padding_token_id", "<pad>"))}  # fmt: skip
    adds = {f"add_{name}_token": True for name in ("bos", "eos", "sep")}
    keys: dict[str, Any] = gguf_files.tokenizer_keys(tokenizer, "roberta-bpe", token_type_count=1, **ids, **adds)
    return keys


@dataclasses.dataclass(frozen=True)
class Case:
    """An encoder with a tokenizer of its kind."""

    encoder: Encoder
    make_tokenizer: Any
    keys: Any
    labels: tuple[str, ...]
    mode: str = "mean_tokens"
    architecture: str = "bert"

    @property
    def pooling(self) -> int:
        return {"mean_tokens": MEAN, "cls_token": CLS}[self.mode]


BERT_TARGETS = ["query", "key", "value", "intermediate.dense", "output.dense"]
LABELS = ("cold", "warm", "hot")
# The padding token is 1, as in published models.
ROBERTA = {**ROBERTA_FIELDS, "pad_token_id": 1, "max_position_embeddings": 202}
CASES = {
    "bert": Case(Encoder(transformers.BertConfig, BERT_FIELDS, BERT_TARGETS, ""), word_piece,
                 gguf_files.word_piece_keys, (), "cls_token"),
    "distilbert": Case(Encoder(transformers.DistilBertConfig, DISTILBERT_FIELDS, ["q_lin", "lin2"], ""), word_piece,
                       gguf_files.word_piece_keys, LABELS),
    "roberta": Case(Encoder(transformers.RobertaConfig, ROBERTA, BERT_TARGETS, ""), roberta, roberta_keys, LABELS),
    "xlm-roberta": Case(Encoder(transformers.XLMRobertaConfig, ROBERTA, BERT_TARGETS, ""), unigram,
                        gguf_files.unigram_keys, ("LABEL_0",), "cls_token"),
}  # fmt: skip


class Place:
    """A model as a Hugging Face directory and as a GGUF file."""

    def __init__(self, name: str, directory: Path, **fields: Any) -> None:
        self.case = CASES[name]
        self.tokenizer = self.case.make_tokenizer()
        self.keys = {**self.case.keys(self.tokenizer)}
        self.model = directory / "model"
        kind = transformers.AutoModel
        if "num_labels" in fields:
            kind = transformers.AutoModelForSequenceClassification
        save_encoder(self.case.encoder, self.model, kind, vocab_size=self.tokenizer.get_vocab_size(), **fields)
        self.tokenizer.save(str(self.model / "tokenizer.json"))
        self.file = directory / f"{name}.gguf"
        self._kind = kind

    def write(self, **extra: Any) -> Path:
        """Writes the file. extra: further metadata of the architecture."""
        model = self._kind.from_pretrained(self.model, dtype=torch.float32)
        keys = {f"{self.case.architecture}.{name}": value for name, value in extra.items()}
        return Path(gguf_files.write_model(model, self.case.architecture, self.file, self.keys, extra=keys))


def assert_same_checkpoint(file: Path, model: Path, directory: Path, *, atol: float = 0) -> None:
    convert_checkpoint(model, directory / "expected")
    convert_checkpoint(find_model(file).directory, directory / "found")
    found, expected = (dataclasses.asdict(load_config(directory / name)) for name in ("found", "expected"))
    for fields in (found, expected):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            del fields[name]
    assert found == expected
    tensors = load_file(directory / "found" / "rank0.safetensors")
    for name, values in load_file(directory / "expected" / "rank0.safetensors").items():
        same = tensors.pop(name)
        np.testing.assert_allclose(same, values, rtol=0, atol=atol if values.ndim == 1 else 0, err_msg=name)
    assert not tensors


@pytest.mark.parametrize("name", CASES)
def test_embeddings_are_those_of_the_original(name: str, tmp_path: Path) -> None:
    place = Place(name, tmp_path)
    save_sentence_transformer(place.model, place.case.mode, normalize=True)
    adapter = save_pooled_adapter(
        load_bare(place.model), tmp_path / "adapter", 0, "FEATURE_EXTRACTION", r=4,
        target_modules=place.case.encoder.targets,
    )  # fmt: skip
    found = {}
    for source in (place.model, place.write(pooling_type=place.case.pooling)):
        with adaptrt.LLM(source, dtype="float32", max_model_len=128) as llm:
            llm.load_lora("own", adapter)
            found[source] = llm.embed(TEXTS), llm.embed(TEXTS, lora="own")
    for own, same in zip(*found.values(), strict=True):
        np.testing.assert_allclose(np.stack(same), np.stack(own), rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(np.linalg.norm(same[0]), 1, rtol=1e-5)


@pytest.mark.parametrize("name", ["distilbert", "roberta", "xlm-roberta"])
def test_classes_are_those_of_the_original(name: str, tmp_path: Path) -> None:
    labels = CASES[name].labels
    place = Place(name, tmp_path, num_labels=len(labels), id2label=dict(enumerate(labels)))
    extra = {"classifier.output_labels": list(labels)} if labels == LABELS else {}
    found = {}
    for source in (place.model, place.write(pooling_type=RANK, **extra)):
        with adaptrt.LLM(source, dtype="float32", max_model_len=128) as llm:
            found[source] = llm.classify([*TEXTS, (TEXTS[0], TEXTS[1])])
    for own, same in zip(*found.values(), strict=True):
        assert own.label == same.label
        np.testing.assert_allclose(same.probs, own.probs, rtol=0, atol=TOLERANCE)


def test_a_file_without_pooling_needs_one(tmp_path: Path) -> None:
    with adaptrt.LLM(Place("bert", tmp_path).write(), dtype="float32", max_model_len=64) as llm:
        with pytest.raises(adaptrt.AdaptrtError, match="pooling_type"):
            llm.embed(TEXTS[0])
        assert llm.embed(TEXTS[0], pooling_type=adaptrt.PoolingType.MEAN, normalize=False).shape == (36,)


@pytest.mark.parametrize("dense", [False, True])
def test_embedding_gemma_is_read(dense: bool, tmp_path: Path) -> None:
    """Its file has the window of config.json, and may have the linear layers after the pooling."""
    fields = {
        **GEMMA, "num_hidden_layers": 7, "layer_types": None, "query_pre_attn_scalar": 20, "sliding_window": 12,
        "pad_token_id": 0, "attn_logit_softcapping": None, "use_bidirectional_attention": True, "rope_parameters": {
            "full_attention": rope(theta=5000.0), "sliding_attention": rope(theta=300.0)},
    }  # fmt: skip
    original = save_encoder(Encoder(transformers.Gemma3TextConfig, fields, LLAMA, ""), tmp_path / "model")
    layers = [Dense(36, 50), Dense(50, 38)] if dense else []
    save_sentence_transformer(original, "mean_tokens", normalize=True, dense=layers)
    model = transformers.AutoModel.from_pretrained(original, dtype=torch.float32)
    extra: dict[str, Any] = {"tokenizer.ggml.model": "none", "gemma-embedding.pooling_type": MEAN}
    added = {}
    for number, layer in enumerate(layers, 2):
        added[f"dense_{number}.weight"] = load_file(original / f"{number}_Dense" / "model.safetensors")["linear.weight"]
        extra[f"gemma-embedding.dense_{number}_feat_in"] = layer.inputs
        extra[f"gemma-embedding.dense_{number}_feat_out"] = layer.outputs
    file = gguf_files.write_model(model, "gemma-embedding", tmp_path / "a.gguf", extra=extra, added=added)
    # Files have norms plus one, which rounds them.
    assert_same_checkpoint(file, original, tmp_path, atol=2e-7)
    config = load_config(tmp_path / "found")
    assert config.is_encoder_only
    assert len(config.embedding_pooling.dense if config.embedding_pooling else ()) == len(layers)


def test_a_decoder_may_state_its_pooling(tmp_path: Path) -> None:
    """Files of Qwen3-Embedding do."""
    from support.families import SIZES

    config = transformers.Qwen3Config(**{**SIZES, "head_dim": 20, "tie_word_embeddings": True})
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    save_sentence_transformer(tmp_path / "model", "lasttoken", normalize=True)
    extra = {"tokenizer.ggml.model": "none", "qwen3.pooling_type": 3}
    file = gguf_files.write_model(model, "qwen3", tmp_path / "a.gguf", extra=extra)
    convert_checkpoint(tmp_path / "model", tmp_path / "expected")
    convert_checkpoint(find_model(file).directory, tmp_path / "found")
    found, expected = load_config(tmp_path / "found"), load_config(tmp_path / "expected")
    assert found.embedding_pooling == expected.embedding_pooling
    assert found.embedding_pooling is not None
    assert found.has_lm_head == expected.has_lm_head


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"pooling_type": 7}, r"'bert.pooling_type' is 7; accepted: 0, 1, 2, 3 \(0: none"),
        ({"pooling_type": RANK}, "'bert.pooling_type' is 4; accepted: 0, 1, 2, 3"),
        ({"attention.causal": True}, "'bert.attention.causal' is True; only False is supported"),
        ({"embedding_length_out": 128}, "'bert.embedding_length_out' is 128: an unknown key"),
    ],
)
def test_unusual_files_are_refused_by_name(extra: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        find_model(Place("bert", tmp_path).write(**extra))


def test_classifiers_whose_pooler_is_missing_are_refused(tmp_path: Path) -> None:
    place = Place("bert", tmp_path)
    model = transformers.AutoModel.from_pretrained(place.model, dtype=torch.float32)
    labels = {"bert.classifier.output_labels": list(LABELS), "bert.pooling_type": RANK}
    head = {"cls.output.weight": np.ones((3, 36), np.float32), "cls.output.bias": np.ones(3, np.float32)}
    file = gguf_files.write_model(model, "bert", place.file, place.keys, extra=labels, added=head)
    with pytest.raises(CheckpointError, match=r"tensor 'cls\.output\.weight' belongs to a classifier of BERT"):
        find_model(file)
