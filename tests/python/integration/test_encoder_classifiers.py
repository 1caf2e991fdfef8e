"""Classifiers over encoders against transformers + PEFT: heads of models and adapters, and poolers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, processors

import adaptrt
from adaptrt import PoolingParams, PoolingType
from adaptrt.builder.cli import main as command_line
from support.encoders import MODELS, VOCAB_SIZE, engine_of, save_encoder
from support.http_server import http_server
from support.pooled import (
    hidden_states,
    load_bare,
    run_pooled,
    save_pooled_adapter,
    save_sentence_transformer,
    save_word_tokenizer,
)

ENCODER = adaptrt.ModelType.ENCODER_ONLY
PROMPTS = [[7], [2, 44, 5, 60, 7, 3, 3, 12], [*range(2, 60), *range(2, 60)]]
LABELS = {0: "cold", 1: "warm", 2: "hot"}
# Tolerance for probabilities: float32 sums in a different order.
TOLERANCE = 2e-5
TASKS = {
    "SEQ_CLS": transformers.AutoModelForSequenceClassification,
    "TOKEN_CLS": transformers.AutoModelForTokenClassification,
}
HEADS = {
    "bert": ("bert", {}),
    "roberta": ("roberta", {}),
    "distilbert": ("distilbert", {}),
    "modernbert, the first token": ("modernbert", {"classifier_bias": True, "classifier_activation": "tanh"}),
    "modernbert, the mean": ("modernbert with biases", {"classifier_pooling": "mean"}),
}


def text_of(prompt: list[int]) -> str:
    return " ".join(f"t{token}" for token in prompt)


def probabilities(model: Any, prompt: list[int]) -> np.ndarray:
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0].double()
    if model.config.problem_type == "regression":
        return logits.numpy()
    return torch.softmax(logits, -1).numpy()


def check(found: Any, expected: np.ndarray, names: Any = LABELS) -> None:
    for one, probs in zip(found, expected, strict=True) if expected.ndim == 2 else [(found, expected)]:
        np.testing.assert_allclose(one.probs, probs, atol=TOLERANCE)
        assert one.label == names[int(probs.argmax())]


def load(model: Path, task: str, adapter: Path | None = None, **fields: Any) -> Any:
    settings = {"dtype": torch.float32, "attn_implementation": "eager", **fields}
    loaded = TASKS[task].from_pretrained(model, **settings)
    return (loaded if adapter is None else peft.PeftModel.from_pretrained(loaded, adapter)).eval()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("head", HEADS)
def test_models_for_classification(head: str, task: str, tmp_path: Path) -> None:
    name, fields = HEADS[head]
    model = save_encoder(MODELS[name], tmp_path / "model", TASKS[task], id2label=LABELS, **fields)
    save_word_tokenizer(model, VOCAB_SIZE, end=False)
    with adaptrt.LLM(model_engine(model, tmp_path), tokenizer=model) as llm:
        found = llm.classify([text_of(prompt) for prompt in PROMPTS])
        for prompt, classes in zip(PROMPTS, found, strict=True):
            check(classes, probabilities(load(model, task), prompt))
        with pytest.raises(adaptrt.RequestError, match="the engine is an encoder and generates nothing"):
            llm.generate("t3")


def model_engine(model: Path, root: Path) -> Path:
    return engine_of(model, root / "engine")


def test_a_regression_has_values(tmp_path: Path) -> None:
    model = save_encoder(MODELS["bert"], tmp_path / "model", TASKS["SEQ_CLS"], num_labels=1, problem_type="regression")
    save_word_tokenizer(model, VOCAB_SIZE, end=False)
    with adaptrt.LLM(model_engine(model, tmp_path), tokenizer=model) as llm:
        check(llm.classify(text_of(PROMPTS[1])), probabilities(load(model, "SEQ_CLS"), PROMPTS[1]), {0: "LABEL_0"})


# These adapters of BERT also change the pooler, whose layer is named "dense" too.
ADAPTERS = {
    "moods": {"task": "SEQ_CLS", "labels": 3, "r": 4, "target_modules": ["query", "value", "dense"]},
    "topics": {"task": "SEQ_CLS", "labels": 5, "r": 3, "use_dora": True, "target_modules": ["key", "dense"]},
    "names": {"task": "TOKEN_CLS", "labels": 4, "r": 3, "target_modules": ["query", "output.dense"]},
    "moods with all biases": {"task": "SEQ_CLS", "labels": 3, "r": 2, "bias": "all", "target_modules": ["query"]},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BertModel with a pooler, adapters that bring their heads, and two adapters without a head."""
    root = tmp_path_factory.mktemp("classifiers")
    model = save_encoder(MODELS["bert"], root / "model")
    save_word_tokenizer(model, VOCAB_SIZE, end=False)
    save_sentence_transformer(model, "cls_token", normalize=False)
    for seed, (name, fields) in enumerate(ADAPTERS.items()):
        lora = {key: value for key, value in fields.items() if key not in ("task", "labels")}
        trained = load(model, fields["task"], num_labels=fields["labels"])
        save_pooled_adapter(trained, root / name, seed, fields["task"], **lora)
    for name, targets in (("whole", "all-linear"), ("plain", ["query"])):
        save_pooled_adapter(load_bare(model), root / name, 7, "FEATURE_EXTRACTION", r=4, target_modules=targets)
    engine_of(model, root / "engine")
    return root


