"""Classifiers against transformers + PEFT: classification models, and adapters that bring their heads."""

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

import adaptrt
from adaptrt import PoolingParams, PoolingType
from support.http_server import http_server
from support.models import ATTENTION_MODULES, ModelSpec, save_adapter, save_model
from support.pooled import hidden_states, run_pooled, save_pooled_adapter, save_random, save_word_tokenizer
from support.serving import build_engine, run_command

SPEC = ModelSpec(num_key_value_heads=3)
PROMPTS = [[7], [3, 44, 5, 60, 7, 3, 3, 12], [*range(2, 60), *range(2, 40)]]
# Tolerance for probabilities: float32 sums in a different order.
TOLERANCE = 2e-5
LABELS = {0: "cold", 1: "warm", 2: "hot"}
TASKS = {
    "SEQ_CLS": transformers.AutoModelForSequenceClassification,
    "TOKEN_CLS": transformers.AutoModelForTokenClassification,
}
SIZES = {
    "vocab_size": 61, "hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1,
    "head_dim": 12, "intermediate_size": 37, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
    "id2label": LABELS,
}  # fmt: skip
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "mistral": transformers.MistralConfig(**SIZES),
    "qwen2": transformers.Qwen2Config(**{**SIZES, "num_key_value_heads": 3}),
    "qwen3": transformers.Qwen3Config(**SIZES),
    "gemma2": transformers.Gemma2Config(**SIZES, query_pre_attn_scalar=20),
    "gpt2": transformers.GPT2Config(
        vocab_size=61, n_embd=36, n_layer=2, n_head=3, bos_token_id=0, eos_token_id=1, pad_token_id=1, id2label=LABELS
    ),
}


def text_of(prompt: list[int]) -> str:
    return " ".join(f"t{token}" for token in prompt)


def probabilities(model: Any, prompt: list[int]) -> np.ndarray:
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0].double()
    kind = model.config.problem_type
    if kind == "regression":
        return logits.numpy()
    return (torch.sigmoid(logits) if kind == "multi_label_classification" else torch.softmax(logits, -1)).numpy()


def check(found: Any, expected: np.ndarray, names: Any = LABELS) -> None:
    for one, probs in zip(found, expected, strict=True) if expected.ndim == 2 else [(found, expected)]:
        np.testing.assert_allclose(one.probs, probs, atol=TOLERANCE)
        assert one.label == names[int(probs.argmax())]


def plain(directory: Path, root: Path) -> Path:
    """Builds an engine without LoRA."""
    return build_engine(directory, root, lora_plugin="disable", dora_plugin="disable", max_input_len=128)


@pytest.mark.parametrize(
    ("family", "task"),
    [*((family, "SEQ_CLS") for family in CONFIGS), *((family, "TOKEN_CLS") for family in ("qwen3", "gpt2"))],
)
def test_models_for_classification(family: str, task: str, tmp_path: Path) -> None:
    model = TASKS[task].from_config(CONFIGS[family], attn_implementation="eager").eval()
    directory = save_random(model, tmp_path / "model")
    save_word_tokenizer(directory, SPEC.vocab_size, end=False)
    with adaptrt.LLM(plain(directory, tmp_path)) as llm:
        found = llm.classify([text_of(prompt) for prompt in PROMPTS])
        for prompt, classes in zip(PROMPTS, found, strict=True):
            check(classes, probabilities(model, prompt))
        check(llm.classify(text_of(PROMPTS[1])), probabilities(model, PROMPTS[1]))
        if task == "SEQ_CLS":
            # transformers classifies by the last token that is not padding.
            check(llm.classify(text_of(PROMPTS[1]) + " </s> </s>"), probabilities(model, [*PROMPTS[1], 1, 1]))
        with pytest.raises(adaptrt.RequestError, match="the model has no lm_head"):
            llm.generate("t3")


@pytest.mark.parametrize(
    ("fields", "labels"),
    [
        ({"problem_type": "multi_label_classification", "id2label": LABELS}, LABELS),
        ({"problem_type": "regression", "num_labels": 1}, {0: "LABEL_0"}),
        ({"num_labels": 2}, {0: "LABEL_0", 1: "LABEL_1"}),
        ({"problem_type": "single_label_classification", "num_labels": 4}, {i: f"LABEL_{i}" for i in range(4)}),
    ],
)
def test_problem_types(fields: dict[str, Any], labels: dict[int, str], tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**{**{k: v for k, v in SIZES.items() if k != "id2label"}, **fields})
    model = TASKS["SEQ_CLS"].from_config(config, attn_implementation="eager").eval()
    directory = save_random(model, tmp_path / "model")
    save_word_tokenizer(directory, SPEC.vocab_size, end=False)
    with adaptrt.LLM(plain(directory, tmp_path)) as llm:
        check(llm.classify(text_of(PROMPTS[1])), probabilities(model, PROMPTS[1]), labels)


