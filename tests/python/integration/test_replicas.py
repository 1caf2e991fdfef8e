"""A Ray Serve application with two replicas: one endpoint, adapters on both, and replicas that are killed."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer, models

import adaptrt
from adaptrt.formats.adapter.adapter_copy import adapter_digests
from adaptrt.runtime.orchestrator.mode import num_ranks_at
from adaptrt.serve.ray.options import DEFAULT_QUEUE_SLACK
from support.encoders import MODELS as ENCODERS
from support.encoders import engine_of, save_encoder
from support.models import ModelSpec, save_adapter, save_model
from support.object_store import ObjectStoreServer, object_store
from support.pooled import run_pooled, save_sentence_transformer, save_word_tokenizer
from support.processes import processes_with
from support.ray_application import kill_one, ray_serve, run_application, wait_for
from support.serving import build_engine, run_command

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")

SPEC = ModelSpec(max_position_embeddings=65536)
BASE, APPLICATION = "base", "replicas"
ADAPTERS = tuple(f"a{number}" for number in range(5))
KEY = "secret"
KEYS = {"Authorization": f"Bearer {KEY}"}
PROMPT = [3, 4, 5]
# Long enough to kill a replica during the answer.
LONG = 12000
# Long enough that the server notices the client's disconnect before the answer ends.
LONGEST = 65000
SECONDS = 60.0
BODY_BYTES = 1 << 20


@dataclass(frozen=True)
class Place:
    address: str
    engine: Path
    root: Path
    store: ObjectStoreServer

    def arguments(self, **fields: Any) -> dict[str, Any]:
        return {
            "model": str(self.engine), "served_model_name": BASE, "num_threads": 1, "num_replicas": 2,
            "adapter_root": str(self.root), "enable_lora_loading": True, "enable_lora_upload": True,
            "max_body_bytes": BODY_BYTES, **fields,
        }  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    base = tmp_path_factory.mktemp("replicas")
    model = save_model(SPEC, base / "model")
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(model / "tokenizer.json"))
    (model / "chat_template.jinja").write_text("{% for message in messages %}a {% endfor %}")
    for seed, name in enumerate(ADAPTERS):
        save_adapter(model, base / "root" / name, seed, strength=3.0, r=4)
    engine = build_engine(model, base, max_seq_len=65536)
    # Processes of Ray get the environment that Ray was started in.
    with object_store() as store, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(base / "cache"))
        for name in ADAPTERS:
            store.put_directory(f"roots/{name}", base / "root" / name)
        with ray_serve(num_cpus=4) as address:
            made = Place(address, engine, base / "root", store)
            run_application(APPLICATION, made.arguments(batch_dir=str(base / "batches")))
            yield made


@pytest.fixture
def http(place: Place) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{place.address}/{APPLICATION}", timeout=SECONDS) as client:
        yield client


def body(model: str, max_tokens: int = 8, **fields: Any) -> dict[str, Any]:
    return {
        "model": model, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, **fields,
    }  # fmt: skip


def tokens_of(content: Any) -> list[int]:
    (choice,) = content["choices"]
    return list(choice["token_ids"])


@pytest.fixture(scope="module")
def expected(place: Place) -> dict[str, list[int]]:
    """Returns the executor's answers to PROMPT by model name."""
    answers = {}
    with adaptrt.Executor(place.engine, executor_config=adaptrt.ExecutorConfig(num_threads=1)) as executor:
        for name in ADAPTERS:
            executor.add_adapter(name, place.root / name)
        for name in (None, *ADAPTERS):
            request = adaptrt.Request(PROMPT, LONG if name is None else 8)
            id = executor.enqueue_request(request, adapter=name)
            tokens = executor.await_responses(id)[-1].result.output_token_ids[0]
            answers[name or BASE] = list(tokens[len(PROMPT) :])
    assert len({tuple(tokens[:8]) for tokens in answers.values()}) == len(answers)
    return answers