@pytest.fixture(scope="module")
def llm(base: Path) -> Iterator[adaptrt.LLM]:
    with adaptrt.LLM(base / "engine", tokenizer=base / "model") as made:
        for name in [*ADAPTERS, "whole", "plain"]:
            made.executor.add_adapter(name, base / name)
        yield made


def reference(base: Path, name: str) -> Any:
    fields = ADAPTERS[name]
    return load(base / "model", fields["task"], base / name, num_labels=fields["labels"])


def test_adapters_bring_heads_and_change_the_pooler(llm: adaptrt.LLM, base: Path) -> None:
    assert any("pooler" in name for name in load_file(base / "moods" / "adapter_model.safetensors"))
    models = {name: reference(base, name) for name in ADAPTERS}
    cases = [(prompt, name) for prompt in PROMPTS for name in ADAPTERS]
    found = llm.classify([text_of(prompt) for prompt, _ in cases], lora=[name for _, name in cases])
    for (prompt, name), classes in zip(cases, found, strict=True):
        labels = {i: f"LABEL_{i}" for i in range(ADAPTERS[name]["labels"])}
        check(classes, probabilities(models[name], prompt), labels)


# Heads of two layers: RoBERTa's is one module. DistilBERT's is two modules whose names end alike, so PEFT saves both.
HEADS_OF_TWO = {
    "roberta": {"target_modules": ["query", "value", "output.dense"]},
    "distilbert": {"target_modules": ["q_lin", "lin2"]},
}


