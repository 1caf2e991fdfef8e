"""A server over the demo's model, for clients in an environment of their own: `make test-clients`."""

from __future__ import annotations

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


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yields the address of the API. The server runs in the package's own environment."""
    directory = tmp_path_factory.mktemp("server")
    model = directory / MODEL
    shutil.copytree(ROOT / "examples/demo/model", model, copy_function=shutil.copyfile)
    # Clients describe functions and schemas in long texts.
    for name, change in (("config.json", {"max_position_embeddings": 4096}), ("tokenizer_config.json", TEMPLATE)):
        file = model / name
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    python = os.environ.get("ADAPTRT_PYTHON", str(ROOT / ".venv/bin/python"))
    command = [python, "-m", "adaptrt.builder.cli", "serve", str(model), "--port", "0", "--num_threads", "1"]
    command += ["--kv_cache_tokens", "8192", "--tool_call_parser", "hermes"]
    created = directory / "created"
    created.mkdir()
    command += ["--ollama_models", str(created)]
    command += ["--lora_modules", f"pirate={ROOT / 'examples/demo/adapters/pirate'}"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(directory / "cache")}
    with (directory / "errors").open("w") as errors:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
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