def ask_each(request: dict[str, Any], path: str = "/v1/completions") -> dict[str, tuple[int, Any]]:
    """Returns every replica's own answer by the replica's name."""
    from ray import serve

    from adaptrt.serve.ray.forwarding import ForwardedRequest

    forwarded = ForwardedRequest("POST", path, b"", (), None, json.dumps(request).encode())
    handle = serve.get_deployment_handle("Replica", APPLICATION)
    answers = handle.broadcast("whole_answer", forwarded).results(timeout_s=SECONDS, return_exceptions=True)
    return {
        answer.replica: (answer.status, json.loads(answer.body))
        for answer in answers
        if not isinstance(answer, Exception)
    }


def metric(http: httpx.Client, name: str, **labels: str) -> dict[str, float]:
    """Returns a metric's values by replica."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                found[sample.labels["replica"]] = found.get(sample.labels["replica"], 0.0) + sample.value
    return found


def num_requests(http: httpx.Client) -> float:
    """Returns the number of requests on all replicas now."""
    return sum(sum(metric(http, f"adaptrt_requests_{state}").values()) for state in ("running", "waiting"))


def test_openais_client_is_answered_and_streamed_to(place: Place, expected: dict[str, list[int]]) -> None:
    client = openai.OpenAI(base_url=f"{place.address}/{APPLICATION}/v1", api_key="none")
    extra = {"return_token_ids": True, "ignore_eos": True}
    for model in (BASE, "a0"):
        whole = client.completions.create(model=model, prompt=PROMPT, max_tokens=8, temperature=0, extra_body=extra)
        assert tokens_of(whole.model_dump()) == expected[model][:8]
        pieces = client.completions.create(
            model=model, prompt=PROMPT, max_tokens=8, temperature=0, extra_body=extra, stream=True
        )
        assert [token for piece in pieces for token in tokens_of(piece.model_dump())] == expected[model][:8]
    assert {card.id for card in client.models.list()} >= {BASE, "a0"}
    assert client.models.retrieve("a0").id == "a0"


def test_replicas_answer_the_lines_of_a_batch(place: Place, expected: dict[str, list[int]]) -> None:
    client = openai.OpenAI(base_url=f"{place.address}/{APPLICATION}/v1", api_key="none")
    models = [BASE, "a0", "nobody"]
    lines = [{"custom_id": model, "method": "POST", "url": "/v1/completions", "body": body(model)} for model in models]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"name": "a"}
    )
    wait_for(lambda: client.batches.retrieve(batch.id).status == "completed")
    ended = client.batches.retrieve(batch.id)
    assert ended.output_file_id is not None
    assert ended.error_file_id is not None
    results = [json.loads(line) for line in client.files.content(ended.output_file_id).text.splitlines()]
    found = {result["custom_id"]: tokens_of(result["response"]["body"]) for result in results}
    assert found == {model: expected[model][:8] for model in models[:-1]}
    (failed,) = [json.loads(line) for line in client.files.content(ended.error_file_id).text.splitlines()]
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("nobody", 404)


def test_errors_keep_their_form_and_status(http: httpx.Client) -> None:
    wrong: list[tuple[httpx.Response, int, str | None]] = [
        (http.post("/v1/completions", json=body("nobody")), 404, "model"),
        (http.post("/v1/completions", json=body(BASE, temperature=-1)), 400, "temperature"),
        (http.post("/v1/completions", content=b"{"), 400, None),
        (http.post("/v1/completions", content=b"1" * (BODY_BYTES + 1)), 413, None),
        (http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "/etc"}), 400, "lora_path"),
        (http.post("/v1/unload_lora_adapter", json={"lora_name": "nobody"}), 404, "lora_name"),
        (http.post("/v1/responses", json={"input": "a", "previous_response_id": "r"}), 404, "previous_response_id"),
        (http.get("/v1/responses/r"), 404, None),
        (http.get("/v1/models/nobody"), 404, "model"),
        (http.get("/nowhere"), 404, None),
        (http.get("/"), 404, None),
    ]
    for response, status, param in wrong:
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert (error["code"], error["param"]) == (status, param)
        assert error["message"]
    assert http.post("/v2/models/nobody/generate", json={}).json().keys() == {"error"}
    message = {"model": "nobody", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    assert http.post("/v1/messages", json=message).json()["error"]["type"] == "not_found_error"
    assert http.get("/health").status_code == httpx.codes.OK


def test_a_stored_response_is_found_at_its_replica(http: httpx.Client) -> None:
    asked = {"input": "a", "max_output_tokens": 2, "temperature": 0}
    made = [http.post("/v1/responses", json={**asked, "model": name}) for name in (BASE, "a0", *[BASE] * 4)]
    homes = [response.headers["x-replica"] for response in made]
    for response, home in zip(made, homes, strict=True):
        path = f"/v1/responses/{response.json()['id']}"
        for _ in range(3):
            read = http.get(path)
            assert (read.json(), read.headers["x-replica"]) == (response.json(), home)
        more = {**asked, "model": response.json()["model"], "previous_response_id": response.json()["id"]}
        assert http.post("/v1/responses", json=more).headers["x-replica"] == home
        assert http.delete(path).json()["deleted"]
        assert http.get(path).status_code == httpx.codes.NOT_FOUND


def test_a_client_that_leaves_frees_its_request(http: httpx.Client) -> None:
    asked = body(BASE, LONGEST, stream=True, prompt=[PROMPT] * 8)
    with http.stream("POST", "/v1/completions", json=asked) as response:
        assert response.status_code == httpx.codes.OK
        assert next(response.iter_lines()).startswith("data: ")
    wait_for(lambda: num_requests(http) == 0.0)
    assert sum(metric(http, "adaptrt_generations_total", finish_reason="cancelled").values()) == 8.0


def ask(http: httpx.Client, adapter: str) -> tuple[str, str]:
    """Returns (adapter, replica that answered)."""
    response = http.post("/v1/completions", json=body(adapter, 1))
    assert response.status_code == httpx.codes.OK, response.text
    return adapter, response.headers["x-replica"]


def device_lookups(http: httpx.Client, kind: str) -> float:
    """Returns the device cache's "hits" or "misses" over all replicas."""
    return sum(metric(http, f"adaptrt_lora_cache_{kind}_total", level="device").values())


