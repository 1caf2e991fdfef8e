"""Encoder-decoders in the server: prompts go to the encoder, and every answer equals the executor's."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tritonclient.http as triton
from tokenizers import Tokenizer, models

import adaptrt
from adaptrt.builder.build import build
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from support.encoder_decoders import MODELS, Seq2SeqReference, save_adapter_of, save_encoder_decoder
from support.http_server import http_server

TOKENIZER = Tokenizer(
    models.BPE(
        vocab={piece: i for i, piece in enumerate(["<s>", "</s>", "<unk>", *string.ascii_letters, *"012345"])},
        merges=[],
    )
)
CONFIG = BuildConfig(
    max_batch_size=8,
    max_num_tokens=64,
    max_seq_len=40,
    max_encoder_input_len=48,
    tokens_per_block=8,
    lora_config=LoraBuildConfig(max_lora_rank=16),
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
)
TEMPLATE = "{% for message in messages %}{{ message['role'] }}{{ message['content'] }}{% endfor %}"
PROMPTS = ["attention", "b", "behindANDbefore" * 3]
NAMES = ["base", "lora", "dora"]
RAW = {"return_token_ids": True}


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


@dataclasses.dataclass
class Served:
    """A server, and an executor over the same engine and adapters."""

    address: str
    client: openai.OpenAI
    executor: adaptrt.Executor
    model: Path
    adapters: dict[str, Path]

    @property
    def start(self) -> list[int]:
        return list(self.executor.engine.config.pretrained_config.decoder_start_ids)

    def tokens(self, prompt: list[int], name: str, max_tokens: int, start: list[int] | None = None) -> list[int]:
        """Returns the executor's greedy answer."""
        config = self.executor.engine.config.pretrained_config
        request = adaptrt.Request(
            self.start if start is None else start,
            max_tokens,
            encoder_input_token_ids=prompt,
            output_config=adaptrt.OutputConfig(exclude_input_from_output=True),
            end_id=config.eos_token_id[0],
        )
        request_id = self.executor.enqueue_request(request, adapter=None if name == "base" else name)
        (response,) = self.executor.await_responses(request_id)
        assert not response.has_error(), response.error_msg
        found: list[int] = response.result.output_token_ids[0]
        return found

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.address}{path}", json=body, timeout=60)


