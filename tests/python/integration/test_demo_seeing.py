"""The demo's vision-language model: its answers are right, equal transformers + PEFT, and are the same over HTTP."""

from __future__ import annotations

import base64
import io
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from PIL import Image
from rich.console import Console
from safetensors import safe_open

from adaptrt import LLM, SamplingParams
from adaptrt.tools import demo_scenes as scenes
from adaptrt.tools.demo_seeing import show_images
from adaptrt.tools.demo_seeing_model import prompt
from adaptrt.tools.demo_steps import DemoFailure
from support.seeing import engine_of_model, question
from support.served_app import AppClient, AppPlace, run_app

DEMO = Path(__file__).parents[3] / "examples" / "demo" / "seeing"
MODEL = DEMO / "model"
ADAPTERS = {path.name: path for path in sorted((DEMO / "adapters").iterdir())}
STYLES = {"plain": None, **{name: name for name in ADAPTERS}}
"""Name of the adapter that answers in each style."""
MAX_BYTES = 1_500_000
GREEDY = SamplingParams(max_tokens=24, temperature=0)
ASKED = scenes.QUESTIONS[0]
NUM_DRAWN = 40
MIN_RIGHT = 0.95


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engine_of_model(MODEL, tmp_path_factory.mktemp("seeing") / "engine")


def opened(engine: Path) -> LLM:
    llm = LLM(engine)
    for name, adapter in ADAPTERS.items():
        llm.load_lora(name, adapter)
    return llm


def picture(name: str) -> Path:
    return DEMO / "images" / f"{name}.png"


def test_the_files_are_small_and_adapters_of_several_kinds() -> None:
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file()) < MAX_BYTES
    configs = {name: json.loads((path / "adapter_config.json").read_text()) for name, path in ADAPTERS.items()}
    assert set(STYLES) == set(scenes.STYLES) - {scenes.UNTAUGHT}
    assert any(config["use_dora"] for config in configs.values())
    with safe_open(ADAPTERS["french"] / "adapter_model.safetensors", "numpy") as tensors:
        names = list(tensors.keys())
    for part in ("vision_model", "connector", "text_model"):
        assert any(f".{part}." in name for name in names)


def test_tokens_are_those_of_transformers_and_peft(engine: Path) -> None:
    processor = transformers.AutoProcessor.from_pretrained(MODEL)
    asked = [(name, style) for name in ("circles", "crosses") for style in STYLES]
    conversations = [question(Image.open(picture(name)), ASKED) for name, _ in asked]
    with opened(engine) as llm:
        found = llm.chat(conversations, GREEDY, lora=[STYLES[style] for _, style in asked])
    for style in STYLES:
        model = transformers.AutoModelForImageTextToText.from_pretrained(MODEL, dtype=torch.float32)
        if STYLES[style] is not None:
            model = peft.PeftModel.from_pretrained(model, ADAPTERS[style]).eval()
        for (name, of), conversation, completion in zip(asked, conversations, found, strict=True):
            if of != style:
                continue
            text = processor.apply_chat_template(conversation, add_generation_prompt=True)
            inputs = processor(images=[[Image.open(picture(name))]], text=text, return_tensors="pt")
            given = inputs["input_ids"][0].tolist()
            assert given == processor.tokenizer(prompt(ASKED))["input_ids"]
            with torch.no_grad():
                made = model.generate(**inputs, max_new_tokens=24, do_sample=False, pad_token_id=1)
            assert list(completion.prompt_token_ids) == given
            assert [*completion.token_ids, 1] == made[0, len(given) :].tolist()
            assert completion.text.strip() == scenes.answer(scenes.SHOWN[name], style)


@pytest.mark.parametrize("style", STYLES)
def test_new_drawings_are_described(engine: Path, style: str) -> None:
    rng = random.Random(5)
    drawn = [scenes.draw_scene(rng) for _ in range(NUM_DRAWN)]
    with LLM(engine) as llm:
        if STYLES[style] is not None:
            llm.load_lora(style, ADAPTERS[style])
        asked = [question(scenes.picture(scene, rng), rng.choice(scenes.QUESTIONS)) for scene in drawn]
        found = llm.chat(asked, GREEDY, lora=STYLES[style])
    right = [one.text.strip() == scenes.answer(scene, style) for scene, one in zip(drawn, found, strict=True)]
    assert sum(right) >= MIN_RIGHT * NUM_DRAWN


def test_a_server_answers_with_each_adapter(engine: Path) -> None:
    url = "data:image/png;base64," + base64.b64encode(picture("rings").read_bytes()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": ASKED}]

    async def body(client: AppClient) -> None:
        for style, name in STYLES.items():
            if name is not None:
                assert (await client.load(name, name)).status_code == 200
            fields: dict[str, Any] = {"messages": [{"role": "user", "content": parts}], "temperature": 0}
            answer = await client.post("/v1/chat/completions", model=name or "base", **fields)
            assert answer.status_code == 200, answer.text
            text = answer.json()["choices"][0]["message"]["content"]
            assert text.strip() == scenes.answer(scenes.SHOWN["rings"], style)

    run_app(AppPlace(engine, DEMO / "adapters", MODEL), body)


def test_images_need_pillow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    console = Console(file=io.StringIO(), width=200)
    show_images(console, DEMO, tmp_path)
    assert console.file.getvalue().count("\n") == 1
    assert "pip install 'adaptrt[vision]'" in console.file.getvalue()
    assert not list(tmp_path.iterdir())


def test_a_wrong_answer_fails_the_demo(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    shutil.copytree(ADAPTERS["count"], tmp_path / "adapters" / "colour")
    complaint = r"1 green triangle on grey: colour answered 'There is one\.'; expected 'It is "
    with pytest.raises(DemoFailure, match=complaint):
        show_images(Console(file=io.StringIO()), tmp_path, tmp_path)