def home_of(adapter: str, http: httpx.Client) -> str:
    """Returns the replica that gets an adapter's requests before any replica has the adapter."""
    from ray.serve._private.common import DeploymentID, ReplicaID

    from adaptrt.serve.ray.affinity import group_of
    from adaptrt.serve.ray.router import ranked

    replicas = metric(http, "adaptrt_requests_running")
    ids: dict[Any, set[str]] = {ReplicaID(name, DeploymentID("Replica", APPLICATION)): set() for name in replicas}
    assert len(ids) == 2
    return str(ranked(group_of(adapter), ids, {}, 0)[0].unique_id)


def test_requests_go_to_a_replica_that_has_their_adapter(place: Place) -> None:
    """With affinity, one replica reads each adapter; without it, both do. Tests before this one use only adapter a0."""
    names = ADAPTERS[1:]
    pairs: dict[str, set[tuple[str, str]]] = {}
    hit_rates = {}
    with httpx.Client(base_url=f"{place.address}/{APPLICATION}", timeout=SECONDS) as http:
        homes = {(name, home_of(name, http)) for name in names}
    from ray import serve

    run_application("indifferent", place.arguments(adapter_affinity=False, api_key=[KEY]))
    try:
        for application in (APPLICATION, "indifferent"):
            with httpx.Client(base_url=f"{place.address}/{application}", timeout=SECONDS, headers=KEYS) as http:
                before = [device_lookups(http, kind) for kind in ("hits", "misses")]
                with ThreadPoolExecutor(4) as clients:
                    pairs[application] = set(clients.map(partial(ask, http), names * 8))
                hits, misses = (
                    device_lookups(http, kind) - old for kind, old in zip(("hits", "misses"), before, strict=True)
                )
                hit_rates[application] = hits / (hits + misses)
                assert misses >= len(pairs[application])
        assert pairs[APPLICATION] == homes
        assert len(pairs["indifferent"]) > len(names)
        assert hit_rates[APPLICATION] > hit_rates["indifferent"]
        with httpx.Client(base_url=f"{place.address}/indifferent", timeout=SECONDS) as stranger:
            for response in (stranger.post("/v1/completions", json=body(BASE)), stranger.get("/v1/models")):
                assert response.status_code == httpx.codes.UNAUTHORIZED
                assert response.json()["error"]["type"] == "AuthenticationError"
            assert stranger.post("/v2/models/base/infer").json().keys() == {"error"}
            assert stranger.get("/health").status_code == httpx.codes.OK
    finally:
        serve.delete("indifferent")


