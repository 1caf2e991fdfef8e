"""Images in requests over HTTP: answers equal LLM's, and images that are refused."""

from __future__ import annotations

import base64
import io
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from PIL import Image

from adaptrt import LLM, SamplingParams
from adaptrt.builder.cli import main
from adaptrt.runtime.images import vision
from adaptrt.serve.app import make_app
from adaptrt.serve.media_hosts import MediaHosts
from support.seeing import engine_of_model, question, random_image, save_adapters, save_model
from support.served_app import AppClient, AppPlace, run_app

LENGTH = 5
END = "<end_of_utterance>\nAssistant:"
"""End of a user's turn, and the beginning of the answer."""
SETTINGS = {"max_tokens": LENGTH, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> AppPlace:
    base = tmp_path_factory.mktemp("images")
    model = save_model(base / "model")
    save_adapters(model, base / "root")
    return AppPlace(engine_of_model(model, base / "engine"), base / "root", model)


def data_url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def asked(url: Any, text: str = "what is this") -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


def base64_of(image: Image.Image) -> str:
    return data_url(image).partition(",")[2]


def test_other_apis_answer_as_chats_do(place: AppPlace) -> None:
    """With the packages of OpenAI and Anthropic."""
    image = random_image(61, 47, 1)
    parts = asked(data_url(image))
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(image)}
    blocks: Any = [{"role": "user", "content": [{"type": "image", "source": source}, parts[0]["content"][1]]}]
    content = [{"type": "input_image", "image_url": data_url(image)}, {"type": "input_text", "text": "what is this"}]
    items: Any = [{"role": "user", "content": content}]
    turn = {"content": "what is this", "images": [base64_of(image)]}
    greedy = {"model": "tower", "temperature": 0}
    of_claude = {"model": "tower", "extra_body": {"temperature": 0}, "messages": blocks, "max_tokens": LENGTH}
    ollama = {"model": "tower", "options": {"temperature": 0, "num_predict": LENGTH}}

    async def body(client: AppClient) -> None:
        assert (await client.load("tower", "tower")).status_code == 200
        gpt: Any = openai.AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="none", http_client=client.http)
        transport = httpx2.ASGITransport(make_app(client.service))
        other_http = httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1")
        claude: Any = anthropic.AsyncAnthropic(base_url="http://127.0.0.1", api_key="none", http_client=other_http)

        async def lines(path: str, **fields: Any) -> list[dict[str, Any]]:
            answer = await client.post(path, **ollama, **fields)
            assert answer.status_code == 200, answer.text
            return [json.loads(line) for line in answer.text.splitlines()]

        chat = await gpt.chat.completions.create(**greedy, messages=parts, max_tokens=LENGTH)
        expected = chat.choices[0].message.content, chat.usage.prompt_tokens
        assert expected[0]
        made = await gpt.responses.create(**greedy, input=items, max_output_tokens=LENGTH)
        assert (made.output_text, made.usage.input_tokens) == expected
        stored = await gpt.responses.input_items.list(made.id)
        assert stored.data[0].content[0].image_url == data_url(image)
        again = await gpt.responses.create(**greedy, input="red", previous_response_id=made.id, max_output_tokens=1)
        assert again.usage.input_tokens > expected[1]
        stream = await gpt.responses.create(**greedy, input=items, max_output_tokens=LENGTH, stream=True)
        made = [event async for event in stream][-1].response
        assert (made.output_text, made.usage.input_tokens) == expected
        message = await claude.messages.create(**of_claude)
        num_tokens = message.usage.input_tokens + message.usage.cache_read_input_tokens
        assert (message.content[0].text, num_tokens) == expected
        async with claude.messages.stream(**of_claude) as events:
            assert await events.get_final_text() == expected[0]
        assert (await claude.messages.count_tokens(model="tower", messages=blocks)).input_tokens == expected[1]
        for is_stream in (False, True):
            found = await lines("/api/chat", messages=[{"role": "user", **turn}], stream=is_stream)
            assert ("".join(one["message"]["content"] for one in found), found[-1]["prompt_eval_count"]) == expected
            found = await lines("/api/generate", prompt=turn["content"], images=turn["images"], stream=is_stream)
            assert ("".join(one["response"] for one in found), found[-1]["prompt_eval_count"]) == expected
        prompt = {"prompt_string": f"User:<__media__>what is this{END}", "multimodal_data": [base64_of(image)]}
        llama = {"model": "tower", "prompt": prompt, "temperature": 0, "n_predict": LENGTH}
        made = (await client.post("/completion", **llama)).json()
        assert (made["content"], made["tokens_evaluated"]) == expected
        answer = await client.post("/completion", **llama | {"prompt": {**prompt, "multimodal_data": ["AAAA"]}})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
        assert "image 1 of prompt cannot be read as an image" in answer.json()["error"]["message"]
        assert "vision" in (await client.post("/api/show", model="tower")).json()["capabilities"]
        assert (await client.http.get("/props")).json()["modalities"]["vision"] is True

    run_app(place, body)