def test_bfloat16_stays_close(tmp_path: Path) -> None:
    model = TASKS["SEQ_CLS"].from_config(CONFIGS["qwen3"], attn_implementation="eager").eval()
    directory = save_random(model, tmp_path / "model")
    save_word_tokenizer(directory, SPEC.vocab_size, end=False)
    with adaptrt.LLM(build_engine(directory, tmp_path, "bfloat16")) as llm:
        for prompt in PROMPTS:
            # The tolerance covers probabilities of three classes after two layers with eight-bit values.
            np.testing.assert_allclose(llm.classify(text_of(prompt)).probs, probabilities(model, prompt), atol=0.08)


ADAPTERS = {
    "moods": {"task_type": "SEQ_CLS", "num_labels": 3, "seed": 1, "r": 4},
    "topics": {"task_type": "SEQ_CLS", "num_labels": 5, "seed": 2, "r": 4, "use_dora": True},
    "names": {"task_type": "TOKEN_CLS", "num_labels": 4, "seed": 3, "r": 3},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("classifiers")
    model = save_model(SPEC, root / "model")
    save_word_tokenizer(model, SPEC.vocab_size, end=False)
    for name, fields in ADAPTERS.items():
        lora = {key: value for key, value in fields.items() if key != "num_labels"}
        save_pooled_adapter(load(model, fields), root / name, target_modules=ATTENTION_MODULES, **lora)
    # Only the trained model's config.json has the names of the classes.
    (root / "moods" / "config.json").write_text(json.dumps({"id2label": LABELS}))
    save_adapter(model, root / "plain", 5, r=4)
    return root


def load(model: Path, fields: dict[str, Any]) -> Any:
    settings = {"num_labels": fields["num_labels"], "dtype": torch.float32, "attn_implementation": "eager"}
    return TASKS[fields["task_type"]].from_pretrained(model, **settings)


@pytest.fixture(scope="module")
def llm(base: Path) -> Iterator[adaptrt.LLM]:
    with adaptrt.LLM(build_engine(base / "model", base, max_num_tokens=128)) as made:
        for name in [*ADAPTERS, "plain"]:
            made.executor.add_adapter(name, base / name)
        yield made


def reference(base: Path, name: str) -> Any:
    return peft.PeftModel.from_pretrained(load(base / "model", ADAPTERS[name]), base / name).eval()


def names_of(name: str) -> dict[int, str]:
    return LABELS if name == "moods" else {i: f"LABEL_{i}" for i in range(ADAPTERS[name]["num_labels"])}


def test_adapters_with_heads_of_their_own(llm: adaptrt.LLM, base: Path) -> None:
    models = {name: reference(base, name) for name in ADAPTERS}
    cases = [(prompt, name) for prompt in PROMPTS for name in ADAPTERS]
    found = llm.classify([text_of(prompt) for prompt, _ in cases], lora=[name for _, name in cases])
    for (prompt, name), classes in zip(cases, found, strict=True):
        check(classes, probabilities(models[name], prompt), names_of(name))


def test_an_adapters_hidden_states_are_there_without_its_head(llm: adaptrt.LLM, base: Path) -> None:
    states = hidden_states(reference(base, "moods").base_model.model.model, PROMPTS[1])
    rows = run_pooled(llm.executor, PROMPTS[1], PoolingParams(PoolingType.ALL), "moods")
    assert np.abs(rows - states).max() <= 1e-4 * float(np.ptp(states))


def test_classes_beside_what_others_generate(llm: adaptrt.LLM) -> None:
    """Classes have the same bits as when the request runs alone."""
    alone = {name: llm.classify(text_of(PROMPTS[2]), lora=name) for name in ADAPTERS}
    words = llm.generate(text_of(PROMPTS[1]), lora="plain", max_tokens=20).token_ids
    answers = [llm.stream(text_of(PROMPTS[1]), lora=name, max_tokens=20) for name in ("plain", None)]
    for answer in answers:
        next(answer)
    together = llm.classify([text_of(PROMPTS[2])] * 3, lora=list(ADAPTERS))
    for answer in answers:
        list(answer)
    assert llm.generate(text_of(PROMPTS[1]), lora="plain", max_tokens=20).token_ids == words
    for expected, found in zip(alone.values(), together, strict=True):
        pairs = zip(expected, found, strict=True) if isinstance(expected, list) else [(expected, found)]
        for one, other in pairs:
            assert one.probs.tobytes() == other.probs.tobytes()


def test_classifiers_are_not_taken_for_what_they_are_not(llm: adaptrt.LLM, base: Path) -> None:
    for name in ("moods", "names", "plain:0.5+moods:0.5"):
        with pytest.raises(adaptrt.RequestError, match=r"is a classifier and cannot generate"):
            llm.generate("t3", lora=name)
    with pytest.raises(adaptrt.RequestError, match="the model is no classifier, nor is adapter 'plain'"):
        llm.classify("t3", lora="plain")
    with pytest.raises(adaptrt.RequestError, match="the model is no classifier; accepted: models for classification"):
        llm.classify("t3")
    with pytest.raises(adaptrt.AdapterError, match=r"head does not fit into a request's tensors; use its directory"):
        adaptrt.LoraConfig.from_peft(1, base / "moods", llm.executor.engine)
    with pytest.raises(adaptrt.AdapterError, match="has no adapter named 'nobody'"):
        llm.classify("t3", lora="nobody")
    llm.generate("t3", lora="plain", max_tokens=1)


def damaged(base: Path, path: Path, change: dict[str, Any]) -> Path:
    """Copies an adapter with other tensors of the head, or without them."""
    path.mkdir()
    tensors = load_file(base / "moods" / "adapter_model.safetensors")
    for name, value in change.items():
        tensors.pop(f"base_model.model.{name}", None)
        if value is not None:
            tensors[f"base_model.model.{name}"] = value
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text((base / "moods" / "adapter_config.json").read_text())
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"score.weight": None}, "its classifier head has none"),
        ({"score.weight": np.zeros((3, 35), np.float32)}, r"weight \[3, 35\]; the model's hidden size is 36"),
        ({"score.weight": np.zeros((0, 36), np.float32)}, r"score.weight is \[0, 36\]; expected 2 dimensions"),
        ({"score.weight": np.zeros(36, np.float32)}, r"score.weight is \[36\]; expected 2 dimensions"),
        ({"score.weight": np.zeros((3, 36), np.int32)}, "score.weight is int32"),
        ({"score.weight": np.full((3, 36), np.nan, np.float32)}, "score.weight has NaN"),
        ({"score.bias": np.zeros(2, np.float32)}, r"score.bias is \[2\], and score.weight \[3, 36\]"),
        ({"classifier.weight": np.zeros((3, 36), np.float32)}, "head has '(score|classifier)' and"),
        ({"lm_head.weight": np.zeros((61, 36), np.float32)}, r"lm_head\.weight"),
    ],
)
def test_heads_that_cannot_be_used_are_refused_by_name(
    llm: adaptrt.LLM, base: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(adaptrt.AdapterError, match=message):
        llm.executor.add_adapter("broken", damaged(base, tmp_path / "broken", change))
    assert "broken" not in llm.executor.adapters.names


def test_files_that_were_cut_off_are_refused(llm: adaptrt.LLM, base: Path, tmp_path: Path) -> None:
    path = damaged(base, tmp_path / "broken", {})
    whole = (path / "adapter_model.safetensors").read_bytes()
    for length in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        (path / "adapter_model.safetensors").write_bytes(whole[:length])
        with pytest.raises(adaptrt.AdapterError):
            llm.executor.add_adapter("broken", path)
    (path / "adapter_model.safetensors").write_bytes(whole)
    llm.executor.add_adapter("broken", path)
    llm.executor.remove_adapter("broken")


def test_a_classifier_that_peft_was_not_told_of(llm: adaptrt.LLM, base: Path, tmp_path: Path) -> None:
    """PEFT writes the class of the trained model if the adapter has no task_type."""
    path = damaged(base, tmp_path / "untold", {})
    fields = json.loads((path / "adapter_config.json").read_text())
    trained = {"base_model_class": "LlamaForSequenceClassification", "parent_library": "transformers"}
    (path / "adapter_config.json").write_text(json.dumps({**fields, "task_type": None, "auto_mapping": trained}))
    llm.executor.add_adapter("untold", path)
    expected = llm.classify(text_of(PROMPTS[1]), lora="moods").probs
    assert llm.classify(text_of(PROMPTS[1]), lora="untold").probs.tobytes() == expected.tobytes()
    with pytest.raises(adaptrt.RequestError, match="is a classifier and cannot generate"):
        llm.generate("t3", lora="untold")
    with pytest.raises(adaptrt.AdapterError, match="a classifier or the like"):
        adaptrt.LoraConfig.from_peft(1, path, llm.executor.engine)
    llm.executor.remove_adapter("untold")


def test_names_of_classes_that_do_not_fit_are_refused(llm: adaptrt.LLM, base: Path, tmp_path: Path) -> None:
    path = damaged(base, tmp_path / "broken", {})
    for labels in ({"0": "a", "1": "b"}, {"0": "a", "1": 2, "2": "c"}, ["a", "b", "c"]):
        (path / "config.json").write_text(json.dumps({"id2label": labels}))
        with pytest.raises(adaptrt.AdapterError, match=r"id2label is .*; the adapter's head has 3 classes"):
            llm.executor.add_adapter("broken", path)


def test_a_classifier_that_is_replaced_brings_its_new_head(llm: adaptrt.LLM, base: Path, tmp_path: Path) -> None:
    llm.executor.add_adapter("changing", base / "moods")
    before = llm.classify("t3 t4", lora="changing")
    path = damaged(base, tmp_path / "other", {"score.weight": np.zeros((2, 36), np.float32)})
    llm.executor.add_adapter("changing", path, replace=True)
    assert before.probs.shape == (3,)
    np.testing.assert_array_equal(llm.classify("t3 t4", lora="changing").probs, [0.5, 0.5])
    llm.executor.add_adapter("changing", base / "plain", replace=True)
    with pytest.raises(adaptrt.RequestError, match="nor is adapter 'changing'"):
        llm.classify("t3", lora="changing")
    llm.executor.remove_adapter("changing")


def test_engines_carry_classifiers(base: Path, tmp_path: Path) -> None:
    engine = build_engine(base / "model", tmp_path, lora_dir=base / "moods")
    with adaptrt.LLM(engine) as llm:
        check(llm.classify(text_of(PROMPTS[1]), lora="moods"), probabilities(reference(base, "moods"), PROMPTS[1]))
        with pytest.raises(adaptrt.RequestError, match="is a classifier and cannot generate"):
            llm.generate("t3", lora="moods")


def test_classify_over_http(llm: adaptrt.LLM, base: Path) -> None:
    modules = [f"{name}={base / name}" for name in [*ADAPTERS, "plain"]]
    with http_server(base / "engine", "--served_model_name", "base", "--lora_modules", *modules) as address:

        def post(path: str, **body: Any) -> httpx.Response:
            return httpx.post(address + path, json=body, timeout=60)

        texts = [text_of(prompt) for prompt in PROMPTS]
        answer = post("/classify", model="moods", input=texts).json()
        assert (answer["object"], answer["model"]) == ("list", "moods")
        assert answer["usage"]["prompt_tokens"] == sum(map(len, PROMPTS))
        for i, (entry, expected) in enumerate(zip(answer["data"], llm.classify(texts, lora="moods"), strict=True)):
            assert (entry["index"], entry["label"], entry["num_classes"]) == (i, expected.label, 3)
            assert np.asarray(entry["probs"], np.float32).tobytes() == expected.probs.tobytes()
        (entry,) = post("/classify", model="names", input=PROMPTS[1]).json()["data"]
        expected = llm.classify(texts[1], lora="names")
        assert [text.strip() for text in entry["tokens"]] == [f"t{token}" for token in PROMPTS[1]]
        assert entry["labels"] == [one.label for one in expected]
        np.testing.assert_array_equal(np.asarray(entry["probs"], np.float32), [one.probs for one in expected])

        for path, fields, said in (
            ("/classify", {"model": "plain", "input": "t3"}, "nor is adapter 'plain'"),
            ("/classify", {"input": "t3"}, "the model is no classifier"),
            ("/classify", {"model": "moods", "input": ""}, "input is empty"),
            ("/classify", {"model": "moods", "input": "t3", "max_tokens": 4}, "max_tokens"),
            ("/v1/completions", {"model": "moods", "prompt": "t3"}, "is a classifier and cannot generate"),
            ("/v1/embeddings", {"input": "t3"}, "does not say how embeddings are pooled"),
        ):
            refused = post(path, **fields)
            assert refused.status_code == 400
            assert said in refused.json()["error"]["message"]
        assert post("/v1/completions", prompt="t3", max_tokens=2).status_code == 200


def test_inspect_says_what_there_is(base: Path, llm: adaptrt.LLM, capsys: pytest.CaptureFixture[str]) -> None:
    run_command("inspect", base / "moods")
    assert "and a classifier's head" in capsys.readouterr().out
    run_command("inspect", base / "plain", "--engine", base / "engine")
    assert "classifier's head" not in capsys.readouterr().out