def test_replicas_find_adapters_in_an_object_store(place: Place, expected: dict[str, list[int]]) -> None:
    """Without affinity both replicas use each adapter; they share a cache, so that each is downloaded once."""
    from ray import serve

    run_application("stores", place.arguments(adapter_root="s3://bucket/roots", adapter_affinity=False))
    try:
        with (
            httpx.Client(base_url=f"{place.address}/stores", timeout=SECONDS) as http,
            ThreadPoolExecutor(4) as clients,
        ):
            names = ADAPTERS * 6
            answers = list(clients.map(lambda name: http.post("/v1/completions", json=body(name)), names))
            assert [tokens_of(answer.json()) for answer in answers] == [expected[name][:8] for name in names]
            assert {len(metric(http, "adaptrt_requests_running"))} == {2}
            assert http.post("/v1/completions", json=body("nobody")).status_code == httpx.codes.NOT_FOUND
            load = {"lora_name": "x", "lora_path": "s3://bucket/roots/a0"}
            refused = http.post("/v1/load_lora_adapter", json=load)
            assert refused.status_code == httpx.codes.BAD_REQUEST
        weights = [path for path in place.store.fetched if path.endswith(".safetensors")]
        assert sorted(weights) == [f"bucket/roots/{name}/adapter_model.safetensors" for name in ADAPTERS]
    finally:
        serve.delete("stores")


def test_requests_leave_the_replica_of_their_adapter_when_too_many_wait_there(http: httpx.Client) -> None:
    """Each request is a stream, and none ends before all of them have been routed."""
    asked = body(ADAPTERS[1], LONG, stream=True)
    with contextlib.ExitStack() as streams:
        answers = [
            streams.enter_context(http.stream("POST", "/v1/completions", json=asked))
            for _ in range(2 * DEFAULT_QUEUE_SLACK)
        ]
        places = Counter(answer.headers["x-replica"] for answer in answers)
        home = home_of(ADAPTERS[1], http)
    assert len(places) == 2
    assert places.most_common(1)[0][0] == home
    assert places[home] - min(places.values()) <= DEFAULT_QUEUE_SLACK + 1
    wait_for(lambda: num_requests(http) == 0.0)


def test_adapters_are_loaded_swapped_and_unloaded_everywhere(
    http: httpx.Client, expected: dict[str, list[int]], place: Place
) -> None:
    def change(route: str, **fields: Any) -> httpx.Response:
        return http.post(f"/v1/{route}_lora_adapter", json={"lora_name": "x", **fields})

    def answers() -> list[tuple[int, Any]]:
        asked = ask_each(body("x"))
        assert len(asked) == 2
        return [(status, tokens_of(content) if status == 200 else None) for status, content in asked.values()]

    assert answers() == [(404, None)] * 2
    assert change("load", lora_path="a0").status_code == httpx.codes.OK
    assert answers() == [(200, expected["a0"])] * 2
    assert change("load", lora_path="a1").status_code == httpx.codes.BAD_REQUEST
    assert change("load", lora_path="a1", load_inplace=True).status_code == httpx.codes.OK
    assert answers() == [(200, expected["a1"])] * 2
    broken = place.root / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text("{}")
    assert change("load", lora_path="broken", load_inplace=True).status_code == httpx.codes.BAD_REQUEST
    assert answers() == [(200, expected["a1"])] * 2
    assert change("unload").status_code == httpx.codes.OK
    assert answers() == [(404, None)] * 2
    assert change("unload").status_code == httpx.codes.NOT_FOUND


