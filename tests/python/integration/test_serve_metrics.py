"""/metrics of a server process: the values after known requests, and the official parser accepts the text."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics_families
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer, models

from support.http_server import http_server
from support.models import ModelSpec, save_adapter, save_model
from support.serving import build_engine

ADAPTER = "clerk"
PROMPT = [7, 8, 9]
MAX_TOKENS = 5
PROMTOOL = shutil.which("promtool")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("metrics")


@pytest.fixture(scope="module")
def pids() -> list[int]:
    """The server's process id."""
    return []


@pytest.fixture(scope="module")
def address(root: Path, pids: list[int]) -> Iterator[str]:
    (root / "tenants.json").write_text('{"tenants": {"owner": {"api_keys": ["key"]}}}')
    model = save_model(ModelSpec(), root / "model")
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(model / "tokenizer.json"))
    adapter = save_adapter(model, root / "adapter", 1, r=4)
    engine = build_engine(model, root)
    with http_server(
        engine,
        "--served_model_name",
        "base",
        "--num_threads",
        1,
        "--lora_modules",
        f"{ADAPTER}={adapter}",
        "--api_key",
        "key",
        "--draft_model",
        engine,
        "--draft_kv_cache_bytes",
        1 << 20,
        "--kv_cache_dir",
        root,
        "--kv_cache_dir_bytes",
        1 << 20,
        "--tenants",
        root / "tenants.json",
        pids=pids,
    ) as started:
        yield started


def scrape(address: str) -> dict[str, float]:
    answer = httpx.get(f"{address}/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found[sample.name + "".join(f"|{name}={value}" for name, value in sorted(sample.labels.items()))] = (
                sample.value
            )
    return found


def generate(address: str, model: str, key: str = "key") -> int:
    body = {"input_ids": PROMPT, "max_tokens": MAX_TOKENS}
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{address}/v2/models/{model}/generate", json=body, headers=headers).status_code


def test_known_requests_are_counted(address: str) -> None:
    before = scrape(address)
    statuses = [generate(address, "base"), generate(address, ADAPTER), generate(address, ADAPTER)]
    assert [*statuses, generate(address, "nobody"), generate(address, "base", key="no")] == [200, 200, 200, 404, 401]
    after = scrape(address)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown("adaptrt_requests_total|outcome=ok|surface=triton") == 3
    assert grown("adaptrt_requests_total|outcome=refused|surface=triton") == 2
    assert grown("adaptrt_generations_total|finish_reason=length") == 3
    assert grown("adaptrt_prompt_tokens_total") == 3 * len(PROMPT)
    assert grown("adaptrt_generated_tokens_total") == 3 * MAX_TOKENS
    assert grown("adaptrt_time_to_first_token_seconds_count") == 3
    assert grown("adaptrt_generation_duration_seconds_bucket|le=+Inf") == 3
    # A stream may deliver two tokens at a time.
    assert 3 <= grown("adaptrt_time_between_tokens_seconds_count") <= 3 * (MAX_TOKENS - 1)
    # The draft model is the model itself, so its drafts are right for the base; for the adapter they may be wrong.
    assert grown("adaptrt_draft_tokens_total") >= grown("adaptrt_accepted_draft_tokens_total") > 0
    assert grown("adaptrt_draft_engine_tokens_total") >= grown("adaptrt_draft_tokens_total")
    assert after["adaptrt_draft_engine_bytes"] > after["adaptrt_draft_engine_kv_blocks"] > 0
    assert after["adaptrt_draft_engine_given_up"] == 0
    assert grown("adaptrt_lora_loads_total") == 1
    assert grown("adaptrt_lora_cache_hits_total|level=host") == 2
    assert after["adaptrt_lora_cache_adapters|level=device"] == 1
    assert after[f"vllm:lora_adapter_loaded|adapter_name={ADAPTER}|level=gpu|pinned=false|rank=0"] == 1
    assert after["vllm:num_gpu_loaded_lora_adapters"] == 1 < after["vllm:max_gpu_lora_adapters"]
    assert after["vllm:lora_adapter_load_seconds_count"] == 1
    assert after["adaptrt_requests_running"] == after["adaptrt_requests_waiting"] == 0
    assert after["vllm:kv_cache_usage_perc|model_name=base"] == 0
    assert after["adaptrt_kv_cache_blocks"] > 0
    for name, value in before.items():
        if name.partition("|")[0].endswith(("_total", "_count", "_bucket", "_sum")):
            assert after[name] >= value, name


def test_a_signal_reads_the_rules_of_tenants_again(address: str, root: Path, pids: list[int]) -> None:
    assert generate(address, "base") == 200
    before = scrape(address)
    assert before["adaptrt_tenant_tokens_total|tenant=owner"] > 0
    limit = {"api_keys": ["key"], "tokens_per_minute": 1}
    (root / "tenants.json").write_text(json.dumps({"tenants": {"owner": limit}}))
    os.kill(pids[0], signal.SIGHUP)
    body = {"model": "base", "prompt": PROMPT, "max_tokens": 1}
    headers = {"Authorization": "Bearer key"}
    deadline = time.monotonic() + 60
    while (answer := httpx.post(f"{address}/v1/completions", json=body, headers=headers)).status_code != 429:
        assert answer.status_code == 200
        assert time.monotonic() < deadline
    assert int(answer.headers["Retry-After"]) > 60
    assert "the tokens of owner for this minute are used; accepted: 1 a minute" in answer.json()["error"]["message"]
    assert scrape(address)["adaptrt_tenant_requests_refused_total|rule=tokens_per_minute|tenant=owner"] == 1
    (root / "tenants.json").write_text("{")
    os.kill(pids[0], signal.SIGHUP)
    assert generate(address, "base") == 429
    (root / "tenants.json").write_text('{"tenants": {}}')
    os.kill(pids[0], signal.SIGHUP)
    while generate(address, "base") != 200:
        assert time.monotonic() < deadline


def test_a_refused_key_is_said_in_the_form_of_the_surface(address: str) -> None:
    answer = httpx.get(f"{address}/v2/models/base")
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert answer.json() == {"error": "a key is needed: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'"}
    assert httpx.get(f"{address}/v1/models").json()["error"]["code"] == 401


def test_openmetrics_is_spoken_to_those_who_ask_for_it(address: str) -> None:
    generate(address, "base")
    answer = httpx.get(f"{address}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    names = {family.name for family in open_metrics_families(answer.text)}
    assert {"adaptrt_requests", "adaptrt_time_to_first_token_seconds"} <= names


@pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool; Debian has it in its package prometheus")
def test_promtool_has_nothing_to_say_but_of_the_colon_in_vllms_names(address: str, tmp_path: Path) -> None:
    generate(address, ADAPTER)
    checked = subprocess.run(
        [str(PROMTOOL), "check", "metrics"], input=httpx.get(f"{address}/metrics").text, capture_output=True, text=True
    )
    said = (checked.stdout + checked.stderr).splitlines()
    assert [line for line in said if not re.match(r"vllm:\w+ metric names should not contain ':'", line)] == []
