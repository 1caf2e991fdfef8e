"""Receipts: answers of a crowd are made again bit by bit, with other threads, and a difference is named."""

from __future__ import annotations

import asyncio
import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import pytest

import adaptrt
from adaptrt.builder.cli import main
from adaptrt.tools.replay import read_receipt, replay
from support.models import save_adapter
from support.served_app import AppClient, AppPlace, make_place, run_app

ADAPTERS = ("poet", "clerk")
MESSAGES = [{"role": "user", "content": "hello"}]
DRAWN = {"temperature": 1.0, "max_tokens": 12, "return_receipt": True, "return_receipt_prompt": True}
ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"model": "base", "prompt": "hello"}),
    ("/v1/completions", {"model": "poet", "prompt": ["hello", "a longer prompt"], "n": 2, "seed": 7, "logprobs": 3}),
    ("/v1/completions", {"model": "clerk", "prompt": "hello", "stop": ["e", "a"], "logit_bias": {"70": 2.5}}),
    ("/v1/completions", {"model": "poet:0.5+clerk:0.5", "prompt": "hello", "repetition_penalty": 1.2, "top_k": 20}),
    ("/v1/completions", {"model": "poet", "prompt": "hello", "guided_regex": "[a-f]{4,9}", "stream": True}),
    ("/v1/completions", {"model": "poet", "prompt": "hi", "use_beam_search": True, "n": 2, "temperature": 0}),
    ("/v1/chat/completions", {"model": "clerk", "messages": MESSAGES, "include_eos": True}),
    ("/v1/chat/completions", {"model": "base", "messages": MESSAGES, "stream": True, "n": 2}),
    ("/v1/responses", {"model": "poet", "input": "hello", "seed": 5, "include": ["message.output_text.logprobs"]}),
    ("/v1/responses", {"model": "clerk", "input": "hello", "stream": True, "store": False}),
    ("/v1/messages", {"model": "poet", "messages": MESSAGES, "stop_sequences": ["e"]}),
    ("/v1/messages", {"model": "poet:0.5+clerk:0.5", "messages": MESSAGES, "stream": True}),
    ("/v1/completions", {"model": "clerk", "prompt": "more tokens than a step has " * 4}),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> AppPlace:
    return make_place(tmp_path_factory.mktemp("receipts"), ADAPTERS, max_beam_width=2, max_num_tokens=64)


def drawn(path: str) -> dict[str, Any]:
    if path != "/v1/responses":
        return DRAWN
    return {"max_output_tokens" if name == "max_tokens" else name: value for name, value in DRAWN.items()}


def body_of(chunk: dict[str, Any]) -> dict[str, Any]:
    return dict(chunk.get("response", chunk))


async def answers(client: AppClient) -> list[dict[str, Any]]:
    """Answers all requests at once. Streams give the only chunk or event that has a receipt."""
    bodies = [(path, drawn(path) | body) for path, body in ASKED]
    responses = await asyncio.gather(*(client.post(path, **body) for path, body in bodies))
    found = []
    for response, (_, body) in zip(responses, bodies, strict=True):
        assert response.status_code == 200, response.text
        if not body.get("stream"):
            found.append(response.json())
            continue
        chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        (with_receipt,) = [chunk for chunk in chunks if "receipt" in body_of(chunk)]
        found.append(with_receipt)
    return found


@pytest.fixture(scope="module")
def received(place: AppPlace) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    async def body(client: AppClient) -> None:
        await client.tokens("poet")  # some answers reuse a prefix
        found.extend(await answers(client))

    config = adaptrt.ExecutorConfig(num_threads=1, max_beam_width=2, enable_chunked_context=True)
    run_app(place, body, config)
    return found


@pytest.fixture(scope="module")
def executor(place: AppPlace) -> Iterator[adaptrt.Executor]:
    config = adaptrt.ExecutorConfig(num_threads=2, max_beam_width=2, enable_chunked_context=True)
    with adaptrt.Executor(place.engine, executor_config=config) as made:
        yield made


@pytest.mark.parametrize("index", range(len(ASKED)))
def test_answers_are_made_again(
    place: AppPlace, received: list[dict[str, Any]], executor: adaptrt.Executor, index: int
) -> None:
    receipt = json.loads(json.dumps(body_of(received[index])["receipt"]))
    body = ASKED[index][1]
    counts = [len(request["answers"]) for request in receipt["requests"]]
    prompts = body.get("prompt", "")
    assert counts == [body.get("n", 1)] * (len(prompts) if isinstance(prompts, list) else 1)
    assert all(answer["num_tokens"] > 0 for request in receipt["requests"] for answer in request["answers"])
    modules = {name: place.root / name for name in ADAPTERS}
    assert replay(executor, receipt, modules, None) == []
    # Another seed, token or log prob is a difference.
    changed = copy.deepcopy(receipt)
    changed["requests"][0]["answers"][-1]["log_probs"] = "0" * 64
    (problem,) = replay(executor, changed, modules, None)
    assert problem.startswith(f"requests[0].answers[{counts[0] - 1}]: log_probs is ")