def send(http: httpx.Client, directory: Path, name: str, **fields: str) -> httpx.Response:
    """Sends an adapter as files."""
    files = {one: (directory / one).read_bytes() for one in ("adapter_config.json", "adapter_model.safetensors")}
    return http.post("/v1/upload_lora_adapter", data={"lora_name": name, **fields}, files=files)


def test_loaded_adapters_outlive_their_coordinator(
    http: httpx.Client, expected: dict[str, list[int]], place: Place
) -> None:
    # Serve's proxies are reached under host names of their network.
    kept = {"lora_name": "kept", "lora_path": "a2"}
    assert http.post("/v1/load_lora_adapter", json=kept, headers={"Host": "ray-head:8000"}).status_code == 200
    assert send(http, place.root / "a0", "sent").status_code == 200
    answer = send(http, place.root / "a1", "sent", load_inplace="true")
    version, old = answer.json()["id"], f"sent@{adapter_digests(place.root / 'a0')[1]}"
    assert version == f"sent@{adapter_digests(place.root / 'a1')[1]}"
    rows = {row["id"]: row for row in http.get("/v1/adapters", params={"name": "sent"}).json()["data"]}
    assert [(rows[one]["current"], rows[one]["replicas"]) for one in (version, old)] == [(True, 2), (False, 2)]
    kill_one(APPLICATION, "AdapterCoordinator")
    answer = None

    def has_changed() -> bool:
        nonlocal answer
        answer = http.post(
            "/v1/load_lora_adapter", json={"lora_name": "later", "lora_path": "a3", "load_inplace": True}
        )
        return answer.status_code == httpx.codes.OK

    wait_for(has_changed)
    for name, path in (("kept", "a2"), ("later", "a3"), ("sent", "a1"), (old, "a0")):
        assert [tokens_of(content) for _, content in ask_each(body(name)).values()] == [expected[path]] * 2


async def stream(client: httpx.AsyncClient) -> tuple[str, list[int], list[Any]]:
    """Returns (replica, tokens, errors) of a long answer."""
    tokens: list[int] = []
    errors = []
    async with client.stream("POST", "/v1/completions", json=body(BASE, LONG, stream=True)) as response:
        assert response.status_code == httpx.codes.OK
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                content = json.loads(line.removeprefix("data: "))
                if "error" in content:
                    errors.append(content["error"])
                else:
                    tokens += tokens_of(content)
        return response.headers["x-replica"], tokens, errors


async def crowd_while_one_is_killed(
    address: str,
) -> tuple[list[tuple[str, list[int], list[Any]]], list[httpx.Response]]:
    async with httpx.AsyncClient(base_url=f"{address}/{APPLICATION}", timeout=SECONDS) as client:
        streams = [asyncio.create_task(stream(client)) for _ in range(6)]
        whole = [asyncio.create_task(client.post("/v1/completions", json=body(BASE, LONG))) for _ in range(4)]
        await asyncio.sleep(0.5)
        await asyncio.to_thread(kill_one, APPLICATION, "Replica")
        later = [asyncio.create_task(client.post("/v1/completions", json=body("a0"))) for _ in range(8)]
        return await asyncio.gather(*streams), await asyncio.gather(*whole, *later)


