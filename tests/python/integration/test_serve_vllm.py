"""Fields of vLLM's server: their answers equal the executor's."""

from __future__ import annotations

import base64
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

import adaptrt
from support.http_server import http_server
from support.models import ModelSpec, save_adapter, save_model
from support.serving import build_engine
from support.tokenizers import byte_level, save_tokenizer
from support.vllm_cases import CASES

SPEC = ModelSpec(vocab_size=270)
TEMPLATE = (
    "{% for document in documents or [] %}[{{ document.title }}: {{ document.text }}]{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENIZER = byte_level()
PROMPT = "Say hello €"
USER = {"role": "user", "content": "hi"}
GREEDY = {"temperature": 0, "return_token_ids": True}
NUM_TOKENS = 8


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def chat_ids(content: str) -> list[int]:
    text = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    return TOKENIZER.encode(text, add_special_tokens=False).ids


@dataclasses.dataclass
class Served:
    """A server, and an executor over the same engine and adapter."""

    client: httpx.Client
    executor: adaptrt.Executor
    root: Path
    """Directory below which adapters may be loaded."""
    tokenizer: Any = TOKENIZER

    def ids(self, text: str) -> list[int]:
        return ids(text)

    def post(self, path: str, status: int = 200, headers: dict[str, str] | None = None, **body: Any) -> Any:
        answer = self.client.post(path, json=body, headers=headers)
        assert answer.status_code == status, answer.text
        return answer.json()

    def complete(self, prompt: Any = PROMPT, **fields: Any) -> Any:
        """Returns the first choice of a greedy completion."""
        body = {"model": "base", "prompt": prompt, "max_tokens": NUM_TOKENS, **GREEDY, **fields}
        return self.post("/v1/completions", **body)["choices"][0]

    def chat(self, *messages: dict[str, Any], **fields: Any) -> Any:
        body = {"model": "base", "messages": messages or [USER], "max_tokens": NUM_TOKENS, **GREEDY, **fields}
        return self.post("/v1/chat/completions", **body)

    def run(self, prompt: list[int], sampling: adaptrt.SamplingConfig | None = None, **output: Any) -> adaptrt.Result:
        """Returns the executor's result; greedy without `sampling`."""
        request = adaptrt.Request(
            prompt,
            NUM_TOKENS,
            sampling_config=sampling or adaptrt.SamplingConfig(),
            output_config=adaptrt.OutputConfig(exclude_input_from_output=True, **output),
            end_id=1,
        )
        (response,) = self.executor.await_responses(self.executor.enqueue_request(request))
        assert not response.has_error(), response.error_msg
        return response.result


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("vllm")
    model = save_model(SPEC, root / "model")
    save_tokenizer(TOKENIZER, model)
    (root / "given.jinja").write_text(TEMPLATE)
    engine = build_engine(model, root, max_seq_len=704, max_beam_width=4)
    adapter = save_adapter(model, root / "adapter", 0, r=4)
    flags = [
        "--served_model_name", "base", "--lora_modules", f"adapter={adapter}", "--chat_template", root / "given.jinja",
        "--trust_request_chat_template", "--num_threads", 1, "--enable_tokenizer_info_endpoint",
        "--pooling_type", "last", "--normalize_embeddings", "true", "--batch_dir", root / "batches",
        "--adapter_root", root, "--enable_lora_loading",
    ]  # fmt: skip
    config = adaptrt.ExecutorConfig(num_threads=1, max_beam_width=4)
    with (
        adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, config) as executor,
        http_server(engine, *flags) as address,
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        yield Served(client, executor, root)


@pytest.mark.parametrize("name", CASES)
def test_cases_of_vllms_server(served: Served, name: str) -> None:
    CASES[name](served)


def test_log_probs_of_prompts(served: Served) -> None:
    expected = served.run(ids(PROMPT), return_prompt_log_probs=True, top_log_probs=2)
    choice = served.complete(prompt_logprobs=2)
    first, *entries = choice["prompt_logprobs"]
    assert first is None
    assert len(entries) == len(ids(PROMPT)) - 1
    for token, entry, own, top in zip(
        ids(PROMPT)[1:], entries, expected.prompt_log_probs, expected.prompt_top_log_probs, strict=True
    ):
        listed = {token: (own, None)} | {other: (log_prob, rank) for rank, (other, log_prob) in enumerate(top, 1)}
        assert {
            int(name): (pytest.approx(of["logprob"]), of["rank"], of["decoded_token"]) for name, of in entry.items()
        } == {other: (*found, TOKENIZER.decode([other])) for other, found in listed.items()}
    of_chat = served.chat(prompt_logprobs=0)["prompt_logprobs"]
    assert [list(entry) for entry in of_chat[1:]] == [[str(token)] for token in chat_ids("hi")[1:]]
    # Fewer most likely tokens than those of the answer.
    fewer = served.complete(prompt_logprobs=3, logprobs=1)
    assert all(len(top) <= 2 for top in fewer["logprobs"]["top_logprobs"])
    assert any(len(entry) >= 3 for entry in fewer["prompt_logprobs"][1:])
    both = served.complete(prompt_logprobs=1, logprobs=3)
    assert all(len(entry) <= 2 for entry in both["prompt_logprobs"][1:])
    assert any(len(top) >= 3 for top in both["logprobs"]["top_logprobs"])


def test_allowed_tokens_and_bad_words(served: Served) -> None:
    allowed = ids("xyz")
    choice = served.complete(allowed_token_ids=allowed)
    assert set(choice["token_ids"]) <= set(allowed)
    word = choice["text"][3:5]
    without = served.complete(allowed_token_ids=allowed, bad_words=[word])
    assert len(without["text"]) == NUM_TOKENS
    assert word not in without["text"]


@pytest.mark.parametrize("fields", [{}, {"early_stopping": True}, {"length_penalty": 2.0}, {"temperature": 0.5}])
def test_beams(served: Served, fields: dict[str, Any]) -> None:
    sampling = adaptrt.SamplingConfig(
        3, length_penalty=fields.get("length_penalty", 1.0), early_stopping=1 if fields.get("early_stopping") else 2,
        temperature=fields.get("temperature"),
    )  # fmt: skip
    expected = [served.run(prompt, sampling).output_token_ids for prompt in (ids(PROMPT), ids("ab"))]
    body: dict[str, Any] = {"max_tokens": NUM_TOKENS, "n": 3, "use_beam_search": True, **GREEDY, **fields}
    answer = served.post("/v1/completions", **body, prompt=[PROMPT, "ab"], logprobs=0)
    assert [choice["token_ids"] for choice in answer["choices"]] == [beam for beams in expected for beam in beams]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [
        len(beam) for beams in expected for beam in beams
    ]
    of_chat = served.post("/v1/chat/completions", **body, messages=[USER])
    assert [choice["token_ids"] for choice in of_chat["choices"]] == served.run(
        chat_ids("hi"), sampling
    ).output_token_ids


def test_a_search_may_find_fewer_beams(served: Served) -> None:
    body = {"model": "base", "max_tokens": 1, "n": 3, "use_beam_search": True, "allowed_token_ids": ids("xy"), **GREEDY}
    answer = served.post("/v1/completions", prompt=["a", "b"], **body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 3, 4]
    error = served.post("/v1/completions", 400, **{**body, "prompt": "a", "n": 5})["error"]
    assert error["param"] == "n"
    assert "at most 4 beams" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_is_part_of_the_answer_by_option(served: Served, stream: bool) -> None:
    def complete(**fields: Any) -> tuple[str, list[int], Any, list[str]]:
        body = {"model": "base", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "logprobs": 0, **GREEDY, **fields}
        if not stream:
            choices = served.post("/v1/completions", **body)["choices"]
        else:
            answer = served.client.post("/v1/completions", json={**body, "stream": True})
            choices = [event["choices"][0] for event in events(answer)]
        return (
            "".join(choice["text"] for choice in choices),
            [token for choice in choices for token in choice["token_ids"]],
            choices[-1]["stop_reason"],
            [name for choice in choices for name in choice["logprobs"]["tokens"]],
        )

    allowed = {"allowed_token_ids": ids("xyz")}
    text, tokens, _, _ = complete(**allowed)
    stop = text[2:4]
    end = text.index(stop)
    assert complete(**allowed, stop=stop)[:3] == (text[:end], tokens[: end + 2], stop)
    included = complete(**allowed, stop=stop, include_stop_str_in_output=True)
    assert included[:3] == (text[: end + 2], tokens[: end + 2], stop)
    last = tokens[3]
    place = tokens.index(last)
    by_token = {**allowed, "stop_token_ids": [last]}
    assert complete(**by_token)[:3] == (text[:place], tokens[:place], last)
    shown = complete(**by_token, include_stop_str_in_output=True)
    assert shown == (text[: place + 1], tokens[: place + 1], last, list(text[: place + 1]))
    counted = complete(**by_token, include_eos=True)
    assert counted == (text[:place], tokens[: place + 1], last, list(text[: place + 1]))


def events(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [httpx.Response(200, text=line).json() for line in lines[:-1]]


def test_the_end_token_counts_by_option(served: Served) -> None:
    """Token 1 ends texts; only it may be generated."""
    fields = {"allowed_token_ids": [1], "logprobs": 0}
    plain = served.complete(**fields)
    assert (plain["token_ids"], plain["finish_reason"]) == ([], "stop")
    answer = served.post("/v1/completions", prompt="a", max_tokens=4, include_eos=True, **GREEDY, **fields)
    (choice,) = answer["choices"]
    assert (choice["token_ids"], choice["text"], choice["finish_reason"]) == ([1], "", "stop")
    assert choice["logprobs"]["text_offset"] == [0]
    assert answer["usage"]["completion_tokens"] == 1


def test_tokens_may_be_named_by_their_ids(served: Served) -> None:
    choice = served.complete(logprobs=1, return_tokens_as_token_ids=True, echo=True)
    names = [f"token_id:{token}" for token in (*ids(PROMPT), *choice["token_ids"])]
    assert choice["logprobs"]["tokens"] == names
    assert names[-1] in choice["logprobs"]["top_logprobs"][-1]
    of_chat = served.chat(logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)["choices"][0]
    assert [entry["token"] for entry in of_chat["logprobs"]["content"]] == [
        f"token_id:{token}" for token in of_chat["token_ids"]
    ]
    assert of_chat["logprobs"]["content"][0]["top_logprobs"][0]["token"].startswith("token_id:")


def test_prompts_are_cut(served: Served) -> None:
    assert served.complete(truncate_prompt_tokens=3)["prompt_token_ids"] == ids(PROMPT)[-3:]
    assert served.complete(truncate_prompt_tokens=3, truncation_side="right")["prompt_token_ids"] == ids(PROMPT)[:3]
    assert served.complete(ids(PROMPT), truncate_prompt_tokens=2)["prompt_token_ids"] == ids(PROMPT)[-2:]
    assert served.complete(truncate_prompt_tokens=100)["prompt_token_ids"] == ids(PROMPT)
    longest = served.complete("abc" * 2000, truncate_prompt_tokens=-1)
    assert len(longest["prompt_token_ids"]) == 640
    assert served.complete(truncate_prompt_tokens=3, echo=True)["text"].startswith(TOKENIZER.decode(ids(PROMPT)[-3:]))
    assert served.chat(truncate_prompt_tokens=4)["prompt_token_ids"] == chat_ids("hi")[-4:]
    error = served.post("/v1/completions", 400, prompt="a", truncate_prompt_tokens=641)["error"]
    assert (error["param"], error["code"]) == ("truncate_prompt_tokens", 400)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_repeats_the_assistants_last_message(served: Served, stream: bool) -> None:
    said = {"role": "assistant", "content": "So"}
    more = {"echo": True, "add_generation_prompt": False, "continue_final_message": True}

    def content(*messages: dict[str, Any], **fields: Any) -> str:
        if not stream:
            return str(served.chat(*messages, **fields)["choices"][0]["message"]["content"])
        body = {"messages": messages, "max_tokens": NUM_TOKENS, "stream": True, **GREEDY, **fields}
        answer = served.client.post("/v1/chat/completions", json=body)
        return "".join(event["choices"][0]["delta"].get("content") or "" for event in events(answer))

    plain = content(USER, said, **{**more, "echo": False})
    assert content(USER, said, **more) == "So" + plain
    assert content(USER, echo=True) == content(USER)


def test_documents_and_templates_of_requests(served: Served) -> None:
    documents = [{"title": "T", "text": "words"}]
    assert served.chat(documents=documents)["prompt_token_ids"] == ids("[T: words]") + chat_ids("hi")
    template = "{{ messages[0].content }}!{{ eos_token }}"
    expected = TOKENIZER.encode("hi!<|endoftext|>", add_special_tokens=False).ids
    assert served.chat(chat_template=template)["prompt_token_ids"] in (expected, ids("hi!"))
    assert served.post("/tokenize", messages=[USER], chat_template="{{ 7 }}")["tokens"] == ids("7")
    for wrong, said in (("{{", "chat_template: cannot be used"), ("{{ 1 / 0 }}", "cannot be rendered")):
        error = served.post("/v1/chat/completions", 400, messages=[USER], chat_template=wrong)["error"]
        assert said in error["message"]


def test_rows_of_numbers(served: Served) -> None:
    texts = ["ab", ids("cde")]
    expected = [entry["embedding"] for entry in served.post("/v1/embeddings", input=texts)["data"]]
    answer = served.post("/pooling", input=texts, request_id="mine")
    assert (answer["id"], answer["object"], answer["model"]) == ("pool-mine", "list", "base")
    assert answer["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    assert [(entry["index"], entry["object"], entry["data"]) for entry in answer["data"]] == [
        (i, "pooling", row) for i, row in enumerate(expected)
    ]
    rows = [entry["data"] for entry in served.post("/pooling", input=texts, task="token_embed")["data"]]
    assert [len(of_text) for of_text in rows] == [2, 3]
    assert [of_text[-1] for of_text in rows] == expected
    (encoded,) = served.post("/pooling", input="ab", task="token_embed", encoding_format="base64")["data"]
    assert np.frombuffer(base64.b64decode(encoded["data"]), "<f4").tolist() == [x for row in rows[0] for x in row]


def test_routes_about_the_server(served: Served) -> None:
    assert served.client.get("/load").json() == {"server_load": 0}
    info = served.client.get("/tokenizer_info").json()
    assert (info["chat_template"], info["tokenizer_class"]) == (TEMPLATE, "PreTrainedTokenizerFast")


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings"])
def test_a_batch_has_the_answers_of_its_requests(served: Served, endpoint: str) -> None:
    bodies: list[dict[str, Any]] = {
        "/v1/completions": [{"prompt": text, "max_tokens": 4, **GREEDY} for text in ("a", "bc")],
        "/v1/chat/completions": [{"messages": [USER], "max_tokens": 4, **GREEDY}, {"messages": []}],
        "/v1/embeddings": [{"input": "a"}, {"input": ["b", "cd"]}],
    }[endpoint]
    for number, body in enumerate(bodies):
        body["model"] = ("adapter", "base")[number]
    lines = [
        {"custom_id": f"{number}", "method": "POST", "url": endpoint, "body": body}
        for number, body in enumerate(bodies)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    with openai.OpenAI(base_url=f"{served.client.base_url}/v1", api_key="none", max_retries=0) as client:
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")  # type: ignore[arg-type]
        until = time.monotonic() + 60
        while batch.status != "completed":
            assert time.monotonic() < until, batch
            time.sleep(0.02)
            batch = client.batches.retrieve(batch.id)
        made = {}
        for file_id in filter(None, (batch.output_file_id, batch.error_file_id)):
            made |= {one["custom_id"]: one for one in map(json.loads, client.files.content(file_id).text.splitlines())}
        for number, body in enumerate(bodies):
            answer = served.client.post(endpoint, json=body)
            result = made[f"{number}"]["response"]
            assert result["status_code"] == answer.status_code
            for name in answer.json().keys() - {"id", "created"}:
                assert result["body"][name] == answer.json()[name], name
        assert batch.request_counts is not None
        assert batch.request_counts.total == len(bodies)
        for file_id in filter(None, (file.id, batch.output_file_id, batch.error_file_id)):
            assert client.files.delete(file_id).deleted


def test_ids_of_requests(served: Served) -> None:
    body = {"model": "base", "prompt": "a", "max_tokens": 1}
    named = served.client.post("/v1/completions", json={**body, "request_id": "mine"})
    assert (named.json()["id"], named.headers["x-request-id"]) == ("cmpl-mine", "mine")
    both = served.client.post("/v1/completions", json={**body, "request_id": "mine"}, headers={"X-Request-Id": "yours"})
    assert (both.json()["id"], both.headers["x-request-id"]) == ("cmpl-yours", "yours")
    chat = {"model": "base", "messages": [USER], "max_tokens": 1}
    by_header = served.client.post("/v1/chat/completions", json=chat, headers={"X-Request-Id": "yours"})
    assert by_header.json()["id"] == "chatcmpl-yours"
    unnamed = [served.client.post("/v1/completions", json=body).json()["id"] for _ in range(2)]
    assert unnamed[0] != unnamed[1]