@pytest.fixture(scope="module", params=["t5", "bart"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("served")
    kind = MODELS[request.param]
    model = save_encoder_decoder(kind, root / "model")
    adapters = {
        name: save_adapter_of(kind, model, root / name, seed, r=4, use_dora=name == "dora")
        for seed, name in enumerate(NAMES[1:])
    }
    engine = root / "engine"
    build(Checkpoint.of_model(model), CONFIG, engine)
    TOKENIZER.save(str(engine / "tokenizer.json"))
    (engine / "chat_template.jinja").write_text(TEMPLATE)
    modules = [f"{name}={path}" for name, path in adapters.items()]
    with (
        adaptrt.Executor(engine, adaptrt.ModelType.ENCODER_DECODER) as executor,
        http_server(engine, "--served_model_name", "base", "--lora_modules", *modules) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        for name, path in adapters.items():
            executor.add_adapter(name, path)
        yield Served(address, client, executor, model, adapters)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stream", [False, True])
def test_completions_are_the_executors(served: Served, name: str, stream: bool) -> None:
    answer = served.client.completions.create(
        model=name, prompt=PROMPTS, max_tokens=9, temperature=0, stream=stream, extra_body=RAW
    )
    found: list[list[int]] = [[] for _ in PROMPTS]
    for chunk in answer if stream else [answer]:
        for choice in chunk.choices:
            found[choice.index] += choice.token_ids
    assert found == [served.tokens(ids(prompt), name, 9) for prompt in PROMPTS]
    if not stream:
        assert answer.usage.prompt_tokens == sum(len(ids(prompt)) for prompt in PROMPTS)
        assert answer.choices[0].prompt_token_ids == ids(PROMPTS[0])


def test_answers_are_what_transformers_computes(served: Served) -> None:
    for name in NAMES:
        reference = Seq2SeqReference(served.model, served.adapters.get(name))
        answer = served.client.completions.create(
            model=name, prompt=PROMPTS[0], max_tokens=6, temperature=0, extra_body=RAW
        )
        tokens = list(answer.choices[0].token_ids)
        logits = reference.logits(ids(PROMPTS[0]), [*served.start, *tokens])
        expected = logits[len(served.start) - 1 :].argmax(axis=1).tolist()
        assert tokens == expected[: len(tokens)]


def test_chats_are_written_for_the_encoder(served: Served) -> None:
    messages = [{"role": "user", "content": "hello"}]
    answer = served.client.chat.completions.create(model="lora", messages=messages, temperature=0, extra_body=RAW)
    prompt = ids("userhello")
    # The encoder's tokens take no room from the decoder.
    assert list(answer.choices[0].token_ids) == served.tokens(prompt, "lora", 40 - len(served.start))
    assert answer.usage.prompt_tokens == len(prompt)


def test_several_answers_and_echo(served: Served) -> None:
    answer = served.client.completions.create(
        model="base", prompt=PROMPTS[0], max_tokens=5, n=3, seed=7, echo=True, extra_body=RAW
    )
    assert len({choice.index for choice in answer.choices}) == 3
    assert all(choice.text.replace(" ", "").startswith(PROMPTS[0]) for choice in answer.choices)
    again = served.client.completions.create(model="base", prompt=PROMPTS[0], max_tokens=5, seed=8, extra_body=RAW)
    assert again.choices[0].token_ids == answer.choices[1].token_ids


def test_unsupported_requests_are_refused_by_name(served: Served) -> None:
    for path, fields, said in (
        ("/v1/completions", {"prompt": "a" * 49}, "encoder takes prompts of 1 to 48 tokens; this one has 49"),
        ("/v1/completions", {"prompt": ""}, "encoder takes prompts of 1 to 48 tokens; this one has 0"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 41}, "41 are asked for"),
        ("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 1}, "whose tokens have no log probs"),
        ("/v1/completions", {"prompt": "a", "model": "nobody"}, "'nobody' does not exist"),
        ("/v1/embeddings", {"input": "a"}, "has an encoder and a decoder"),
        ("/classify", {"input": "a"}, "has an encoder and a decoder"),
    ):
        refused = served.post(path, **fields)
        assert refused.status_code in (400, 404)
        assert said in refused.json()["error"]["message"], refused.text
    assert served.post("/v1/completions", prompt="a", max_tokens=2).status_code == 200


def test_log_probs_are_those_of_the_decoders_tokens(served: Served) -> None:
    answer = served.client.completions.create(
        model="dora", prompt=PROMPTS[0], max_tokens=4, temperature=0, logprobs=1, extra_body=RAW
    )
    (choice,) = answer.choices
    logits = Seq2SeqReference(served.model, served.adapters["dora"]).logits(
        ids(PROMPTS[0]), [*served.start, *choice.token_ids]
    )
    rows = logits[len(served.start) - 1 :].astype(np.float64)
    for row, token, log_prob in zip(rows, choice.token_ids, choice.logprobs.token_logprobs, strict=False):
        expected = row[token] - row.max() - np.log(np.exp(row - row.max()).sum())
        assert abs(log_prob - expected) < 1e-4


def infer(served: Served, name: str, **arrays: np.ndarray) -> np.ndarray:
    tensors = []
    for tensor, array in arrays.items():
        datatype = "BOOL" if array.dtype == np.bool_ else "INT32"
        made = triton.InferInput(tensor, array.shape, datatype)
        made.set_data_from_numpy(array)
        tensors.append(made)
    with triton.InferenceServerClient(served.address.removeprefix("http://")) as client:
        output = client.infer(name, tensors).as_numpy("output_ids")
    assert output is not None
    return output


@pytest.mark.parametrize("name", ["base", "lora"])
def test_triton_takes_inputs_of_encoder_and_decoder(served: Served, name: str) -> None:
    prompt = np.array([ids(PROMPTS[0])], np.int32)
    shared = {"input_ids": prompt, "request_output_len": np.array([[7]], np.int32)}
    end = {"end_id": np.array([[served.executor.engine.config.pretrained_config.eos_token_id[0]]], np.int32)}
    found = infer(served, name, **shared, **end).reshape(-1).tolist()
    assert found == [*served.start, *served.tokens(ids(PROMPTS[0]), name, 7)]
    own = {"decoder_input_ids": np.array([[5, 6, 7]], np.int32), "decoder_input_lengths": np.array([[2]], np.int32)}
    without = {"exclude_input_in_output": np.array([[True]])}
    found = infer(served, name, **shared, **end, **own, **without).reshape(-1).tolist()
    assert found == served.tokens(ids(PROMPTS[0]), name, 7, [5, 6])


def test_triton_generates_text(served: Served) -> None:
    body = {"text_input": PROMPTS[0], "max_tokens": 6}
    answer = served.post("/v2/models/lora/generate", **body)
    assert answer.status_code == 200, answer.text
    completion = served.client.completions.create(model="lora", prompt=PROMPTS[0], max_tokens=6, temperature=0)
    assert answer.json()["text_output"] == completion.choices[0].text
    refused = served.post("/v2/models/lora/generate", **body, decoder_input_lengths=2)
    assert refused.status_code == 400
    assert "is given without decoder_input_ids" in refused.text