def test_a_replica_that_is_killed_costs_its_requests_an_error_and_comes_back(
    place: Place, http: httpx.Client, expected: dict[str, list[int]]
) -> None:
    loaded = {"lora_name": "after", "lora_path": "a4", "load_inplace": True}
    assert http.post("/v1/load_lora_adapter", json=loaded).status_code == httpx.codes.OK
    for path in ("a2", "a3"):
        assert send(http, place.root / path, "fresh", load_inplace="true").status_code == httpx.codes.OK
    old = f"fresh@{adapter_digests(place.root / 'a2')[1]}"
    before = set(ask_each(body(BASE)))
    assert len(before) == 2
    streams, answers = asyncio.run(crowd_while_one_is_killed(place.address))
    lost = {replica for replica, _, errors in streams if errors}
    assert len(lost) == 1
    assert {replica for replica, _, errors in streams if not errors} == before - lost
    for _, tokens, errors in streams:
        assert tokens == expected[BASE][: len(tokens)]
        assert [(error["code"], error["type"]) for error in errors] in ([], [(503, "ServiceUnavailableError")])
        assert errors or len(tokens) == LONG
    for answer in answers:
        if answer.status_code == httpx.codes.OK:
            tokens = tokens_of(answer.json())
            assert tokens == expected[BASE if len(tokens) == LONG else "a0"]
        else:
            assert answer.status_code == httpx.codes.SERVICE_UNAVAILABLE
            assert answer.json()["error"]["type"] == "ServiceUnavailableError"
    wait_for(lambda: len(ask_each(body(BASE))) == 2)
    # The new replica has the same adapters and versions, also those that clients sent.
    for name, path in (("after", "a4"), ("fresh", "a3"), (old, "a2")):
        new = ask_each(body(name))
        assert len(new.keys() - before) == 1
        assert [(status, tokens_of(content)) for status, content in new.values()] == [(200, expected[path])] * 2


def test_a_replica_starts_the_ranks_of_its_engine(place: Place, expected: dict[str, list[int]], tmp_path: Path) -> None:
    """Two stages give the bits of one process, use the CPUs of both, and end with their replica."""
    from ray import serve

    checkpoint, engine = tmp_path / "checkpoint", tmp_path / "engine"
    run_command(
        "convert-checkpoint", "--model_dir", place.engine.parent / "model", "--pp_size", 2, "--output_dir", checkpoint,
        "--dtype", "float32",
    )  # fmt: skip
    run_command(
        "build", "--checkpoint_dir", checkpoint, "--output_dir", engine, "--max_batch_size", 4, "--lora_plugin", "auto",
        "--max_lora_rank", 8, "--max_seq_len", 256,
    )  # fmt: skip
    assert num_ranks_at(engine) == 2
    assert num_ranks_at(place.engine) == num_ranks_at(place.engine.parent / "model") == 1
    run_application("stages", place.arguments(model=str(engine), num_replicas=1))
    try:
        for name in ("a0", BASE):
            answer = httpx.post(f"{place.address}/stages/v1/completions", json=body(name), timeout=SECONDS)
            assert tokens_of(answer.json()) == expected[name][:8]
        workers = processes_with("adaptrt.runtime.orchestrator.worker", engine)
        assert len(workers) == 2
        kill_one("stages", "Replica")
        wait_for(lambda: not workers & processes_with("adaptrt.runtime.orchestrator.worker", engine))
    finally:
        serve.delete("stages")
    wait_for(lambda: not processes_with("adaptrt.runtime.orchestrator.worker", engine))


def test_an_encoder_embeds(place: Place, tmp_path: Path) -> None:
    encoder = ENCODERS["bert"]
    model = save_encoder(encoder, tmp_path / "model")
    save_word_tokenizer(model, encoder.fields["vocab_size"])
    save_sentence_transformer(model, "mean_tokens", normalize=True)
    engine = engine_of(model, tmp_path / "engine")
    inputs = [[3, 4, 5], [6, 7], list(range(8, 50))]
    run_application(
        "embeddings", {"model": str(engine), "served_model_name": BASE, "num_threads": 1, "num_replicas": 2}
    )
    asked = {"model": BASE, "input": inputs}
    answer = httpx.post(f"{place.address}/embeddings/v1/embeddings", json=asked, timeout=SECONDS).json()
    stated = adaptrt.PoolingParams(adaptrt.PoolingType.MEAN, normalize=True)
    with adaptrt.Executor(engine, adaptrt.ModelType.ENCODER_ONLY) as executor:
        for given, entry in zip(inputs, answer["data"], strict=True):
            assert np.asarray(entry["embedding"], np.float32).tobytes() == run_pooled(executor, given, stated).tobytes()