def test_an_answer_equals_that_without_a_receipt(place: AppPlace, received: list[dict[str, Any]]) -> None:
    async def body(client: AppClient) -> None:
        path, fields = ASKED[1]
        answer = await client.post(path, **fields, temperature=1.0, max_tokens=12)
        for one in (answer.json(), received[1]):
            one.pop("id"), one.pop("created"), one.pop("receipt", None), one.pop("usage")
        assert answer.json()["choices"] == received[1]["choices"]
        plain = await client.post("/v1/completions", model="base", prompt="hello", max_tokens=2, return_receipt=True)
        assert plain.json()["choices"][0]["logprobs"] is None
        assert "token_ids" not in plain.json()["receipt"]["requests"][0]["prompt"]
        refused = await client.post("/v1/completions", model="base", prompt="a", return_receipt_prompt=True)
        assert (refused.status_code, "without return_receipt; expected both" in refused.text) == (400, True)

    run_app(place, body)


def test_differences_are_named(
    place: AppPlace, received: list[dict[str, Any]], executor: adaptrt.Executor, tmp_path: Path
) -> None:
    receipt = received[2]["receipt"]
    digest = receipt["adapters"][0]["digest"]
    (problem,) = replay(executor, receipt, {"clerk": place.root / "poet"}, None)
    assert problem.startswith("adapter 'clerk' has digest ")
    assert problem.endswith(f", and {digest} in the receipt")
    other = copy.deepcopy(receipt)
    other["environment"] |= {"kernels": "other", "engine": "0" * 64}
    engine, kernels = replay(executor, other, {"clerk": place.root / "clerk"}, None)
    assert engine.startswith(f'engine is "{"0" * 64}" in the receipt, and "')
    assert kernels.startswith('kernels is "other" in the receipt, and "')
    guided = copy.deepcopy(received[4]["receipt"])
    assert guided["requests"][0]["guide"]["llguidance"] == metadata.version("llguidance")
    guided["requests"][0]["guide"]["llguidance"] = "1.9"
    (guide,) = replay(executor, guided, {"poet": place.root / "poet"}, None)
    assert guide.startswith("requests[0]: llguidance is 1.9 in the receipt, and ")
    prompt = copy.deepcopy(receipt)
    tokens = prompt["requests"][0]["prompt"].pop("token_ids")
    modules = {"clerk": place.root / "clerk"}
    with pytest.raises(adaptrt.ConfigError, match=r"requests\[0\] has no prompt, only its digest; give its token ids"):
        replay(executor, prompt, modules, None)
    with pytest.raises(adaptrt.ConfigError, match=r"the prompt of requests\[0\] has another digest"):
        replay(executor, prompt, modules, [[*tokens, 3]])
    assert replay(executor, prompt, modules, [tokens]) == []
    del prompt["requests"][0]["sampling"]
    with pytest.raises(adaptrt.ConfigError, match="the receipt cannot be read: KeyError: 'sampling'"):
        replay(executor, prompt, modules, [tokens])
    bad: list[tuple[dict[str, Any], str]] = [
        ({}, "has no receipt of format 1"),
        ({"response": 3}, "has no receipt of format 1"),
        ({**receipt, "requests": 3}, "requests is 3; expected a list"),
    ]
    for content, said in bad:
        path = tmp_path / "receipt.json"
        path.write_text(json.dumps(content))
        with pytest.raises(adaptrt.ConfigError, match=said):
            read_receipt(path)


