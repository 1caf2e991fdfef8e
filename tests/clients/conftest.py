"""A server over the demo's model, for clients in an environment of their own: `make test-clients`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict

ROOT = Path(__file__).resolve().parents[2]
SEEING = ROOT / "examples/demo/seeing"
PICTURE = SEEING / "images/circles.png"
PICTURE_ASKED = "What do you see?"
PICTURE_ANSWERS = {"demo": "Three red circles.", "count": "There are three.", "french": "Trois cercles rouges."}
"""Answers about PICTURE, by the name of the model."""
MODEL = "demo"
TEMPLATE = {
    "chat_template": "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ 'Q: ' if message['role'] == 'user' else '' }}{{ message['content'] }}\n"
    "{% endfor %}A:"
}


City = Literal["Paris", "Rome"]


class Weather(BaseModel):
    """An answer with a form. The demo's model knows nothing of it, so that guides have to hold it.

    Its values are few: in a free text, the model would go on until its limit.
    """

    model_config = ConfigDict(extra="forbid")

    city: City
    degrees: Literal[10, 20]


@contextlib.contextmanager
def running(model: Path, directory: Path, *flags: object) -> Iterator[str]:
    """Yields the address of the API of a new server, which runs in the package's own environment."""
    python = os.environ.get("ADAPTRT_PYTHON", str(ROOT / ".venv/bin/python"))
    command = [python, "-m", "adaptrt.builder.cli", "serve", model, "--port", "0", "--num_threads", "1", *flags]
    environment = {**os.environ, "XDG_CACHE_HOME": str(directory / "cache")}
    with (directory / "errors").open("w") as errors:
        server = subprocess.Popen(
            [str(word) for word in command], stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
    try:
        assert server.stdout is not None
        first = server.stdout.readline()
        assert first.startswith("serving "), first + (directory / "errors").read_text()
        base = first.split()[-1]
        with urllib.request.urlopen(f"{base}/health", timeout=10) as answer:
            assert answer.status == 200
        yield f"{base}/v1"
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yields the address of the API of the demo's model."""
    directory = tmp_path_factory.mktemp("server")
    model = directory / MODEL
    shutil.copytree(ROOT / "examples/demo/model", model, copy_function=shutil.copyfile)
    # Clients describe functions and schemas in long texts.
    for name, change in (("config.json", {"max_position_embeddings": 4096}), ("tokenizer_config.json", TEMPLATE)):
        file = model / name
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    created = directory / "created"
    created.mkdir()
    adapter = f"pirate={ROOT / 'examples/demo/adapters/pirate'}"
    flags = ("--kv_cache_tokens", 8192, "--tool_call_parser", "hermes", "--ollama_models", created)
    with running(model, directory, *flags, "--lora_modules", adapter) as base:
        yield base


@pytest.fixture(scope="session")
def seeing_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yields the address of the API of the demo's vision-language model."""
    adapters = SEEING / "adapters"
    flags = ("--served_model_name", MODEL, "--adapter_root", adapters)
    with running(SEEING / "model", tmp_path_factory.mktemp("seeing"), *flags) as base:
        yield base