def test_answers_are_those_of_llm(place: AppPlace) -> None:
    image = random_image(61, 47, 1)
    params = SamplingParams(max_tokens=LENGTH, temperature=0, ignore_eos=True)
    expected = {}
    with LLM(place.engine) as llm:
        for name in ("base", "dora", "tower"):
            lora = None if name == "base" else place.root / name
            expected[name] = llm.chat(question(image, "what is this"), params, lora=lora)

    async def body(client: AppClient) -> None:
        for name, answer in expected.items():
            if name != "base":
                assert (await client.load(name, name)).status_code == 200
            fields = {"model": name, "messages": asked(data_url(image)), **SETTINGS}
            found = (await client.post("/v1/chat/completions", **fields)).json()
            assert found["choices"][0]["token_ids"] == list(answer.token_ids)
            assert found["prompt_token_ids"] == list(answer.prompt_token_ids)
            assert found["usage"]["prompt_tokens"] == len(answer.prompt_token_ids)
        counted = await client.post("/tokenize", model="base", messages=asked(data_url(image)))
        assert counted.json()["tokens"] == list(expected["base"].prompt_token_ids)
        lines = (await client.http.get("/metrics")).text.splitlines()
        pairs = (line.split(" ") for line in lines if line.startswith("adaptrt_image"))
        metrics = {name: float(value) for name, value in pairs}
        # Counting tokens needs no rows.
        names = ("images", "image_pixels", "image_cache_misses", "image_cache_hits")
        assert [metrics[f"adaptrt_{name}_total"] for name in names] == [4, 4 * 61 * 47, 3, 0]
        assert metrics["adaptrt_image_encoder_seconds_total"] > 0

    run_app(place, body)


class Site(BaseHTTPRequestHandler):
    """Has one image at every path."""

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        random_image(5, 5).save(self.wfile, "PNG")


def test_images_may_be_elsewhere(place: AppPlace, tmp_path: Path) -> None:
    random_image(5, 5).save(tmp_path / "image.png")
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host = f"127.0.0.1:{server.server_address[1]}"

        async def body(client: AppClient) -> None:
            async def posted(url: str) -> tuple[int, Any]:
                answer = await client.post("/v1/chat/completions", model="base", messages=asked(url), **SETTINGS)
                return answer.status_code, answer.json()

            expected = (await posted(data_url(random_image(5, 5))))[1]["choices"][0]["token_ids"]
            for url in (f"http://{host}/image.png", f"file://{tmp_path}/image.png"):
                status, answer = await posted(url)
                assert (status, answer["choices"][0]["token_ids"]) == (200, expected)
            status, answer = await posted("http://127.0.0.2/image.png")
            assert (status, answer["error"]["param"]) == (400, "messages")
            assert "expected a host that the server's --allowed-media-domains lists" in answer["error"]["message"]
            status, answer = await posted("ftp://127.0.0.1/image.png")
            assert (status, answer["error"]["param"]) == (400, "messages")

        run_app(place, body, media_hosts=MediaHosts.of_entries([host]), media_root=tmp_path)
        server.shutdown()


