"""Replicas without Ray: options of an application, routing, and the order of changes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Receive, Scope, Send

import adaptrt
from adaptrt.runtime.adapter_versions import VersionLimits
from adaptrt.serve.errors import ApiError
from adaptrt.serve.options import ServerLimits
from adaptrt.serve.ray.adapter_changes import (
    SECONDS_TO_REMEMBER_UNLOADS,
    AdapterChange,
    ChangeLog,
    Refusal,
    refusal_of,
)
from adaptrt.serve.ray.affinity import NUM_GROUPS, adapter_named, group_of, home_named
from adaptrt.serve.ray.forwarding import ForwardedRequest, WholeAnswer, answer, whole_answer
from adaptrt.serve.ray.merging import asked_of_each, merge_of
from adaptrt.serve.ray.options import application_options, parse_flags
from adaptrt.serve.response_store import home_of, new_response_id

NAMES = ("base", "other")


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        ("/v1/completions", {"model": "fr"}, "fr"),
        ("/v1/chat/completions", {"model": "base:fr"}, "fr"),
        ("/v1/responses", {"model": "fr"}, "fr"),
        ("/v1/messages", {"model": "fr"}, "fr"),
        ("/v1/messages/count_tokens", {"model": "fr"}, "fr"),
        ("/api/chat", {"model": "fr:latest"}, "fr"),
        ("/api/show", {"model": "base:latest"}, None),
        ("/v1/completions", {"model": "base"}, None),
        ("/v1/completions", {"model": "other", "lora_path": "fr"}, "fr"),
        ("/v1/completions", {"adapter_id": "fr"}, "fr"),
        ("/v1/completions", {"model": "base", "lora_request": {"lora_name": "fr"}}, "fr"),
        ("/v1/completions", {"model": "fr", "lora_request": ["de"]}, "fr"),
        ("/tokenize", {"model": "fr"}, "fr"),
        ("/v1/embeddings", {"model": "fr"}, "fr"),
        ("/classify", {"model": "fr"}, "fr"),
        ("/v1/completions", {"model": "team:fr"}, "team:fr"),
        ("/v1/completions", {"model": ["fr"]}, None),
        ("/v1/completions", {"model": "a\nb"}, None),
        ("/v1/completions", {"model": "x" * 257}, None),
        ("/v1/completions", [], None),
        ("/v1/load_lora_adapter", {"model": "fr"}, None),
        ("/v2/models/team/fr/infer", {}, "team/fr"),
        ("/v2/models/fr/versions/1/generate_stream", {}, "fr"),
        ("/v2/models/base/generate", {}, None),
        ("/v2/models/fr", {}, None),
    ],
)
def test_adapter_named(path: str, fields: Any, expected: str | None) -> None:
    assert adapter_named(path, json.dumps(fields).encode(), NAMES, ServerLimits()) == expected


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100000])
def test_bodies_that_are_not_json_name_no_adapter(body: bytes) -> None:
    assert adapter_named("/v1/completions", body, NAMES, ServerLimits()) is None


def test_the_home_of_a_response_is_in_its_id() -> None:
    limits = ServerLimits()
    home = home_of("replica1")
    named = new_response_id(home)
    assert home != home_of("replica2")
    for path in (f"/v1/responses/{named}", f"/v1/responses/{named}/cancel", f"/v1/responses/{named}/input_items"):
        assert home_named(path, b"", limits) == home
    previous = json.dumps({"input": "a", "previous_response_id": named}).encode()
    assert home_named("/v1/responses", previous, limits) == home
    assert home_named("/v1/chat/completions", previous, limits) == ""
    for body in (b"{", b"[]", b'{"previous_response_id": 3}', b'{"previous_response_id": "resp_x"}', b"{}"):
        assert home_named("/v1/responses", body, limits) == ""
    assert home_named(f"/v1/responses/{new_response_id()}", b"", limits) == ""


def test_there_are_no_more_groups_than_stated() -> None:
    groups = {group_of(f"adapter-{number}") for number in range(4 * NUM_GROUPS)}
    assert len(groups) <= NUM_GROUPS
    assert len(groups) > NUM_GROUPS // 2
    assert group_of("fr") == group_of("fr")


def test_flags_are_those_of_the_command() -> None:
    args = parse_flags(
        {"model": "m", "num_threads": "4", "lora_modules": "a=/x b=/y", "adapter_root": ["/r", "/s"],
         "enable_lora_loading": True, "log_requests": "false", "kernels": None, "max_queue_size": 7}
    )  # fmt: skip
    assert (str(args.model), args.num_threads, args.max_queue_size) == ("m", 4, 7)
    assert args.lora_modules == ["a=/x", "b=/y"]
    assert [str(root) for root in args.adapter_root] == ["/r", "/s"]
    assert args.enable_lora_loading
    assert not args.log_requests


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": None}, "model is None; accepted: directory of an engine"),
        ({"num_threads": None}, "num_threads is None; expected 1 or more"),
        ({"num_threads": "many"}, "num_threads: it is many; expected an integer from 1"),
        ({"port": 8000}, "port is given; Serve's proxies listen"),
        ({"kv_cache_dir": "/x"}, "kv_cache_dir is given; only one server may use its file"),
        ({"numreplicas": 2}, "'numreplicas' is not known; accepted: adapter_affinity, adapter_niceness"),
        ({"enable_lora_loading": "yes"}, "enable_lora_loading is 'yes'; accepted: true, false"),
        ({"adapter_root": []}, "adapter_root is []; accepted: a list"),
        ({"kernels": ["a"]}, "kernels is ['a']; accepted: a text or a number"),
        ({"num_replicas": 0}, "num_replicas: Input should be greater than or equal to 1"),
        ({"num_replicas": 2, "max_replicas": 4}, "num_replicas and max_replicas are given"),
        ({"adapter_queue_slack": -1}, "adapter_queue_slack: Input should be greater than or equal to 0"),
        ({"min_replicas": 2}, "min_replicas is given without max_replicas"),
        ({"min_replicas": 3, "max_replicas": 2}, "min_replicas is 3; expected at most max_replicas, 2"),
    ],
)
def test_invalid_options_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(adaptrt.ConfigError) as refused:
        application_options({"model": "m", "num_threads": 1, **fields})
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("name", "accepted", "refused", "said"),
    [
        ("num_replicas", 1, 0, "greater than or equal to 1"),
        ("min_replicas", 0, -1, "greater than or equal to 0"),
        ("max_replicas", 1, 0, "greater than or equal to 1"),
        ("target_ongoing_requests", 0.01, 0, "greater than 0"),
        ("max_ongoing_requests", 1, 0, "greater than or equal to 1"),
        ("adapter_queue_slack", 0, -1, "greater than or equal to 0"),
        ("max_adapters_per_replica", 1, 0, "greater than or equal to 1"),
    ],
)
def test_numbers_of_scaling_are_accepted_from_their_limits_on(
    name: str, accepted: float, refused: float, said: str
) -> None:
    fields = {"model": "m", "num_threads": 1}
    if name in ("min_replicas", "target_ongoing_requests"):
        fields["max_replicas"] = 2
    assert getattr(application_options({**fields, name: accepted}).scaling, name) == accepted
    with pytest.raises(adaptrt.ConfigError, match=f"{name}: Input should be {said}"):
        application_options({**fields, name: refused})


def test_replicas_scale() -> None:
    fixed = application_options({"model": "m", "num_threads": 1, "num_replicas": "3"}).scaling.serve_options()
    assert fixed == {"max_ongoing_requests": 64, "num_replicas": 3}
    scaling = application_options(
        {"model": "m", "num_threads": 1, "max_replicas": 4, "max_ongoing_requests": 10}
    ).scaling
    assert scaling.serve_options()["autoscaling_config"] == {
        "min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 5.0
    }  # fmt: skip


def change(number: int, name: str, path: str | None = "/p", **fields: Any) -> AdapterChange:
    return AdapterChange(name, path, number=number, **fields)


def sent(number: int, name: str, digest: str, num_bytes: int) -> AdapterChange:
    return change(number, name, None, digest=digest, files=(("adapter_config.json", b" " * num_bytes),))


def numbers(log: ChangeLog) -> list[int]:
    return [one.number for one in log.changes]


def test_a_log_keeps_the_newest_change_of_each_name_in_order() -> None:
    log = ChangeLog(VersionLimits(max_versions=0))
    for number, name in enumerate("abca", start=1):
        log.add(change(number, name))
    assert [(one.number, one.name) for one in log.changes] == [(2, "b"), (3, "c"), (4, "a")]
    assert [one.name for one in log.since(3)] == ["a"]
    assert log.number == 4
    other = ChangeLog()
    other.adopt(log.changes)
    assert (other.changes, other.number) == (log.changes, 4)


def test_a_log_keeps_loads_of_old_versions_within_the_limits() -> None:
    log = ChangeLog(VersionLimits(max_versions=2, max_bytes=7))
    for number, path in enumerate("pqrs", start=1):
        log.add(change(number, "a", f"/{path}"))
    assert numbers(log) == [2, 3, 4]
    log.add(change(5, "b", "/p"))
    assert numbers(log) == [2, 3, 4, 5]
    log.add(change(6, "a", "/r"))  # the same directory again: its first load would find the same files
    assert numbers(log) == [2, 4, 5, 6]
    log.add(change(7, "b", None))
    log.add(change(8, "a", None))  # unloading ends old versions too
    assert numbers(log) == [7, 8]
    log.add(sent(9, "a", "x", 4))
    assert numbers(log) == [7, 9]
    log.add(sent(10, "a", "y", 3))
    assert numbers(log) == [7, 9, 10]
    log.add(sent(11, "a", "z", 100))
    assert numbers(log) == [7, 9, 10, 11]
    log.add(sent(12, "a", "y", 3))
    assert numbers(log) == [7, 12]  # the old version z is too large
    by_size = ChangeLog(VersionLimits(max_versions=9, max_bytes=7))
    for number, (digest, size) in enumerate((("v", 4), ("w", 4), ("x", 3), ("y", 1)), start=1):
        by_size.add(sent(number, "a", digest, size))
    assert numbers(by_size) == [2, 3, 4]  # only as many end as must


ROW = {
    "id": "x@1", "name": "x", "digest": "1", "current": True, "kind": "lora", "host_bytes": 5, "device_pages": None,
    "level": "host", "pinned": False, "users": 2, "created": 7, "last_used": None,
}  # fmt: skip


def listed(replica: str, *rows: dict[str, Any], total: int | None = None) -> WholeAnswer:
    return whole(replica, {"object": "list", "data": [ROW | row for row in rows], "total": total or len(rows)})


def merged_list(query: bytes, *answers: WholeAnswer) -> Any:
    merge = merge_of("GET", "/v1/adapters", query)
    assert merge is not None
    response = merge(answers)
    return json.loads(response.body) | {"status": response.status_code}


def test_lists_of_adapters_are_merged() -> None:
    same = {
        "host_bytes": 6,
        "device_pages": 3,
        "level": "device",
        "pinned": True,
        "users": 1,
        "created": 9,
        "last_used": 4,
    }
    old = {"id": "x@0", "digest": "0", "current": False, "level": "disk", "host_bytes": None}
    other = {"id": "y@2", "name": "y", "digest": "2", "level": "disk", "host_bytes": None, "users": 0}
    unread = {"id": "x", "digest": None, "kind": None, "host_bytes": None, "level": "disk", "users": 0, "last_used": 3}
    found = merged_list(b"", listed("b", same, other), listed("a", {}), listed("c", unread, old))
    first, second, third = found["data"]
    assert first == ROW | {
        "host_bytes": 11, "device_pages": 3, "level": "device", "pinned": True, "users": 3, "last_used": 4,
        "replicas": 3,
    }  # fmt: skip
    assert [second, third] == [ROW | other | {"replicas": 1}, ROW | old | {"replicas": 1}]
    assert (found["total"], found["object"]) == (3, "list")
    # The replica that has not read the digest may answer first.
    assert merged_list(b"", listed("a", unread), listed("b", {}))["data"] == [
        ROW | {"users": 2, "last_used": 3, "replicas": 2}
    ]
    page = merged_list(b"first=1&limit=1", listed("a", {}, other), listed("b", old))
    assert ([one["id"] for one in page["data"]], page["total"]) == (["y@2"], 3)
    assert merged_list(b"limit=0", listed("a", {}))["data"] == []
    assert merged_list(b"first=999&limit=1", listed("a", {}, total=1001))["total"] == 1001
    too_far = merged_list(b"first=1000&limit=1", listed("a", {}, total=1001))
    assert (too_far["status"], too_far["error"]["param"]) == (400, "limit")
    assert merged_list(b"first=1000&limit=1", listed("a", {}))["data"] == []
    assert merged_list(b"first=a", listed("a"), whole("b", {"error": {}}, 400))["status"] == 400


def test_each_replica_is_asked_for_all_rows() -> None:
    asked = {b"": b"limit=1000", b"first=3&name=a%26b&limit=7": b"limit=1000&name=a%26b", b"name=": b"limit=1000&name="}
    asked |= {query: query for query in (b"first=a", b"first=1&first=1", b"other=1")}
    for query, expected in asked.items():
        request = ForwardedRequest("GET", "/v1/adapters", query, (), None, b"")
        assert asked_of_each(request).query_string == expected
    other = ForwardedRequest("GET", "/v1/models", b"first=1", (), None, b"")
    assert asked_of_each(other) is other


def test_unloads_are_forgotten_once_everybody_has_heard_of_them() -> None:
    log = ChangeLog()
    log.add(change(1, "loaded", made=0.0))
    log.add(change(2, "gone", None, made=0.0))
    log.add(change(3, "initial", None, made=0.0, is_initial=True))
    log.add(change(4, "young", None, made=1.0))
    log.add(change(5, "new", made=SECONDS_TO_REMEMBER_UNLOADS + 0.5))
    assert [one.name for one in log.changes] == ["loaded", "initial", "young", "new"]
    assert log.number == 5


def test_one_replica_that_refuses_is_named() -> None:
    refusal = Refusal.of(ApiError("too large", param="lora_name"))
    assert refusal_of({"r1": None, "r2": None}) is None
    assert refusal_of({"r1": refusal, "r2": refusal}) == refusal
    one = refusal_of({"r1": None, "r2": refusal})
    assert one is not None
    error = one.error()
    assert str(error) == "replica r2 refuses what 1 of 2 replicas would do: too large"
    assert (error.status, error.param) == (400, "lora_name")


def whole(replica: str, body: Any, status: int = 200) -> WholeAnswer:
    text = body if isinstance(body, str) else json.dumps(body)
    return WholeAnswer(replica, status, ((b"content-type", b"application/json"),), text.encode())


def merged(method: str, path: str, *answers: WholeAnswer) -> Any:
    merge = merge_of(method, path)
    assert merge is not None
    return merge(answers)


def test_lists_of_models_are_merged() -> None:
    first = whole("a", {"object": "list", "data": [{"id": "base"}, {"id": "x"}]})
    second = whole("b", {"object": "list", "data": [{"id": "base"}, {"id": "y"}]})
    response = merged("GET", "/v1/models", first, second)
    assert json.loads(response.body) == {"object": "list", "data": [{"id": "base"}, {"id": "x"}, {"id": "y"}]}
    index = merged("POST", "/v2/repository/index", whole("a", [{"name": "x"}]), whole("b", [{"name": "y"}]))
    assert json.loads(index.body) == [{"name": "x"}, {"name": "y"}]
    tags = merged("GET", "/api/tags", whole("a", {"models": [{"name": "x"}]}), whole("b", {"models": [{"name": "x"}]}))
    assert json.loads(tags.body) == {"models": [{"name": "x"}]}
    found = merged("GET", "/v1/models/x", whole("a", {"error": 1}, 404), whole("b", {"id": "x"}))
    assert (found.status_code, json.loads(found.body)) == (200, {"id": "x"})
    assert merged("GET", "/v1/models/x", whole("a", {}, 404), whole("b", {}, 404)).status_code == 404
    assert merged("GET", "/v1/models", first, whole("b", {"error": 1}, 401)).status_code == 401
    assert merge_of("POST", "/v1/completions") is None


def test_all_replicas_reset_their_prefix_cache() -> None:
    done = whole("a", "")
    assert merged("POST", "/reset_prefix_cache", done, whole("b", "")).status_code == 200
    assert merged("POST", "/reset_prefix_cache", done, whole("b", {"error": 1}, 503)).status_code == 503


def test_metrics_have_their_replica() -> None:
    text = (
        "# HELP n_total Things.\n# TYPE n_total counter\nn_total{{kind=\"k\"}} {0}\n"
        "# HELP h Times.\n# TYPE h histogram\nh_bucket{{le=\"+Inf\"}} {0}\nh_count {0}\nh_sum {0}\n"
    )  # fmt: skip
    response = merged("GET", "/metrics", whole("r2", text.format(2)), whole("r1", text.format(1)))
    body = bytes(response.body).decode()
    samples = {
        (sample.name, sample.labels["replica"]): sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
    }
    assert samples == {
        (name, replica): value
        for name in ("n_total", "h_bucket", "h_count", "h_sum")
        for replica, value in (("r1", 1.0), ("r2", 2.0))
    }
    assert body.count("# TYPE n_total counter") == 1


REQUEST = ForwardedRequest("POST", "/x", b"", (), None, b"body")


def test_an_application_gets_the_request_and_hears_of_its_end() -> None:
    heard: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        heard.append((scope["method"], scope["path"], await receive()))
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"date", b"d"), (b"x-request-id", b"i")]}
        )
        await send({"type": "http.response.body", "body": b"1", "more_body": True})
        heard.append(await receive())

    async def main() -> None:
        batches = answer(app, REQUEST, "r1")
        (start, body) = await anext(batches)
        assert start["headers"] == [(b"x-replica", b"r1"), (b"x-replica-request-id", b"i")]
        assert body["body"] == b"1"
        await batches.aclose()

    asyncio.run(main())
    assert heard == [
        ("POST", "/x", {"type": "http.request", "body": b"body", "more_body": False}),
        {"type": "http.disconnect"},
    ]


def test_a_failure_before_the_answer_is_raised_and_one_after_it_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/after":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"whole"})
        raise ValueError("a defect")

    async def main() -> WholeAnswer:
        with pytest.raises(ValueError, match="a defect"):
            await whole_answer(app, REQUEST, "r1")
        return await whole_answer(app, ForwardedRequest("GET", "/after", b"", (), None, b""), "r1")

    assert asyncio.run(main()).body == b"whole"
    assert "GET /after failed" in caplog.text


def test_json_that_a_replica_will_refuse_for_its_size_is_not_parsed() -> None:
    body = b'{"model":"fr","prompt":[1,2,3]}'
    assert adapter_named("/v1/completions", body, NAMES, ServerLimits()) == "fr"
    for limits in (ServerLimits(max_json_items=3), ServerLimits(max_json_bytes=len(body) - 1)):
        assert adapter_named("/v1/completions", body, NAMES, limits) is None
        assert adapter_named("/v2/models/fr/infer", body, NAMES, limits) == "fr"
