"""Ollama's own package with its defaults: chats, prompts, streams, forms, tools, images, embeddings' errors, lists."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import ollama
import pytest
from conftest import MODEL, PICTURE, PICTURE_ANSWERS, PICTURE_ASKED, ROOT, Weather

MESSAGES = [{"role": "user", "content": "What is the weather in Paris?"}]
GREEDY = {"temperature": 0, "num_predict": 20}


def weather(city: str) -> str:
    """Tells the weather.

    Args:
        city: Where.
    """
    return f"sun in {city}"


@pytest.fixture
def client(address: str) -> Iterator[ollama.Client]:
    with ollama.Client(host=address.removesuffix("/v1")) as client:
        yield client


@pytest.mark.parametrize("model", [MODEL, "pirate:latest"])
def test_a_stream_is_the_answer(client: ollama.Client, model: str) -> None:
    whole = client.chat(model, MESSAGES, options=GREEDY)
    *pieces, last = client.chat(model, MESSAGES, options=GREEDY, stream=True, keep_alive="5m")
    assert "".join(piece.message.content for piece in pieces) == whole.message.content
    assert whole.message.content
    assert (last.done, last.eval_count, last.done_reason) == (True, whole.eval_count, whole.done_reason)
    assert last.eval_duration > 0
    # The demo's template writes a question and an answer.
    prompt = client.generate(model, MESSAGES[0]["content"], options=ollama.Options(**GREEDY))
    assert prompt.response == whole.message.content
    raw = client.generate(model, "Q: What is the weather in Paris?\nA:", raw=True, options=GREEDY)
    assert raw.response == whole.message.content


def test_an_answer_with_a_form(client: ollama.Client) -> None:
    made = client.chat(MODEL, MESSAGES, format=Weather.model_json_schema(), options={"num_predict": 60}, logprobs=True)
    Weather.model_validate_json(made.message.content)
    assert "".join(entry.token for entry in made.logprobs) == made.message.content


def test_tools_and_a_result(client: ollama.Client) -> None:
    asked = client.chat(MODEL, MESSAGES, tools=[weather], options=GREEDY)
    call = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
    turns = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]
    turns.append({"role": "tool", "tool_name": "weather", "content": weather("Paris")})
    answer = client.chat(MODEL, turns, tools=[weather], options=GREEDY)
    assert answer.prompt_eval_count > asked.prompt_eval_count


def test_lists_of_models(client: ollama.Client) -> None:
    listed = client.list().models
    assert [model.model for model in listed] == [MODEL, "pirate"]
    assert all(model.size > 0 for model in listed)
    assert MODEL in [model.model for model in client.ps().models]
    shown = client.show("pirate")
    assert shown.details.parent_model == MODEL
    assert "completion" in shown.capabilities


def test_errors_and_the_asynchronous_client(address: str, client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match=r"'llama3\.2' does not exist") as raised:
        client.chat("llama3.2", MESSAGES)
    assert raised.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match=r"options\.mirostat: is 2; accepted: 0"):
        client.chat(MODEL, MESSAGES, options={"mirostat": 2})
    with pytest.raises(ollama.ResponseError, match="/api/pull is not supported"):
        client.pull("llama3.2")
    with pytest.raises(ollama.ResponseError, match="does not say how embeddings are pooled"):
        client.embed(MODEL, "text")

    async def stream() -> str:
        pieces = await ollama.AsyncClient(host=address.removesuffix("/v1")).generate(MODEL, "a", stream=True)
        return "".join([piece.response async for piece in pieces])

    assert isinstance(asyncio.run(stream()), str)


def test_a_model_with_an_adapter_is_created(client: ollama.Client) -> None:
    directory = ROOT / "examples/demo/adapters/pirate"
    names = ("adapter_config.json", "adapter_model.safetensors")
    files = {name: client.create_blob(directory / name) for name in names}
    *_, last = client.create("captain", from_=MODEL, adapters=files, parameters=GREEDY, system="Q", stream=True)
    assert last.status == "success"
    client.copy("captain", "mate")
    answers = [client.generate(model, "What is the weather in Paris?").response for model in ("captain", "mate")]
    assert answers[0] == answers[1]
    assert "captain" in [model.model for model in client.list().models]
    shown = {tuple(line.split()) for line in client.show("mate").parameters.splitlines()}
    assert shown == {("num_predict", "20"), ("temperature", "0.0")}
    for model in ("captain", "mate"):
        assert client.delete(model).status == "success"
    with pytest.raises(ollama.ResponseError, match="was not created here"):
        client.delete("captain")


@pytest.mark.parametrize("model", PICTURE_ANSWERS)
def test_an_image(seeing_address: str, model: str) -> None:
    message = {"role": "user", "content": PICTURE_ASKED, "images": [PICTURE]}
    with ollama.Client(host=seeing_address.removesuffix("/v1")) as client:
        chat = client.chat(model, [message], options={"temperature": 0})
        assert chat.message.content.strip() == PICTURE_ANSWERS[model]
        made = client.generate(model, PICTURE_ASKED, images=[PICTURE.read_bytes()], options={"temperature": 0})
        assert "vision" in client.show(model).capabilities
    assert made.response == chat.message.content