@pytest.mark.parametrize("name", HEADS_OF_TWO)
@pytest.mark.parametrize("over", ["a bare model", "a classifier"])
def test_adapters_bring_heads_of_two_layers(name: str, over: str, tmp_path: Path) -> None:
    kind = TASKS["SEQ_CLS"] if over == "a classifier" else transformers.AutoModel
    labels = {"id2label": LABELS} if over == "a classifier" else {"num_labels": 3}
    model = save_encoder(MODELS[name], tmp_path / "model", kind, **labels)
    save_word_tokenizer(model, VOCAB_SIZE, end=False)
    expected = {}
    for seed, (task, num_labels) in enumerate((("SEQ_CLS", 3), ("SEQ_CLS", 5), ("TOKEN_CLS", 4))):
        lora = dict(HEADS_OF_TWO[name], r=3 + seed, use_dora=num_labels == 5)
        fields = {"num_labels": num_labels, "ignore_mismatched_sizes": True}
        adapter = tmp_path / f"{task}-{num_labels}"
        save_pooled_adapter(load(model, task, **fields), adapter, seed, task, **lora)
        expected[adapter.name] = load(model, task, adapter, **fields)
    with adaptrt.LLM(model_engine(model, tmp_path), tokenizer=model) as llm:
        for adapter_name in expected:
            llm.executor.add_adapter(adapter_name, tmp_path / adapter_name)
        cases = [(prompt, adapter_name) for prompt in PROMPTS for adapter_name in expected]
        found = llm.classify([text_of(prompt) for prompt, _ in cases], lora=[case[1] for case in cases])
        for (prompt, adapter_name), classes in zip(cases, found, strict=True):
            names = [f"LABEL_{number}" for number in range(5)]
            if over == "a classifier" and adapter_name == "SEQ_CLS-3":
                names = list(LABELS.values())
            check(classes, probabilities(expected[adapter_name], prompt), names)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("roberta", {"classifier.dense.weight": None, "classifier.dense.bias": None}, "has one layer; that of Roberta"),
        (
            "roberta",
            {"classifier.dense.bias": None},
            "has 'classifier.dense.weight' before its last layer; accepted: weight",
        ),
        ("roberta", {"classifier.dense.weight": np.zeros((36, 35), np.float32)}, r"classifier\.dense\.weight is \[36"),
        ("roberta", {"classifier.out_proj.weight": None}, "its classifier head has"),
        ("distilbert", {"pre_classifier.weight": None, "pre_classifier.bias": None}, "has one layer; that of Distil"),
        ("distilbert", {"pre_classifier.bias": np.zeros(35, np.float32)}, r"pre_classifier\.bias is \[35\]"),
        ("distilbert", {"pre_classifier.weight": np.full((36, 36), np.nan, np.float32)}, "has NaN"),
    ],
)
def test_heads_of_two_layers_that_cannot_be_used_are_refused(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = save_encoder(MODELS[name], tmp_path / "model")
    adapter = tmp_path / "adapter"
    save_pooled_adapter(load(model, "SEQ_CLS", num_labels=3), adapter, 1, "SEQ_CLS", **HEADS_OF_TWO[name])
    tensors = load_file(adapter / "adapter_model.safetensors")
    for tensor, value in change.items():
        del tensors[f"base_model.model.{tensor}"]
        if value is not None:
            tensors[f"base_model.model.{tensor}"] = value
    save_file(tensors, adapter / "adapter_model.safetensors")
    with (
        adaptrt.Executor(model_engine(model, tmp_path), adaptrt.ModelType.ENCODER_ONLY) as executor,
        pytest.raises(adaptrt.AdapterError, match=message),
    ):
        executor.add_adapter("broken", adapter)


def test_embeddings_do_not_read_the_pooler(llm: adaptrt.LLM, base: Path) -> None:
    assert any("pooler" in name for name in load_file(base / "whole" / "adapter_model.safetensors"))
    states = hidden_states(load_bare(base / "model", base / "whole"), PROMPTS[1])
    row = llm.embed(text_of(PROMPTS[1]), lora="whole")
    assert np.abs(row - states[0]).max() <= 1e-4 * float(np.ptp(states))


def test_classes_beside_embeddings_are_the_same_bits(llm: adaptrt.LLM) -> None:
    alone = {name: llm.classify(text_of(PROMPTS[2]), lora=name) for name in ("moods", "topics")}
    embedded = llm.embed(text_of(PROMPTS[1]), lora="whole")
    texts = [text_of(PROMPTS[2]), text_of(PROMPTS[2]), text_of(PROMPTS[0])]
    together = llm.classify(texts, lora=["moods", "topics", "moods"])
    for name, found in zip(alone, together, strict=False):
        assert found.probs.tobytes() == alone[name].probs.tobytes()
    assert llm.embed([text_of(PROMPTS[1])] * 3, lora=["whole", "plain", None])[0].tobytes() == embedded.tobytes()


def test_models_without_a_classifier_are_refused_by_name(llm: adaptrt.LLM, base: Path, tmp_path: Path) -> None:
    with pytest.raises(adaptrt.RequestError, match="the model is no classifier, nor is adapter 'plain'"):
        llm.classify("t3", lora="plain")
    # The adapter's head needs a pooler, and the model was saved without one.
    model = save_encoder(MODELS["bert"], tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if "pooler" not in k}, model / "model.safetensors", {"format": "pt"})
    with adaptrt.Executor(model_engine(model, tmp_path), adaptrt.ModelType.ENCODER_ONLY) as executor:
        with pytest.raises(adaptrt.AdapterError, match=r"tensor .*pooler\.dense\.lora_A\.weight"):
            executor.add_adapter("moods", base / "moods")
        executor.add_adapter("names", base / "names")
        path = tmp_path / "headed"
        save_pooled_adapter(load(model, "SEQ_CLS", num_labels=3), path, 1, "SEQ_CLS", target_modules=["query"])
        with pytest.raises(adaptrt.AdapterError, match="needs a pooler"):
            executor.add_adapter("headed", path)


