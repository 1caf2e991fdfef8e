"""GGUF files of the Hub, by their quantisation or their path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

huggingface_hub = pytest.importorskip("huggingface_hub")
gguf_files = pytest.importorskip("support.gguf_files")

from huggingface_hub import constants

from adaptrt import AdapterError, ConfigError
from adaptrt.formats.gguf.model_directory import gguf_file_of
from adaptrt.formats.sources import HubName, find_adapter, find_model
from adaptrt.formats.sources.base_model import other_base_model
from adaptrt.formats.sources.hub_downloads import HubDownloads
from adaptrt.formats.sources.hub_gguf import chosen_files
from adaptrt.formats.sources.kind import Kind
from support.hub_server import Hub, commit_of, hub_server

SIZES = {
    "context_length": 64,
    "embedding_length": 8,
    "block_count": 1,
    "feed_forward_length": 8,
    "attention.head_count": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
FILES = [
    "README.md",
    "m-Q4_K_M.gguf",
    "m-Q4_K_S.gguf",
    "m.IQ4_XS.gguf",
    "mmproj-m-Q8_0.gguf",
    "BF16/m-BF16-00001-of-00002.gguf",
    "BF16/m-BF16-00002-of-00002.gguf",
    "a-Q8_0.gguf",
    "b-q8_0.gguf",
]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    with hub_server() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        url = server.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
        for name, value in (
            ("HF_HUB_CACHE", str(tmp_path / "cache")),
            ("HF_TOKEN_PATH", str(tmp_path / "token")),
            ("HF_HUB_OFFLINE", False),
            ("HF_HUB_DISABLE_XET", True),
        ):
            monkeypatch.setattr(constants, name, value)
        yield server


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A split file with the metadata of Llama, and a file of another quantisation."""
    directory = tmp_path_factory.mktemp("parts")
    keys = {"tokenizer.ggml.model": "none", **{f"llama.{name}": value for name, value in SIZES.items()}}
    embedding = {"token_embd.weight": (np.zeros((16, 8), np.float32), None)}
    norm = {"output_norm.weight": (np.zeros(8, np.float32), None)}
    for number, own in enumerate((embedding, norm)):
        split = {"split.no": number, "split.count": 2, "split.tensors.count": 2, **(keys if number == 0 else {})}
        gguf_files.write_file(directory / f"m-F32-0000{number + 1}-of-00002.gguf", "llama", split, own)
    gguf_files.write_file(directory / "m-Q8_0.gguf", "llama", keys, embedding)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        (HubName("o/r", gguf="Q4_K_M"), ["m-Q4_K_M.gguf"]),
        (HubName("o/r", gguf="q4_k_s"), ["m-Q4_K_S.gguf"]),
        (HubName("o/r", gguf="IQ4_XS"), ["m.IQ4_XS.gguf"]),
        (HubName("o/r", gguf="BF16"), FILES[5:7]),
        (HubName("o/r", None, "BF16", "m-BF16-00002-of-00002.gguf"), FILES[5:7]),
        (HubName("o/r", gguf="a-Q8_0.gguf"), ["a-Q8_0.gguf"]),
    ],
)
def test_one_file_is_chosen_with_its_parts(name: HubName, chosen: list[str]) -> None:
    assert chosen_files(name, FILES, Kind.MODEL) == chosen


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (HubName("o/r", gguf="Q8_0"), "o/r:Q8_0: has several GGUF files of Q8_0; it has /a-Q8_0, /b-q8_0"),
        (HubName("o/r", gguf="Q6_K"), "o/r:Q6_K: has no GGUF file of Q6_K; it has BF16/m"),
        (HubName("o/r", gguf="K_M"), "has no GGUF file of K_M"),
        (HubName("o/r", gguf="c.gguf"), "o/r/c.gguf: has no GGUF file of c.gguf"),
        (HubName("o/r", None, "docs", "Q8_0"), "has no GGUF files; leave out the file"),
    ],
)
def test_no_file_is_guessed(name: HubName, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen_files(name, FILES, Kind.MODEL)


def test_a_file_is_downloaded_and_used_offline(
    hub: Hub, parts: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = {**parts, "README.md": b"text"}
    hub.add("org/model", files)
    source = find_model("org/model:F32")
    assert sorted(hub.fetched()) == ["m-F32-00001-of-00002.gguf", "m-F32-00002-of-00002.gguf"]
    assert source.record == f"hf://org/model@{commit_of(files)}:F32"
    assert source.label == "org/model"
    file = gguf_file_of(source.directory)
    assert file is not None
    assert file.name == "m-F32-00001-of-00002.gguf"
    assert len(HubDownloads().entries()) == 1
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "org/other"}')
    assert other_base_model(tmp_path / "adapter", source.record) == "org/other"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    again = find_model("org/model:F32")
    assert again.directory == source.directory
    assert again.record == source.record
    with pytest.raises(ConfigError, match=r"org/model:Q8_0: .*HF_HUB_OFFLINE"):
        find_model("org/model:Q8_0")


def test_an_adapter_is_downloaded(hub: Hub, parts: dict[str, bytes], tmp_path: Path) -> None:
    keys = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 4.0}
    lora = {f"blk.0.attn_v.weight.lora_{side}": (np.ones((2, 2), np.float32), None) for side in "ab"}
    file = gguf_files.write_file(tmp_path / "own-F32.gguf", "qwen3", keys, lora)
    hub.add("org/adapter", {"own-F32.gguf": file.read_bytes(), "m-Q8_0.gguf": parts["m-Q8_0.gguf"]})
    for name in ("org/adapter:F32", "hf://org/adapter/own-F32.gguf"):
        source = find_adapter(name)
        assert (source.directory / "adapter_config.json").is_file()
        assert source.origin is not None
    assert hub.fetched() == ["own-F32.gguf"]
    assert [each.kind for each in HubDownloads().entries()] == ["adapter"]
    with pytest.raises(AdapterError, match=r"m-Q8_0\.gguf: .*expected adapter, because a LoRA adapter"):
        find_adapter("org/adapter:Q8_0")
    with pytest.raises(AdapterError, match="org/adapter:F16: has no GGUF file of F16"):
        find_adapter("org/adapter:F16")


def test_a_repository_of_files_asks_for_one(hub: Hub, parts: dict[str, bytes]) -> None:
    hub.add("org/model", parts)
    with pytest.raises(ConfigError, match=r"has no config\.json, but GGUF files .*: ORGANISATION/NAME:Q4_K_M"):
        find_model("org/model")
