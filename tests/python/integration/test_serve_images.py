"""Images in requests over HTTP: answers equal LLM's, and images that are refused."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from adaptrt import LLM, SamplingParams
from support.seeing import engine_of_model, question, random_image, save_adapters, save_model
from support.served_app import AppClient, AppPlace, run_app

LENGTH = 5
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

    run_app(place, body)


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
        assert "is not base64" in await refused(messages=asked(image[:61]))
        assert "cannot be read as an image" in await refused(messages=asked("data:image/png;base64,AAAA"))
        assert "expected data:image/png;base64" in await refused(messages=asked("data:text/html;base64,AAAA"))
        assert "2 tokens <image> for 1 images" in await refused(messages=asked(image, "<image>"))
        many = [{"role": "user", "content": asked(image)[0]["content"][:1] * 33}]
        assert "have 33 images; expected at most 32" in await refused(messages=many)
        assert "images cannot be cut" in await refused(truncate_prompt_tokens=5)
        assert "return_receipt is true with images" in await refused(return_receipt=True)
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