def test_an_adapter_of_the_pooler_without_a_head_does_not_classify(tmp_path: Path) -> None:
    model = save_encoder(MODELS["bert"], tmp_path / "model", TASKS["SEQ_CLS"], id2label=LABELS)
    save_word_tokenizer(model, VOCAB_SIZE, end=False)
    for name, targets in (("whole", "all-linear"), ("plain", ["query"])):
        bare = load(model, "SEQ_CLS").bert
        save_pooled_adapter(bare, tmp_path / name, 3, "FEATURE_EXTRACTION", r=2, target_modules=targets)
    with adaptrt.LLM(model_engine(model, tmp_path), tokenizer=model) as llm:
        for name in ("whole", "plain"):
            llm.executor.add_adapter(name, tmp_path / name)
        llm.classify("t3 t4", lora="plain")
        for name in ("whole", "plain:0.5+whole:0.5"):
            with pytest.raises(adaptrt.RequestError, match="adapter 'whole' changes the pooler"):
                llm.classify("t3 t4", lora=name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_A.weight": None}, r"the pooler needs lora_A \[4, in\]"),
        ({"lora_A.weight": np.zeros((3, 36), np.float32)}, r"the pooler needs lora_A \[4, in\]"),
        ({"lora_A.weight": np.zeros((4, 35), np.float32)}, r"its weight is \[36, 36\]"),
        ({"lora_B.weight": np.full((36, 4), np.nan, np.float32)}, "has NaN"),
        ({"lora_B.weight": np.zeros((36, 4), np.int32)}, "is int32"),
        ({"lora_magnitude_vector": np.ones(36, np.float32)}, "needs a magnitude"),
        ({"hada_w1_a": np.zeros((36, 4), np.float32)}, "changes the pooler; accepted: LoRA and DoRA"),
    ],
)
def test_poolers_that_cannot_be_used_are_refused_by_name(
    llm: adaptrt.LLM, base: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    tensors = load_file(base / "moods" / "adapter_model.safetensors")
    for name, value in change.items():
        full = f"base_model.model.bert.pooler.dense.{name}"
        tensors.pop(full, None)
        if value is not None:
            tensors[full] = value
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_bytes((base / "moods" / "adapter_config.json").read_bytes())
    with pytest.raises(adaptrt.AdapterError, match=message):
        llm.executor.add_adapter("broken", tmp_path)
    assert "broken" not in llm.executor.adapters.names


def test_over_http(llm: adaptrt.LLM, base: Path) -> None:
    modules = [f"{name}={base / name}" for name in ("moods", "whole")]
    (base / "engine" / "tokenizer.json").write_bytes((base / "model" / "tokenizer.json").read_bytes())
    with http_server(base / "engine", "--served_model_name", "base", "--lora_modules", *modules) as address:

        def post(path: str, **body: Any) -> httpx.Response:
            return httpx.post(address + path, json=body, timeout=60)

        texts = [text_of(prompt) for prompt in PROMPTS]
        answer = post("/v1/embeddings", model="whole", input=texts).json()
        for entry, row in zip(answer["data"], llm.embed(texts, lora="whole"), strict=True):
            assert np.asarray(entry["embedding"], np.float32).tobytes() == row.tobytes()
        answer = post("/classify", model="moods", input=texts).json()
        for entry, found in zip(answer["data"], llm.classify(texts, lora="moods"), strict=True):
            assert np.asarray(entry["probs"], np.float32).tobytes() == found.probs.tobytes()
        for path, fields, said in (
            ("/v1/embeddings", {"input": [3] * 201}, "maximum context length is 200 tokens"),
            ("/v1/completions", {"prompt": "t3"}, "The model generates nothing"),
            ("/classify", {"model": "whole", "input": "t3"}, "nor is adapter 'whole'"),
        ):
            refused = post(path, **fields)
            assert refused.status_code == 400
            assert said in refused.json()["error"]["message"]
        assert httpx.get(f"{address}/metrics", timeout=60).status_code == 200
        (card,) = [
            card for card in httpx.get(f"{address}/v1/models", timeout=60).json()["data"] if card["id"] == "base"
        ]
        assert card["max_model_len"] == 200


def save_pair_tokenizer(directory: Path) -> Tokenizer:
    """A word tokenizer that joins two texts like RoBERTa's and gives them token types like BERT's."""
    save_word_tokenizer(directory, VOCAB_SIZE, end=False)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> </s> $B:1 </s>:1", special_tokens=[("</s>", 1)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


PAIRS = [("t5 t9 t33", "t7"), ("t5 t9 t33", text_of(PROMPTS[2][:90])), ("t8", "t5 t9 t33")]


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "modernbert"])
def test_pairs_of_texts(name: str, tmp_path: Path) -> None:
    """One class whose probability is a score, which is how cross-encoders score pairs of texts."""
    model = save_encoder(MODELS[name], tmp_path / "model", TASKS["SEQ_CLS"], num_labels=1)
    tokenizer = save_pair_tokenizer(model)
    target = "Wqkv" if name == "modernbert" else "lin1" if name == "distilbert" else "query"
    save_pooled_adapter(load(model, "SEQ_CLS"), tmp_path / "law", 1, "SEQ_CLS", target_modules=[target])
    engine = model_engine(model, tmp_path)
    (engine / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    scores = {}
    with adaptrt.LLM(engine) as llm:
        llm.executor.add_adapter("law", tmp_path / "law")
        for lora, adapter in ((None, None), ("law", tmp_path / "law")):
            reference_model = load(model, "SEQ_CLS", adapter)
            scores[lora] = [found.probs[0] for found in llm.classify(PAIRS, lora=lora)]
            for (first, second), score in zip(PAIRS, scores[lora], strict=True):
                joined = tokenizer.encode(first, second)
                assert joined.ids.count(1) == 3
                given = {"input_ids": torch.tensor([joined.ids])}
                if name == "bert":
                    assert sum(joined.type_ids) > 1
                    given["token_type_ids"] = torch.tensor([joined.type_ids])
                with torch.no_grad():
                    expected = torch.sigmoid(reference_model(**given).logits[0, 0].double())
                assert abs(float(score) - float(expected)) <= TOLERANCE
        # A pair and a single text in one call, and a tuple that still means two texts.
        pair, text = llm.classify([PAIRS[0], "t7"])
        assert (pair.probs[0], len(llm.classify(("t7", "t8")))) == (scores[None][0], 2)
        assert text.probs.tobytes() == llm.classify("t7").probs.tobytes()
    if name in ("bert", "roberta"):
        check_scores_over_http(engine, tmp_path / "law", scores)


def check_scores_over_http(engine: Path, adapter: Path, scores: dict[str | None, list[float]]) -> None:
    with http_server(engine, "--served_model_name", "base", "--lora_modules", f"law={adapter}") as address:

        def post(**body: Any) -> httpx.Response:
            return httpx.post(f"{address}/score", json=body, timeout=60)

        firsts, seconds = ([pair[side] for pair in PAIRS] for side in (0, 1))
        for lora in (None, "law"):
            answer = post(model=lora or "base", text_1=firsts, text_2=seconds).json()
            assert answer["model"] == (lora or "base")
            assert [np.float32(entry["score"]) for entry in answer["data"]] == scores[lora]
            assert [(entry["index"], entry["object"]) for entry in answer["data"]] == [(i, "score") for i in range(3)]
            assert answer["usage"]["prompt_tokens"] > 90
        answer = post(text_1=firsts[0], text_2=seconds[:2]).json()
        assert [np.float32(entry["score"]) for entry in answer["data"]] == scores[None][:2]
        for fields, said in (
            ({"text_1": firsts[:2], "text_2": seconds}, "text_1 has 2 texts and text_2 3"),
            ({"text_1": "t3", "text_2": []}, "text_2"),
            ({"text_1": "t3", "text_2": [[3, 4]]}, "text_2"),
            ({"text_1": "t3", "text_2": "t4 " * 201}, "maximum context length is 200 tokens; text_2 has 205"),
        ):
            refused = post(**fields)
            assert refused.status_code == 400
            assert said in refused.text
        check_ranks_over_http(address)


def check_ranks_over_http(address: str) -> None:
    """Reranking returns the scores of /score, best first, in the forms that Jina's and Cohere's clients use."""
    query, documents = PAIRS[0][0], ["t7", text_of(PROMPTS[2][:90]), "t5 t9 t33", "t7"]

    def post(path: str = "/rerank", **body: Any) -> httpx.Response:
        return httpx.post(f"{address}{path}", json={"query": query, "documents": documents, **body}, timeout=60)

    for lora in ("base", "law"):
        body = {"model": lora, "text_1": query, "text_2": documents}
        scored = httpx.post(f"{address}/score", json=body, timeout=60).json()
        scores = [entry["score"] for entry in scored["data"]]
        best = sorted(range(4), key=lambda i: (-scores[i], i))
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            answer = post(path, model=lora).json()
            assert answer["model"] == lora
            assert [(one["index"], one["relevance_score"]) for one in answer["results"]] == [
                (i, scores[i]) for i in best
            ]
            assert [one["document"]["text"] for one in answer["results"]] == [documents[i] for i in best]
            assert answer["usage"]["total_tokens"] == scored["usage"]["total_tokens"]
        forms = [documents[0], *({"text": text} for text in documents[1:])]
        (only,) = post(model=lora, documents=forms, top_n=1, return_documents=False).json()["results"]
        assert only == {"index": best[0], "relevance_score": scores[best[0]]}
    for fields, said in (
        ({"documents": []}, "documents"),
        ({"documents": [{"image": "x"}]}, "documents"),
        ({"top_n": 0}, "top_n"),
        ({"documents": ["t3", "t4 " * 201]}, "maximum context length is 200 tokens; documents[1] has"),
    ):
        refused = post(**fields)
        assert refused.status_code == 400
        assert said in refused.text


def test_token_types_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Checks the number of token types and their values; models with one type accept none."""
    last = PoolingParams(PoolingType.LAST)
    for name, types, said in (
        ("bert", [0, 1], r"token_type_ids has 2 elements; accepted: 3, one for each of input_token_ids"),
        ("bert", [0, 1, 3], r"token_type_ids\[2\] is 3; accepted: 0 to 2"),
        ("bert", [0, -1, 1], r"token_type_ids\[1\] is -1; accepted: 0 to 2"),
        ("roberta", [0, 0, 0], r"token_type_ids is given; accepted: None, because the model has one kind of tokens"),
    ):
        engine = tmp_path / name
        if not engine.is_dir():
            engine_of(save_encoder(MODELS[name], tmp_path / f"{name}-model"), engine)
        with adaptrt.Executor(engine, ENCODER) as executor:
            with pytest.raises(adaptrt.RequestError, match=said):
                executor.enqueue_request(adaptrt.Request([3, 4, 5], 0, pooling_params=last, token_type_ids=types))
            assert len(run_pooled(executor, [3, 4, 5], last)) == 36


def test_token_types_do_not_depend_on_the_crowd(tmp_path: Path) -> None:
    """Requests with token types and requests without them share steps, in any order."""
    engine = engine_of(save_encoder(MODELS["bert"], tmp_path / "model"), tmp_path / "engine")
    prompts = [([7, 8, 9], None), ([7, 8, 9], [0, 1, 1]), ([5] * 40, None), ([7, 8, 9], [2, 2, 2]), ([4], [1])]

    def request(prompt: list[int], types: list[int] | None) -> adaptrt.Request:
        return adaptrt.Request(prompt, 0, pooling_params=PoolingParams(PoolingType.ALL), token_type_ids=types)

    def rows(executor: adaptrt.Executor, requests: list[adaptrt.Request]) -> list[bytes]:
        ids = [executor.enqueue_request(one) for one in requests]
        return [executor.await_responses(one)[0].result.pooled_output.tobytes() for one in ids]

    with adaptrt.Executor(engine, ENCODER) as executor:
        alone = [rows(executor, [request(*prompt)])[0] for prompt in prompts]
        assert len(set(alone)) == len(prompts)
        assert rows(executor, [request([7, 8, 9], [0, 0, 0])]) == alone[:1]
        for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 1, 4, 3]):
            assert rows(executor, [request(*prompts[i]) for i in order]) == [alone[i] for i in order]


def test_scores_need_one_class(tmp_path: Path) -> None:
    for task, message in (("SEQ_CLS", "classifies texts and has 3"), ("TOKEN_CLS", "classifies tokens and has 3")):
        directory = tmp_path / task
        model = save_encoder(MODELS["distilbert"], directory / "model", TASKS[task], id2label=LABELS)
        save_pair_tokenizer(model)
        engine = model_engine(model, directory)
        (engine / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
        with http_server(engine) as address:
            refused = httpx.post(f"{address}/score", json={"text_1": "t3", "text_2": "t4"}, timeout=60)
            assert refused.status_code == 400
            assert message in refused.json()["error"]["message"]


def test_inspect_tells_of_classifiers(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["inspect", str(base / "moods"), "--engine", str(base / "engine")]) == 0
    said = capsys.readouterr().out
    assert "and a classifier's head" in said
    assert json.loads((base / "moods" / "adapter_config.json").read_text())["task_type"] == "SEQ_CLS"
