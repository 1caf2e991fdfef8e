"""Repositories of the Hub through the real huggingface_hub, from a server in this process."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

huggingface_hub = pytest.importorskip("huggingface_hub")

from huggingface_hub import constants

import adaptrt.formats.sources.hub as hub_module
from adaptrt import AdapterError, ConfigError
from adaptrt.builder.cli import main as command_line
from adaptrt.formats.sources import HubName, Source, find_adapter, find_model, hub_files, needed_files
from adaptrt.formats.sources.downloads import DownloadCache
from adaptrt.formats.sources.hub_downloads import HubDownloads
from adaptrt.formats.sources.hub_files import HubFiles
from adaptrt.formats.sources.kind import Kind
from adaptrt.formats.sources.remote import DownloadStoppedError
from support.hub_server import Hub, commit_of, hub_server

WEIGHTS = bytes(range(256)) * 40
MODEL = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b"{}",
    "generation_config.json": b"{}",
    "additional_chat_templates/tools.jinja": b"x",
    "README.md": b"text",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": WEIGHTS + b"pickled",
    "onnx/model.onnx": WEIGHTS + b"onnx",
}
ADAPTER = {
    "adapter_config.json": b'{"peft_type": "LORA"}',
    "adapter_model.safetensors": WEIGHTS + b"adapter",
    "adapter_model.bin": WEIGHTS + b"pickled adapter",
    "optimizer.pt": WEIGHTS + b"optimizer",
}


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with hub_server() as hub:
        yield hub


@pytest.fixture
def hub(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Returns the server without repositories, and empties the cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    _point_to(monkeypatch, server.address)
    for name, value in (
        ("HF_HUB_CACHE", str(tmp_path / "cache")),
        ("HF_TOKEN_PATH", str(tmp_path / "token")),
        ("HF_STORED_TOKENS_PATH", str(tmp_path / "tokens")),
        ("HF_HUB_OFFLINE", False),
        ("HF_HUB_DISABLE_XET", True),
    ):
        monkeypatch.setattr(constants, name, value)
    server.repositories.clear()
    server.requests.clear()
    return server


def _point_to(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")


def found_files(source: Source) -> set[str]:
    return {path.relative_to(source.directory).as_posix() for path in source.directory.rglob("*") if path.is_file()}


def test_a_model_is_downloaded_without_the_files_that_nobody_reads(hub: Hub) -> None:
    hub.add("org/model", MODEL)
    source = find_model("org/model")
    assert found_files(source) == {*MODEL} - {"README.md", "pytorch_model.bin", "onnx/model.onnx"}
    assert (source.directory / "model.safetensors").read_bytes() == WEIGHTS
    assert source.record == f"hf://org/model@{commit_of(MODEL)}"
    assert (source.label, str(source)) == ("org/model", "org/model")
    hub.requests.clear()
    assert find_model("org/model") == source
    assert hub.fetched() == []


def test_shards_of_the_index_are_downloaded(hub: Hub) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    files = {
        "config.json": b"{}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        "model-1.safetensors": WEIGHTS + b"1",
        "model-2.safetensors": WEIGHTS + b"2",
        "model-3.safetensors": WEIGHTS + b"3",
    }
    hub.add("org/model", files)
    assert found_files(find_model("org/model")) == {*files} - {"model-3.safetensors"}
    hub.add("org/less", {name: files[name] for name in files if name != "model-2.safetensors"})
    with pytest.raises(ConfigError, match=r"org/less: the index names model-2\.safetensors, which the repository does"):
        find_model("org/less")


def test_an_index_that_leaves_the_directory_is_refused(hub: Hub) -> None:
    index = json.dumps({"weight_map": {"a": "../../model.safetensors"}}).encode()
    hub.add("org/model", {"config.json": b"{}", "model.safetensors.index.json": index})
    with pytest.raises(ConfigError, match=r"expected the plain name of a file"):
        find_model("org/model")


def test_revisions_and_folders(hub: Hub) -> None:
    old = {f"poet/{name}": content for name, content in ADAPTER.items()}
    new = {**old, "poet/adapter_model.safetensors": WEIGHTS + b"new"}
    hub.add("org/adapters", old, branch="v/1")
    hub.add("org/adapters", new)
    source = find_adapter("org/adapters@v%2F1/poet")
    assert found_files(source) == {"adapter_config.json", "adapter_model.safetensors"}
    assert source.record == f"hf://org/adapters@{commit_of(old)}/poet"
    assert (find_adapter("org/adapters/poet").directory / "adapter_model.safetensors").read_bytes() == WEIGHTS + b"new"
    pinned = find_adapter(f"org/adapters@{commit_of(old)}/poet")
    assert pinned.directory == source.directory
    with pytest.raises(AdapterError, match=r"its folders poet have; expected one of them"):
        find_adapter("org/adapters")


def test_a_branch_that_moves_is_another_commit(hub: Hub) -> None:
    hub.add("org/adapter", ADAPTER)
    before = find_adapter("org/adapter")
    hub.add("org/adapter", {**ADAPTER, "adapter_model.safetensors": WEIGHTS + b"moved"})
    after = find_adapter("org/adapter")
    assert after.record != before.record
    assert (after.directory / "adapter_model.safetensors").read_bytes() == WEIGHTS + b"moved"


def test_pickled_weights_are_the_last_choice(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/old", {name: MODEL[name] for name in ("config.json", "pytorch_model.bin")})
    monkeypatch.setattr(needed_files.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"only pickled weights .*pip install 'adaptrt\[torch\]'"):
        find_model("org/old")
    assert hub.fetched() == ["config.json"]
    monkeypatch.undo()


def test_an_error_lists_what_the_repository_holds(hub: Hub) -> None:
    hub.add("org/model", MODEL)
    hub.add("org/adapter", ADAPTER)
    hub.add("org/gguf", {"x.Q4_K_M.gguf": b"x"})
    hub.add("org/bare", {"config.json": b"{}", "weights.gguf": b"x"})
    with pytest.raises(AdapterError, match=r"org/model: has no adapter_config\.json: it is a whole model; expected an"):
        find_adapter("org/model")
    with pytest.raises(ConfigError, match=r"org/adapter: has no config.json: it is an adapter; expected its base"):
        find_model("org/adapter")
    with pytest.raises(ConfigError, match=r"GGUF files \(x.Q4_K_M.gguf\); expected one of them in the name: ORGANISAT"):
        find_model("org/gguf")
    with pytest.raises(ConfigError, match=r"has no weights that can be read; expected model.safetensors; it holds we"):
        find_model("org/bare")


def test_missing_private_and_gated_are_told_apart(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/gated", MODEL).is_gated = True
    hub.add("org/private", MODEL).is_private = True
    hub.add("org/model", MODEL)
    with pytest.raises(ConfigError, match=r"org/gated: the repository is gated: accept its terms at http.*/org/gated"):
        find_model("org/gated")
    for name in ("org/none", "org/private"):
        with pytest.raises(ConfigError, match=f"no local path '{name}', and no repository .* a private one needs HF_T"):
            find_model(name)
    with pytest.raises(ConfigError, match=r"the repository has no revision 'v9'"):
        find_model("org/model@v9")
    monkeypatch.setenv("HF_TOKEN", "right")
    assert find_model("org/gated").label == "org/gated"
    assert find_model("org/private").label == "org/private"


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (401, "does not accept the token|a private one needs HF_TOKEN"),
        (403, "the token may not read the repository"),
        (404, "the Hub answers 404|no repository"),
    ],
)
def test_statuses_are_explained(hub: Hub, status: int, message: str) -> None:
    hub.add("org/model", MODEL).status = status
    with pytest.raises(ConfigError, match=message):
        find_model("org/model")


def test_too_many_requests_are_explained(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.utils._http as http

    monkeypatch.setattr(http.time, "sleep", lambda seconds: None)  # huggingface_hub retries a few times
    hub.add("org/model", MODEL).status = 429
    with pytest.raises(ConfigError, match=r"limits the number of requests; wait a few minutes"):
        find_model("org/model")


def test_a_copy_serves_without_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/model", MODEL)
    hub.add("org/adapter", ADAPTER)
    model, adapter = find_model("org/model"), find_adapter("org/adapter")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_model("org/model") == model
    assert find_adapter("org/adapter") == adapter
    with pytest.raises(ConfigError, match=r"org/other: is not in the local cache, and HF_HUB_OFFLINE forbids"):
        find_model("org/other")
    (model.directory / "model.safetensors").unlink()
    (adapter.directory / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"only a part of it has been downloaded, and HF_HUB_OFFLINE forbids"):
        find_model("org/model")
    with pytest.raises(AdapterError, match=r"only a part of it has been downloaded"):
        find_adapter("org/adapter")


def test_a_hub_that_cannot_be_reached_is_said(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.utils._http as http

    monkeypatch.setattr(http.time, "sleep", lambda seconds: None)
    hub.add("org/model", MODEL)
    model = find_model("org/model")
    _point_to(monkeypatch, "http://127.0.0.1:9")
    assert find_model("org/model") == model
    with pytest.raises(ConfigError, match=r"the connection to http://127.0.0.1:9 failed"):
        find_model("org/other")


def test_a_full_disk_is_found_before_the_download(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/model", MODEL)
    usage = hub_module.shutil.disk_usage("/")
    monkeypatch.setattr(hub_module.shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(ConfigError, match=r"the download needs 1\d\.\d KiB, and 100 bytes are free at .*set HF_HOME"):
        find_model("org/model")
    assert "model.safetensors" not in hub.fetched()


def test_a_disk_that_becomes_full_is_said(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/model", MODEL)

    def fail(*args: object, **kwargs: object) -> str:
        raise OSError(28, "No space left on device", "x")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(ConfigError, match=r"the disk of .* is full; free some space"):
        find_model("org/model")


def test_a_cache_that_cannot_be_written_is_said(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/model", MODEL)
    place = Path("file")
    place.write_text("no directory")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(place / "cache"))
    with pytest.raises(ConfigError, match=r"org/model: the download failed .*Not a directory"):
        find_model("org/model")


def test_a_broken_download_ends_in_an_error_and_goes_on_later(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.file_download as file_download

    monkeypatch.setattr(file_download.time, "sleep", lambda seconds: None)
    repository = hub.add("org/model", MODEL)
    repository.breaks_after = 0
    with pytest.raises(ConfigError, match=r"org/model: model\.safetensors: .*failed .*try again"):
        find_model("org/model")
    repository.breaks_after = None
    assert (find_model("org/model").directory / "model.safetensors").read_bytes() == WEIGHTS


def test_the_command_deletes_what_was_downloaded(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.add("org/model", MODEL)
    hub.add("org/adapter", ADAPTER)
    hub.add("org/others", ADAPTER)
    for name in ADAPTER:
        huggingface_hub.hf_hub_download("org/others", name)  # another program downloads it
    model, adapter, others = find_model("org/model"), find_adapter("org/adapter"), find_adapter("org/others")
    assert (model.lease is None, adapter.lease is None, others.lease is None) == (False, False, True)
    assert sorted(entry.name for entry in HubDownloads().entries()) == sorted([str(model.record), str(adapter.record)])
    assert command_line(["cache"]) == 0
    assert "2 downloads from the Hub" in capsys.readouterr().out
    size = sum(len(content) for name, content in ADAPTER.items() if name in found_files(adapter))
    assert {entry.num_bytes for entry in HubDownloads().entries()} > {size}
    adapter_directory = adapter.directory
    del adapter
    gc.collect()
    assert command_line(["cache", "--clear"]) == 0
    output = capsys.readouterr().out
    assert "kept, because a process uses it" in output
    assert "1 download from the Hub removed" in output
    assert not adapter_directory.exists()
    assert (model.directory / "model.safetensors").read_bytes() == WEIGHTS
    assert (others.directory / "adapter_model.safetensors").is_file()
    again = find_adapter("org/adapter")
    assert again.directory == adapter_directory
    assert (again.directory / "adapter_model.safetensors").read_bytes() == ADAPTER["adapter_model.safetensors"]
    del model, again
    gc.collect()
    assert command_line(["cache", "--max_bytes", "0"]) == 0
    assert "2 downloads from the Hub removed" in capsys.readouterr().out
    # Notes whose files another program deleted are deleted too.
    directory = find_adapter("org/adapter").directory
    gc.collect()
    shutil.rmtree(directory)
    assert HubDownloads().entries() == []
    HubDownloads().clean_up()
    assert list(HubDownloads().directory.iterdir()) == []


def test_downloads_for_requests_are_checked_and_stopped(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = hub.add("org/adapter", ADAPTER)
    files = HubFiles(HubName("org/adapter"), Kind.ADAPTER)
    cache, stop = DownloadCache(), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(hub_files, "_sha256", lambda path: "0" * 64)
        with pytest.raises(
            AdapterError, match=r"adapter_model\.safetensors has the SHA-256 0{64}; expected [0-9a-f]{64}"
        ):
            cache.fetch(files)
    repository.slow_after = 1000
    with ThreadPoolExecutor(1) as pool:
        hub.requests.clear()
        running = pool.submit(cache.fetch, files, stop=stop)
        _wait_for_weights(hub)
        stop.set()
        repository.go_on.set()
        with pytest.raises(DownloadStoppedError):
            running.result(timeout=60)
    assert cache.entries() == []
    assert list(cache.directory.glob(".*.tmp")) == []
    download = cache.fetch(files)
    assert download is not None
    assert (download.directory / "adapter_model.safetensors").read_bytes() == ADAPTER["adapter_model.safetensors"]
    assert {path.name for path in download.directory.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"org/model: is not a local path.*pip install 'adaptrt\[hub\]'"):
        find_model("org/model")


PROGRAM = """
import sys
from adaptrt.formats.sources import find_model
print(find_model("org/model").directory)
"""


def start(hub: Hub, cache: Path) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_download_at_once(hub: Hub, tmp_path: Path) -> None:
    repository = hub.add("org/model", MODEL)
    repository.slow_after = 1000
    processes = [start(hub, tmp_path / "home") for _ in range(2)]
    _wait_for_weights(hub)
    repository.go_on.set()
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert (Path(outputs[0][0].strip()) / "model.safetensors").read_bytes() == WEIGHTS


def test_a_killed_download_is_not_taken_for_a_whole_one(hub: Hub, tmp_path: Path) -> None:
    repository = hub.add("org/model", MODEL)
    repository.slow_after = 1000
    killed = start(hub, tmp_path / "home")
    _wait_for_weights(hub)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    repository.go_on.set()
    after = start(hub, tmp_path / "home")
    output, errors = after.communicate(timeout=120)
    assert after.returncode == 0, errors
    assert (Path(output.strip()) / "model.safetensors").read_bytes() == WEIGHTS


def _wait_for_weights(hub: Hub) -> None:
    end = time.monotonic() + 120
    while not any(method == "GET" and "/cdn/" in path for method, path, _ in hub.requests):
        assert time.monotonic() < end
        time.sleep(0.05)
