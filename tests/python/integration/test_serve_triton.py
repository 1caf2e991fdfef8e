"""Triton's API of a server process, called with Triton's client: the executor's answers, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tritonclient.utils import InferenceServerException

import adaptrt
from adaptrt.formats.adapter import convert_adapter
from support.http_server import http_server
from support.models import ModelSpec, save_adapter, save_model
from support.serving import build_engine

SPEC = ModelSpec()
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
MODEL = "base"
NAMED = "clerk"
PROMPT = [7, 8, 9, 10, 11]
MAX_TOKENS = 12
NUMPY = {"INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32, "BOOL": np.bool_, "BYTES": np.object_}
DATATYPES = {"float16": "FP16", "bfloat16": "BF16", "float32": "FP32"}


@dataclass(frozen=True)
class Place:
    model: Path
    engine: Path
    tokenizer: Tokenizer
    adapters: dict[str, Path]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    root = tmp_path_factory.mktemp("triton")
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(["<s>", "</s>", *LETTERS])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    model = save_model(SPEC, root / "model")
    tokenizer.save(str(model / "tokenizer.json"))
    adapters = {
        name: save_adapter(model, root / name, seed, strength=3.0, r=4, use_dora=seed == 2)
        for seed, name in enumerate([NAMED, "poet", "pirate"])
    }
    return Place(model, build_engine(model, root), tokenizer, adapters)


@pytest.fixture(scope="module")
def executor(place: Place) -> Iterator[adaptrt.Executor]:
    """Yields the executor whose answers the server must give."""
    with adaptrt.Executor(place.engine, executor_config=adaptrt.ExecutorConfig(num_threads=1)) as made:
        yield made


@pytest.fixture(scope="module")
def address(place: Place) -> Iterator[str]:
    with http_server(
        place.engine, "--served_model_name", MODEL, "other", "--num_threads", 1,
        "--lora_modules", f"{NAMED}={place.adapters[NAMED]}",
    ) as started:  # fmt: skip
        yield started


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(address.removeprefix("http://")) as made:
        yield made


def tensor(name: str, datatype: str, value: Any, *, binary: bool = True) -> triton.InferInput:
    array = value if isinstance(value, np.ndarray) else np.array(value, NUMPY[datatype])
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, binary_data=binary)
    return made


def inputs(binary: bool = True, **more: tuple[str, Any]) -> list[triton.InferInput]:
    given = {
        "input_ids": ("INT32", [PROMPT]),
        "input_lengths": ("INT32", [[len(PROMPT)]]),
        "request_output_len": ("INT32", [[MAX_TOKENS]]),
        **more,
    }
    return [tensor(name, datatype, value, binary=binary) for name, (datatype, value) in given.items()]


def lora_inputs(place: Place, name: str, task_id: int, storage: str = "float32") -> dict[str, tuple[str, Any]]:
    converted = convert_adapter(place.adapters[name], storage_dtype=storage, base=place.model)
    return {
        "lora_task_id": ("UINT64", [[task_id]]),
        "lora_weights": (DATATYPES[storage], np.asarray(converted.weights)),
        "lora_config": ("INT32", np.asarray(converted.config)),
    }


def expected(executor: adaptrt.Executor, lora: adaptrt.LoraConfig | None = None, **fields: Any) -> adaptrt.Result:
    request = adaptrt.Request(PROMPT, MAX_TOKENS, lora_config=lora, **fields)
    (response,) = executor.await_responses(executor.enqueue_request(request))
    assert not response.has_error(), response.error_msg
    return response.result


def tokens_of(answer: triton.InferResult) -> list[int]:
    return list(answer.as_numpy("output_ids")[0, 0])


def test_repository_index_and_metadata(client: triton.InferenceServerClient, address: str) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    index = client.get_model_repository_index()
    assert [(model["name"], model["state"]) for model in index] == [(name, "READY") for name in (MODEL, "other", NAMED)]
    for model in (MODEL, NAMED):
        assert client.is_model_ready(model)
        assert client.is_model_ready(model, "1")
        metadata = client.get_model_metadata(model, "1")
        names = [described["name"] for described in metadata["inputs"]]
        assert (metadata["name"], metadata["versions"]) == (model, ["1"])
        assert {"input_ids", "lora_task_id", "lora_weights", "lora_config"} <= set(names)
        assert [described["name"] for described in client.get_model_config(model)["input"]] == names
    assert not client.is_model_ready("nobody")
    with pytest.raises(InferenceServerException, match="The model 'nobody' does not exist"):
        client.get_model_metadata("nobody")
    with pytest.raises(InferenceServerException, match="version '2' does not exist"):
        client.get_model_metadata(MODEL, "2")
    with pytest.raises(InferenceServerException, match="Not Found"):
        client.load_model(MODEL)
    assert httpx.get(f"{address}/v2/nothing").json().keys() == {"error"}


@pytest.mark.parametrize("binary", [True, False])
def test_answers_are_the_executors(
    client: triton.InferenceServerClient, executor: adaptrt.Executor, binary: bool
) -> None:
    asked = inputs(
        binary,
        temperature=("FP32", [[1.5]]), runtime_top_k=("INT32", [[9]]), runtime_top_p=("FP32", [[0.75]]),
        random_seed=("UINT64", [[2**63 + 5]]), repetition_penalty=("FP32", [[1.25]]), end_id=("INT32", [[1]]),
        stop_words_list=("INT32", [[[60, 59, 58], [2, 3, -1]]]), bad_words_list=("INT32", [[[12, 0], [1, -1]]]),
        return_log_probs=("BOOL", [[True]]), return_context_logits=("BOOL", [[True]]),
        return_generation_logits=("BOOL", [[True]]),
    )  # fmt: skip
    answer = client.infer(MODEL, asked, request_id="mine")
    whole = expected(
        executor,
        end_id=1,
        stop_words=[[60, 59], [58]],
        bad_words=[[12]],
        sampling_config=adaptrt.SamplingConfig(
            temperature=1.5, top_k=9, top_p=0.75, seed=2**63 + 5, repetition_penalty=1.25
        ),
        output_config=adaptrt.OutputConfig(
            return_log_probs=True, return_context_logits=True, return_generation_logits=True
        ),
    )
    assert answer.get_response()["id"] == "mine"
    assert tokens_of(answer) == whole.output_token_ids[0]
    assert answer.as_numpy("sequence_length").tolist() == [[len(whole.output_token_ids[0])]]
    assert answer.as_numpy("context_logits").tobytes() == np.asarray(whole.context_logits).tobytes()
    assert answer.as_numpy("generation_logits").shape[:3] == (1, 1, len(whole.output_token_ids[0]) - len(PROMPT))
    assert answer.as_numpy("generation_logits").tobytes() == np.asarray(whole.generation_logits).tobytes()
    np.testing.assert_array_equal(answer.as_numpy("output_log_probs")[0, 0], np.array(whole.log_probs[0], np.float32))
    np.testing.assert_array_equal(answer.as_numpy("cum_log_probs")[0], np.array(whole.cum_log_probs, np.float32))


def test_outputs_are_those_that_are_listed_in_their_forms(
    client: triton.InferenceServerClient, executor: adaptrt.Executor, place: Place
) -> None:
    outputs = [
        triton.InferRequestedOutput("text_output", binary_data=True),
        triton.InferRequestedOutput("output_ids", binary_data=False),
    ]
    answer = client.infer(MODEL, inputs(exclude_input_in_output=("BOOL", [[True]])), outputs=outputs)
    tokens = expected(executor).output_token_ids[0][len(PROMPT) :]
    assert answer.get_output("output_ids")["data"] == tokens
    assert [output["name"] for output in answer.get_response()["outputs"]] == ["text_output", "output_ids"]
    assert answer.as_numpy("text_output")[0, 0].decode() == place.tokenizer.decode(tokens)


@pytest.mark.parametrize("storage", DATATYPES)
def test_a_tasks_weights_are_sent_once(
    client: triton.InferenceServerClient, executor: adaptrt.Executor, place: Place, storage: str
) -> None:
    task_id = 100 + list(DATATYPES).index(storage)
    lora = lora_inputs(place, "pirate", task_id, storage)
    alone = inputs(lora_task_id=lora["lora_task_id"])
    with pytest.raises(InferenceServerException, match=f"LoRA task {task_id} not found.*send LoRA weights") as raised:
        client.infer(MODEL, alone)
    assert raised.value.status() == "404"
    adapter = adaptrt.LoraConfig(task_id, lora["lora_weights"][1], lora["lora_config"][1])
    tokens = expected(executor, adapter).output_token_ids[0]
    assert tokens != expected(executor).output_token_ids[0]
    assert tokens_of(client.infer(MODEL, inputs(**lora))) == tokens
    assert tokens_of(client.infer(MODEL, alone)) == tokens
    with pytest.raises(InferenceServerException, match=str(task_id)):
        client.infer(MODEL, inputs(**lora_inputs(place, "poet", task_id, storage)))
    assert tokens_of(client.infer(MODEL, alone)) == tokens


def test_a_named_adapter_is_a_model(
    client: triton.InferenceServerClient, executor: adaptrt.Executor, place: Place
) -> None:
    adapter = adaptrt.LoraConfig.from_peft(77, place.adapters[NAMED], executor.engine)
    assert tokens_of(client.infer(NAMED, inputs())) == expected(executor, adapter).output_token_ids[0]
    with pytest.raises(InferenceServerException, match=f"'lora_task_id' names an adapter.*'{NAMED}'"):
        client.infer(NAMED, inputs(lora_task_id=("UINT64", [1])))


def events(address: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with httpx.stream("POST", f"{address}/v2/models/{MODEL}/generate_stream", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        frames = "".join(answer.iter_text()).split("\n\n")
    return [json.loads(frame.removeprefix("data: ")) for frame in frames if frame]


def test_generate_and_generate_stream(address: str, executor: adaptrt.Executor, place: Place) -> None:
    whole = expected(executor, output_config=adaptrt.OutputConfig(return_log_probs=True))
    tokens = whole.output_token_ids[0][len(PROMPT) :]
    by_ids = {"input_ids": PROMPT, "max_tokens": MAX_TOKENS, "return_log_probs": True, "id": "mine"}
    once = httpx.post(f"{address}/v2/models/{MODEL}/versions/1/generate", json=by_ids).json()
    assert once["output_ids"] == PROMPT + tokens
    assert (once["sequence_length"], once["id"], once["model_name"]) == (len(PROMPT) + len(tokens), "mine", MODEL)
    pieces = events(address, by_ids)
    assert [token for piece in pieces for token in piece["output_ids"]] == tokens
    log_probs = np.array(whole.log_probs[0], np.float32)
    np.testing.assert_array_equal(np.array(once["output_log_probs"], np.float32), log_probs)
    streamed = [value for piece in pieces for value in piece["output_log_probs"]]
    np.testing.assert_array_equal(np.array(streamed, np.float32), log_probs)

    text = place.tokenizer.decode(PROMPT)
    by_text = {
        "text_input": text,
        "parameters": {"max_tokens": MAX_TOKENS, "end_id": -1},
        "stop_words": "",
        "bad_words": "",
    }
    answer = place.tokenizer.decode(tokens)
    assert httpx.post(f"{address}/v2/models/{MODEL}/generate", json=by_text).json()["text_output"] == text + answer
    assert "".join(piece["text_output"] for piece in events(address, by_text)) == answer
    (single,) = events(address, {**by_text, "stream": False, "exclude_input_in_output": True})
    assert single["text_output"] == answer
    # The stop text starts at the third letter, so it lies within the answer.
    stopped = events(address, {**by_text, "stop_words": [answer[2:4], "??"]})
    assert "".join(piece["text_output"] for piece in stopped) == answer[: answer.find(answer[2:4])]


def test_pieces_come_before_the_answer_is_whole(address: str) -> None:
    # The server sends everything that is ready as one piece; on a busy machine this may be the whole answer.
    for _ in range(50):
        pieces = events(address, {"input_ids": PROMPT, "max_tokens": 600})
        assert sum(piece["sequence_length"] for piece in pieces) == 600
        if len(pieces) > 1:
            return
    pytest.fail("every answer came whole")


REFUSED: list[tuple[dict[str, tuple[str, Any]], str]] = [
    ({"input_ids": ("INT32", [PROMPT, PROMPT])}, "'input_ids'.*batch dimension must be 1"),
    ({"input_ids": ("FP32", [[1.0]])}, "'input_ids': datatype is 'FP32'; accepted: INT32"),
    ({"input_ids": ("INT32", [[61]]), "input_lengths": ("INT32", [1])}, r"input_token_ids\[0\] is 61"),
    ({"input_lengths": ("INT32", [9])}, "'input_lengths' is 9"),
    ({"prompt_table": ("FP32", [1.0])}, "input 'prompt_table' is not known"),
    ({"request_output_len": ("INT32", [0])}, "max_tokens is 0"),
    ({"request_output_len": ("INT32", [2**31 - 1])}, "max_seq_len"),
    ({"beam_width": ("INT32", [2])}, "beam_width is 2"),
    ({"temperature": ("FP32", [np.nan])}, "temperature"),
    ({"streaming": ("BOOL", [True])}, "use generate_stream"),
    ({"lora_task_id": ("UINT64", [2**63])}, "'lora_task_id' is 9223372036854775808"),
    ({"lora_task_id": ("UINT64", [5]), "lora_config": ("INT32", [[1, 0, 1]])}, "'lora_config' is given without"),
    (
        {
            "lora_task_id": ("UINT64", [5]),
            "lora_config": ("INT32", [[1, 0, 1, 0]]),
            "lora_weights": ("FP32", [[1.0, 2.0]]),
        },
        "LoRA task 5",
    ),
]


@pytest.mark.parametrize(("change", "said"), REFUSED)
def test_invalid_requests_are_refused_by_name_and_the_server_goes_on(
    client: triton.InferenceServerClient, change: dict[str, tuple[str, Any]], said: str
) -> None:
    with pytest.raises(InferenceServerException, match=said) as raised:
        client.infer(MODEL, inputs(**change))
    assert raised.value.status() == "400"
    assert client.infer(MODEL, inputs()).as_numpy("sequence_length").item() == len(PROMPT) + MAX_TOKENS


@pytest.mark.parametrize(
    ("body", "headers", "status", "said"),
    [
        (b"{", {}, 400, "not JSON"),
        (b"[]", {}, 400, "expected an object"),
        (b'{"inputs": [], "extra": 1}', {}, 400, "extra: is not known here"),
        (b'{"inputs": [{"name": "a"}]}', {}, 400, "inputs.0.shape"),
        (b'{"inputs": []}', {"Inference-Header-Content-Length": "99"}, 400, "accepted: 0 to the body's 14 bytes"),
        (b'{"inputs": []}xyz', {"Inference-Header-Content-Length": "14"}, 400, "3 bytes of binary data"),
        (b'{"inputs": [], "parameters": {"priority": 3}}', {}, 400, "'priority' is not known"),
        (
            b'{"inputs": [], "outputs": [{"name": "a", "parameters": {"classification": 2}}]}',
            {},
            400,
            "'classification'",
        ),
        (b'{"inputs": []}', {"Content-Encoding": "gzip"}, 415, "gzip"),
        (b'{"inputs": ' + b"[" * 200 + b"]" * 200 + b"}", {}, 400, "nested deeper"),
    ],
)
def test_bodies_that_are_no_requests(
    address: str, body: bytes, headers: dict[str, str], status: int, said: str
) -> None:
    answer = httpx.post(f"{address}/v2/models/{MODEL}/infer", content=body, headers=headers)
    assert (answer.status_code, list(answer.json())) == (status, ["error"])
    assert said in answer.json()["error"]


def test_a_task_that_was_evicted_has_to_be_sent_again(place: Place) -> None:
    first = lora_inputs(place, "poet", 1)
    host_bytes = 120_000  # one adapter of the engine's largest rank, and several of these
    with (
        http_server(place.engine, "--served_model_name", MODEL, "--host_cache_bytes", host_bytes) as address,
        triton.InferenceServerClient(address.removeprefix("http://")) as client,
    ):
        tokens = tokens_of(client.infer(MODEL, inputs(**first)))
        # Rows are stored without padding, so these adapters take only slightly more room than there is.
        for task_id in range(2, 2 + 4 * host_bytes // first["lora_weights"][1].nbytes):
            client.infer(MODEL, inputs(**{**first, "lora_task_id": ("UINT64", [task_id])}))
        with pytest.raises(InferenceServerException, match="LoRA task 1 not found in cache"):
            client.infer(MODEL, inputs(lora_task_id=first["lora_task_id"]))
        assert tokens_of(client.infer(MODEL, inputs(**first))) == tokens