def test_images_that_cannot_be_used_are_400(place: AppPlace) -> None:
    image = data_url(random_image(5, 5))

    async def body(client: AppClient) -> None:
        async def refused(**fields: Any) -> str:
            given = {"model": "base", "messages": asked(image), **SETTINGS, **fields}
            answer = await client.post("/v1/chat/completions", **given)
            assert answer.status_code == 400, answer.text
            return str(answer.json()["error"]["message"])

        assert "expected a data: URL" in await refused(messages=asked("http://127.0.0.1/image.png"))
        assert "expected a data: URL" in await refused(messages=asked("/etc/passwd"))
        assert "expected a data: URL" in await refused(messages=asked("file:///etc/passwd"))
        assert "image 1 of the request is not base64" in await refused(messages=asked(image[:61]))
        assert "cannot be read as an image" in await refused(messages=asked("data:image/png;base64,AAAA"))
        assert "expected data:image/png;base64" in await refused(messages=asked("data:text/html;base64,AAAA"))
        assert "2 tokens <image> for 1 images" in await refused(messages=asked(image, "<image>"))
        many = [{"role": "user", "content": asked(image)[0]["content"][:1] * 33}]
        assert "have 33 images; expected at most 32" in await refused(messages=many)
        assert "images cannot be cut" in await refused(truncate_prompt_tokens=5)
        video = {"type": "video_url", "video_url": {"url": "x"}}
        assert "is of type 'video_url'" in await refused(messages=[{"role": "user", "content": [video]}])
        # The server still answers.
        fine = await client.post("/v1/chat/completions", model="base", messages=asked(image), **SETTINGS)
        assert fine.status_code == 200

    run_app(place, body)


def test_models_of_texts_refuse_images(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    (model / "preprocessor_config.json").unlink()
    place = AppPlace(engine_of_model(model, tmp_path / "engine"), tmp_path, model)

    async def body(client: AppClient) -> None:
        answer = await client.post("/v1/chat/completions", model="base", messages=asked(data_url(random_image(5, 5))))
        assert answer.status_code == 400
        assert "takes no images" in answer.json()["error"]["message"]

    run_app(place, body)


def test_receipts_of_images_are_replayed(
    place: AppPlace, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[Any] = []
    digest_of = vision.digest_of
    monkeypatch.setattr(vision, "digest_of", lambda image: hashed.append(image) or digest_of(image))
    images = [random_image(9, 5, 1), random_image(5, 9, 2)]
    received: list[dict[str, Any]] = []

    async def body(client: AppClient) -> None:
        assert (await client.load("tower", "tower")).status_code == 200
        drawn = {"max_tokens": LENGTH, "temperature": 1.0, "return_receipt": True, "return_receipt_prompt": True}
        messages = asked(data_url(images[0]))
        assert (await client.post("/v1/chat/completions", model="tower", messages=messages)).status_code == 200
        assert not hashed  # only receipts need the digest of an image
        answer = await client.post("/v1/chat/completions", model="tower", messages=messages, **drawn)
        assert answer.status_code == 200, answer.text
        assert len(hashed) == 1
        received.append(answer.json())

    run_app(place, body)
    (tmp_path / "answer.json").write_text(json.dumps(received[0]))
    files = [str(tmp_path / f"{number}.png") for number in range(2)]
    for image, file in zip(images, files, strict=True):
        image.save(file)
    command = ["replay", str(tmp_path / "answer.json"), "--engine_dir", str(place.engine)]
    command += ["--lora_modules", f"tower={place.root / 'tower'}"]
    assert main([*command, "--images", files[0]]) == 0
    assert "reproduced 1 answers bit by bit" in capsys.readouterr().out
    for given, complaint in (
        ([], r"only has digests of images \(1\); .* \(0 are given\)"),
        (["--images", files[1]], "1.png: its pixels have another digest than the receipt's"),
    ):
        assert main([*command, *given]) == 2
        assert re.search(complaint, " ".join(capsys.readouterr().err.split()))