def test_another_tokenizer_or_template_is_named(
    place: AppPlace, received: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = tmp_path / "chat.json"
    chat.write_text(json.dumps(received[6]))
    engine = shutil.copytree(place.engine, tmp_path / "engine")
    own = (engine / "chat_template.jinja").read_text()
    command = ["replay", str(chat), "--lora_modules", f"clerk={place.root / 'clerk'}", "--engine_dir", str(engine)]
    (engine / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert main(command) == 1
    template, _ = capsys.readouterr().out.splitlines()
    assert template.startswith("template has digest ")
    assert template.endswith("in the receipt")
    (tmp_path / "own.jinja").write_text(own)
    assert main([*command, "--chat_template", str(tmp_path / "own.jinja")]) == 0
    (engine / "chat_template.jinja").write_text(own)
    tokenizer = json.loads((engine / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = dict(sorted(tokenizer["model"]["vocab"].items()))
    tokenizer["post_processor"] = None
    tokenizer["normalizer"] = {"type": "Lowercase"}
    (engine / "tokenizer.json").write_text(json.dumps(tokenizer))
    capsys.readouterr()
    assert main(command) == 1
    assert capsys.readouterr().out.startswith("tokenizer has digest ")


async def ask_until_there_is_room(client: AppClient, fields: dict[str, Any]) -> httpx.Response:
    """Asks again if adapters of running requests fill the cache."""
    while (answer := await client.post("/v1/completions", **fields)).status_code == 429:
        await asyncio.sleep(0.05)
    return answer


def test_a_crowd_is_replayed_after_eviction_and_a_restart(place: AppPlace, tmp_path: Path) -> None:
    """64 requests at once, whose adapters are then evicted; the replay runs in another process with three threads."""
    crowd: list[dict[str, Any]] = []

    async def body(client: AppClient) -> None:
        models = ("poet", "clerk", "base", "poet:0.5+clerk:0.5")
        bodies = [{"model": models[at % 4], "prompt": f"request {at}", **DRAWN, "max_tokens": 4} for at in range(64)]
        answers = await asyncio.gather(*(ask_until_there_is_room(client, one) for one in bodies))
        assert [one.status_code for one in answers] == [200] * 64
        crowd.extend(one.json()["receipt"] for one in answers)

    # The host level has room for one adapter.
    peft = adaptrt.PeftCacheConfig(host_cache_size=30_000, max_adapter_size=4)
    run_app(place, body, adaptrt.ExecutorConfig(num_threads=1, peft_cache_config=peft))
    # One receipt per adapter, with all of its requests.
    for at in range(4):
        of_adapter = crowd[at::4]
        assert len({json.dumps(one["adapters"]) for one in of_adapter}) == 1
        (tmp_path / f"{at}.json").write_text(
            json.dumps(of_adapter[0] | {"requests": [request for one in of_adapter for request in one["requests"]]})
        )
    modules = [f"{name}={place.root / name}" for name in ADAPTERS]
    command = "\n".join(
        [
            "import sys",
            "from adaptrt.builder.cli import main",
            "sys.exit(max(main(['replay', one, *sys.argv[5:]]) for one in sys.argv[1:5]))",
        ]
    )
    flags = ["--engine_dir", str(place.engine), "--num_threads", "3", "--lora_modules", *modules]
    files = [str(tmp_path / f"{at}.json") for at in range(4)]
    done = subprocess.run([sys.executable, "-c", command, *files, *flags], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "reproduced 16 answers bit by bit\n" * 4), done.stdout + done.stderr


def test_an_adapter_that_changes_nothing_is_replayed(
    place: AppPlace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    idle = save_adapter(place.model, tmp_path / "idle", 1, strength=0.0, r=4)
    path = tmp_path / "answer.json"

    async def body(client: AppClient) -> None:
        answer = await client.post("/v1/completions", model="idle", prompt="hello", **DRAWN)
        path.write_text(answer.text)

    run_app(place, body, adapter_roots=(tmp_path,), allow_no_op_adapters=True)
    assert main(["replay", str(path), "--engine_dir", str(place.engine), "--lora_modules", f"idle={idle}"]) == 0
    assert capsys.readouterr().out == "reproduced 1 answers bit by bit\n"


def test_the_responses_receipt_is_stored_and_counting_has_none(place: AppPlace) -> None:
    async def body(client: AppClient) -> None:
        asked = drawn("/v1/responses") | {"model": "poet", "input": "hello"}
        made = (await client.post("/v1/responses", **asked)).json()
        stored = (await client.http.get(f"/v1/responses/{made['id']}")).json()
        assert stored["receipt"] == made["receipt"]
        assert (
            "receipt" not in (await client.post("/v1/responses", model="poet", input="a", max_output_tokens=1)).json()
        )
        counted = await client.post("/v1/messages/count_tokens", model="poet", messages=MESSAGES, return_receipt=True)
        assert (counted.status_code, "return_receipt" in counted.text) == (400, True)

    run_app(place, body)


def test_the_command_says_what_it_found(
    place: AppPlace, received: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "answer.json"
    path.write_text(json.dumps(received[2]))
    command = ["replay", str(path), "--engine_dir", str(place.engine), "--num_threads", "2", "--lora_modules"]
    assert main([*command, f"clerk={place.root / 'clerk'}"]) == 0
    assert capsys.readouterr().out == "reproduced 1 answers bit by bit\n"
    for index in (5, 12):  # beams, and a prompt of two steps
        path.write_text(json.dumps(received[index]))
        assert main([*command, *(f"{name}={place.root / name}" for name in ADAPTERS)]) == 0
        assert capsys.readouterr().out.startswith("reproduced ")
    path.write_text(json.dumps(received[2]))
    event = tmp_path / "event.json"
    event.write_text(json.dumps(received[9]))
    assert body_of(received[9]) == received[9]["response"]
    assert read_receipt(event) == received[9]["response"]["receipt"]
    assert main([*command, f"clerk={place.root / 'poet'}"]) == 1
    assert capsys.readouterr().out.endswith("not reproduced\n")
    assert main([*command, "clerk"]) == 2
    assert "lora_modules is 'clerk'; expected NAME=DIR" in capsys.readouterr().err
