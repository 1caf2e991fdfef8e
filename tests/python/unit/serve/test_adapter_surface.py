"""Adapters over HTTP: the list of versions, files that clients send, and keys of administrators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest

from adaptrt.formats.adapter.adapter import Adapter
from adaptrt.serve.adapter_routes import ADAPTER_PATHS
from adaptrt.serve.options import ServerLimits
from support.kinds import save_kind
from support.models import save_adapter
from support.served_app import AppClient, AppPlace, make_place, run_app

FILES = ("adapter_config.json", "adapter_model.safetensors")
ALLOWED = {"enable_lora_upload": True}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> AppPlace:
    return make_place(tmp_path_factory.mktemp("surface"), ("poet", "clerk"))


def files_of(directory: Path, *names: str) -> dict[str, Any]:
    return {name: (name, (directory / name).read_bytes()) for name in names or FILES}


def test_the_list_has_all_versions(place: AppPlace) -> None:
    async def body(client: AppClient) -> None:
        await client.load("it", "poet")
        assert (await client.post("/load_lora_adapter", lora_name="kept", lora_path="clerk", pinned=True)).is_success
        (unused,) = await client.adapters(name="it")
        assert (unused["level"], unused["last_used"], unused["users"]) == ("host", None, 0)
        await client.tokens("it")
        await client.load("it", "clerk")
        new, old, kept = await client.adapters()
        assert (new["current"], old["current"], kept["pinned"]) == (True, False, True)
        assert (new["source"], old["source"]) == (str(place.root / "clerk"), str(place.root / "poet"))
        assert new["digest"] == kept["digest"] != old["digest"] == unused["digest"]
        assert old["id"] == f"it@{old['digest']}"
        assert old["last_used"] >= old["created"]
        for row in (new, old, kept):
            assert (row["kind"], row["max_rank"]) == ("lora", 4)
            assert row["bytes"] == sum((Path(row["source"]) / name).stat().st_size for name in FILES)
            assert row["host_bytes"] > 0
        assert (old["level"], kept["level"]) == ("device", "device")
        assert [row["name"] for row in await client.adapters(first=1, limit=1)] == ["it"]
        shown = (await client.http.get("/api/state", params={"search": "it"})).json()["adapters"]["list"]
        assert [row["name"] for row in shown] == ["it", f"it@{old['digest'][:12]}"]
        assert await client.tokens(shown[1]["name"]) == await client.tokens(old["id"])
        answer = await client.http.get("/v1/adapters", params={"limit": 0})
        assert answer.json() == {"object": "list", "data": [], "total": 3}
        assert (await client.http.get("/v1/adapters", params={"level": "host"})).status_code == 400

    run_app(place, body)


def test_the_list_has_the_kind_of_each(place: AppPlace, tmp_path: Path) -> None:
    save_adapter(place.model, tmp_path / "dora", 1, r=4, use_dora=True)
    save_adapter(place.model, tmp_path / "alora", 2, r=4, alora_invocation_tokens=[5])
    ia3 = peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    save_kind(place.model, tmp_path / "ia3", ia3, 3)

    async def body(client: AppClient) -> None:
        for name in ("alora", "dora", "ia3"):
            await client.tokens(name)
        assert [row["kind"] for row in await client.adapters()] == ["alora", "dora", "ia3"]

    run_app(place, body, adapter_roots=(tmp_path,))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("LoRA, rsLoRA scaling", "lora"), ("DoRA of MLX-LM", "dora"), ("trained tokens", "trained_tokens")],
)
def test_kinds_of_adapters_in_one_word(text: str, expected: str) -> None:
    assert Adapter(Path(), Path(), text, {}, {}).short_kind == expected


def test_clients_send_adapters(place: AppPlace) -> None:
    async def body(client: AppClient) -> None:
        expected = {name: await client.tokens(name) for name in ("poet", "clerk")}
        send = client.http.post(
            "/v1/upload_lora_adapter", data={"lora_name": "it"}, files=files_of(place.root / "poet")
        )
        answer = await send
        assert answer.status_code == 200, answer.text
        assert await client.tokens("it") == expected["poet"]
        (row,) = await client.adapters(name="it")
        assert (row["source"], row["id"]) == ("upload", answer.json()["id"])
        again = {"data": {"lora_name": "it"}, "files": files_of(place.root / "clerk")}
        refused = await client.http.post("/v1/upload_lora_adapter", **again)
        assert (refused.status_code, "already been loaded" in refused.text) == (400, True)
        again["data"]["load_inplace"] = "true"
        directory = client.service.executor.executor.adapters.get("it").directory
        assert (await client.http.post("/v1/upload_lora_adapter", **again)).is_success
        assert await client.tokens("it") == expected["clerk"]
        assert await client.tokens(row["id"]) == expected["poet"]
        # Only the two versions are stored, and nothing after they have ended.
        assert len(list(directory.parent.iterdir())) == 2
        assert (await client.post("/v1/unload_lora_adapter", lora_name="it")).is_success
        assert list(directory.parent.iterdir()) == []

    run_app(place, body, **ALLOWED)


def test_uploads_that_are_refused_leave_nothing(place: AppPlace, tmp_path: Path) -> None:
    files = files_of(place.root / "poet")
    broken = {**files, FILES[1]: (FILES[1], b"\x08\0\0\0\0\0\0\0notjson!")}
    named = {"lora_name": "it"}

    async def body(client: AppClient) -> None:
        for data, sent, status, said in [
            ({}, files, 400, "lora_name: is missing"),
            (named, {FILES[0]: files[FILES[0]]}, 400, f"{FILES[1]}: is missing"),
            (named, {**files, "../x": ("x", b"")}, 400, "../x: is not known here; accepted: lora_name"),
            (named, {**files, "adapter_model.bin": ("x", b"")}, 400, "adapter_model.bin: is not known here"),
            (named, [*files.items(), *files.items()], 400, "adapter_config.json: is given 2 times"),
            ({**named, "pinned": "yes"}, files, 400, "pinned is 'yes'; expected true or false"),
            (named, broken, 400, "adapter_model.safetensors"),
            ({"lora_name": "base"}, files, 400, "which is the base model's name"),
            (named, {**files, FILES[1]: (FILES[1], b"\0" * 30_000)}, 413, "--max-adapter-upload-bytes"),
        ]:
            answer = await client.http.post("/v1/upload_lora_adapter", data=data, files=sent)
            assert (answer.status_code, said in answer.text) == (status, True), answer.text
        assert await client.adapters() == []
        json_body = await client.post("/v1/upload_lora_adapter", lora_name="it")
        assert (json_body.status_code, "multipart/form-data" in json_body.text) == (415, True)
        # Nothing of the refused ones counts. Two versions of this size do not fit.
        sent = {"data": {**named, "load_inplace": "true"}, "files": files}
        assert (await client.http.post("/v1/upload_lora_adapter", **sent)).is_success
        full = await client.http.post("/v1/upload_lora_adapter", **sent)
        assert (full.status_code, "--max-uploaded-bytes" in full.text) == (507, True)
        assert len(await client.adapters()) == 1

    size = sum(len(content) for _, content in files.values())
    limits = ServerLimits(max_adapter_upload_bytes=size + 1, max_uploaded_bytes=2 * size - 1)
    run_app(place, body, limits=limits, **ALLOWED)


def test_uploads_need_their_flag(place: AppPlace) -> None:
    async def body(client: AppClient) -> None:
        sent = client.http.post(
            "/v1/upload_lora_adapter", data={"lora_name": "it"}, files=files_of(place.root / "poet")
        )
        answer = await sent
        assert (answer.status_code, "--enable-lora-upload" in answer.text) == (403, True)

    run_app(place, body)


def test_only_admin_keys_change_adapters(place: AppPlace) -> None:
    async def body(client: AppClient) -> None:
        async def status(path: str, key: str | None, **fields: Any) -> int:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            return (await client.http.post(path, json=fields, headers=headers)).status_code

        for path in (*ADAPTER_PATHS, "/reset_prefix_cache"):
            assert [await status(path, key) for key in (None, "wrong", "user")] == [401, 401, 403], path
            assert await status(path, "admin") not in (401, 403), path
        assert await status("/load_lora_adapter", "admin", lora_name="it", lora_path="poet") == 200
        completion = {"prompt": "a", "max_tokens": 1}
        keys = (None, "wrong", "user", "admin")
        asked = [await status("/v1/completions", key, model="it", **completion) for key in keys]
        assert asked == [401, 401, 200, 200]
        # A request for text may bring an adapter only with an admin key.
        for number, (key, expected) in enumerate({"user": 404, "admin": 200}.items()):
            lora = {"lora_name": f"brought {number}", "lora_path": "clerk"}
            assert await status("/v1/completions", key, model="base", lora_request=lora, **completion) == expected
        # So may a request of Triton's API. The weights have no row; they are read only if the key suffices.
        triton = {"input_ids": [3], "max_tokens": 1, "lora_task_id": 7}
        weights = {"lora_weights": [[[1.0, 2.0]]], "lora_config": [[1, 0, 1, 0]]}
        for key, sent, expected in (("user", weights, 403), ("admin", weights, 400), ("user", {}, 404)):
            assert await status("/v2/models/base/generate", key, **triton, **sent) == expected

    run_app(place, body, api_keys=("user",), admin_api_keys=("admin",), **ALLOWED)


def test_without_other_keys_only_changes_need_one(place: AppPlace) -> None:
    async def body(client: AppClient) -> None:
        await client.tokens("poet")
        refused = await client.load("it", "poet")
        assert (refused.status_code, "an admin key is needed" in refused.text) == (401, True)

    run_app(place, body, admin_api_keys=("admin",))
