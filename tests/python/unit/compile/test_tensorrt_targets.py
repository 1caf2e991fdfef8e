"""The package and the GPUs that plans are built for, and options that are rejected before building starts."""

from __future__ import annotations

import ctypes
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from adaptrt._core import ConfigError, DType
from adaptrt.builder import cli
from adaptrt.builder.build import build
from adaptrt.builder.compile.tensorrt import targets, timing_cache
from adaptrt.builder.compile.tensorrt.profiles import make_profiles
from adaptrt.builder.compile.tensorrt.refusal import PlanRefusedError, Refusal
from adaptrt.builder.compile.tensorrt.targets import resolve_targets, target_problems
from adaptrt.formats.checkpoint.config import CheckpointConfig
from adaptrt.formats.engine.build_config import BuildConfig, PluginConfig, TensorRtBuildConfig
from adaptrt.formats.engine.tensorrt import capability, package
from adaptrt.formats.engine.tensorrt.package import Package, complete_libraries, installed_package
from adaptrt.formats.models.registry import declare
from support.engines import SMALL, make_checkpoint
from support.models import ModelSpec
from support.tensorrt_plans import needs_tensorrt_rtx, tensorrt_config

SPEC = ModelSpec(num_hidden_layers=1)
RTX = Package("tensorrt_rtx", "1.7", ("8.0", "8.6"))
FULL = Package("tensorrt", "11.4", ())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(SPEC, tmp_path_factory.mktemp("targets"), DType.FLOAT16)


def test_only_capabilities_that_the_kernels_run_on_are_offered() -> None:
    members = ["NONE", "CURRENT", "SM75", "SM121", "SM80", "SM89", "SM86", "SM120"]
    assert capability.offered(members) == ("8.0", "8.6", "8.9", "12.0", "12.1")
    assert [capability.tensorrt_name(name) for name in ("8.0", "12.1")] == ["SM80", "SM121"]


@pytest.mark.parametrize("name", ["8", "8.60", "sm86", "08.6", "8.6 ", "", "1e1.0"])
def test_unknown_capabilities_are_refused(name: str) -> None:
    assert capability.parse_capability(name) is None


@pytest.mark.parametrize(
    ("config", "complaints"),
    [
        (tensorrt_config("7.5"), ["compute_capability is 7.5", "8.0, 8.6, 8.9, 12.0, 12.1, current"]),
        (tensorrt_config("9.0", "8.0"), ["compute_capability is 9.0"]),
        (tensorrt_config("sm80"), ["compute_capability is sm80; expected current or a number such as 8.6"]),
        (tensorrt_config("8.0", "8.0"), ["'8.0 8.0'"]),
        (tensorrt_config("8.0", "current"), ["expected only current"]),
        (tensorrt_config(), ["compute_capability is ''"]),
        (tensorrt_config("8.0", weights="inline"), ["weights is inline; accepted: constants, external"]),
        (
            tensorrt_config("7.5", max_batch_size=0, weights="x"),
            ["max_batch_size is 0", "weights is x", "compute_capability is 7.5"],
        ),
        (
            replace(tensorrt_config("8.0"), plugin_config=PluginConfig(gemm_plugin="bfloat16")),
            ["gemm_plugin bfloat16"],
        ),
    ],
)
@needs_tensorrt_rtx
def test_invalid_targets_are_refused_with_the_reason(
    checkpoint: Path, tmp_path: Path, config: BuildConfig, complaints: list[str]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        build(checkpoint, config, tmp_path / "engine")
    for complaint in complaints:
        assert complaint in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


@needs_tensorrt_rtx
def test_float32_and_a_timing_cache_are_refused_by_name(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(SPEC, tmp_path)
    with pytest.raises(ConfigError) as refusal:
        build(checkpoint, tensorrt_config("8.0"), tmp_path / "engine", timing_cache=Path("timing.bin"), workers=0)
    for complaint in (
        "a float32 checkpoint cannot be built with backend tensorrt",
        "--dtype float16 or bfloat16",
        "timing_cache timing.bin cannot be used: TensorRT for RTX",
        "only tensorrt has one",
        "workers is 0",
    ):
        assert complaint in str(refusal.value)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--compute_capability", "8.0"], "compute_capability and weights need backend tensorrt"),
        (["--weights", "external"], "compute_capability and weights need backend tensorrt"),
        (["--timing_cache", "timing.bin"], "timing_cache timing.bin needs backend tensorrt"),
    ],
)
def test_the_native_backend_has_none_of_its_flags(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], complaint: str
) -> None:
    arguments = ["--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "engine")]
    assert cli.main(["build", *arguments, *flags]) == 2
    assert complaint in capsys.readouterr().err


@needs_tensorrt_rtx
@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")
def test_without_a_gpu_the_default_says_what_to_name(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "engine")]
    assert cli.main(["build", *arguments, "--backend", "tensorrt"]) == 2
    error = capsys.readouterr().err
    assert "compute_capability current needs a GPU in this machine" in error
    assert "needs a compute capability by name: some of 8.0, 8.6, 8.9, 12.0, 12.1" in error


def test_without_a_package_the_extras_are_named(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as refusal:
        build(checkpoint, tensorrt_config("8.0", max_batch_size=0), tmp_path / "engine")
    for words in ("pip install 'adaptrt[tensorrt]' ", "pip install 'adaptrt[tensorrt-rtx]' ", "max_batch_size is 0"):
        assert words in str(refusal.value)


@pytest.fixture
def import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns an empty directory, the only one that Python searches for packages."""
    for name in ("tensorrt", "tensorrt_rtx", "tensorrt_rtx_libs"):
        monkeypatch.delitem(sys.modules, name, raising=False)  # another test may have imported it
    (tmp_path / "packages").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "packages")])
    return tmp_path / "packages"


def test_tensorrt_is_preferred_and_a_mere_directory_is_no_package(import_path: Path) -> None:
    (import_path / "tensorrt").mkdir()
    (import_path / "tensorrt_rtx.py").touch()
    package.importlib.invalidate_caches()
    assert installed_package() == "tensorrt_rtx"
    (import_path / "tensorrt" / "__init__.py").touch()
    package.importlib.invalidate_caches()
    assert installed_package() == "tensorrt"
    assert complete_libraries("tensorrt", import_path) is None


def test_the_link_that_the_wheel_lacks(tmp_path: Path, import_path: Path) -> None:
    libraries, scratch = import_path / "tensorrt_rtx_libs", tmp_path / "scratch"
    assert complete_libraries("tensorrt_rtx", scratch) is None  # not installed from a wheel
    libraries.mkdir()
    scratch.mkdir()
    (libraries / "__init__.py").touch()
    package.importlib.invalidate_caches()
    assert complete_libraries("tensorrt_rtx", scratch) is None
    (libraries / "libtensorrt_rtx.so.1").touch()
    assert complete_libraries("tensorrt_rtx", scratch) == scratch
    assert (scratch / "libtensorrt_rtx.so").resolve() == libraries / "libtensorrt_rtx.so.1"
    (libraries / "libtensorrt_rtx.so").touch()
    assert complete_libraries("tensorrt_rtx", scratch) is None


class Driver:
    """A fake libcuda.so.1 with the functions that we call, for one GPU or for an error."""

    def __init__(self, capability: tuple[int, int] = (8, 6), count: int = 1, init: int = 0) -> None:
        self._capability, self._count, self._init = capability, count, init

    def cuInit(self, flags: ctypes.c_uint) -> int:
        return self._init

    def cuDeviceGetCount(self, count: object) -> int:
        count._obj.value = self._count
        return 0

    def cuDeviceGet(self, device: object, ordinal: ctypes.c_int) -> int:
        device._obj.value = 7
        return 0

    def cuDeviceGetAttribute(self, value: object, attribute: ctypes.c_int, device: ctypes.c_int) -> int:
        assert device.value == 7
        value._obj.value = self._capability[{75: 0, 76: 1}[attribute.value]]
        return 0

    def cuGetErrorName(self, status: ctypes.c_int, name: object) -> int:
        name._obj.value = b"CUDA_ERROR_NO_DEVICE" if status.value == 100 else None
        return 0 if status.value == 100 else 1


def test_the_current_capability_is_the_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver((8, 6)))
    assert resolve_targets(["current"], RTX) == ("8.6",)
    assert resolve_targets(["current"], FULL) == ("8.6",)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver((9, 0)))
    assert resolve_targets(["current"], FULL) == ("9.0",)
    with pytest.raises(ConfigError, match=r"current is 9\.0, which TensorRT for RTX 1\.7 does not build for"):
        resolve_targets(["current"], RTX)


@pytest.mark.parametrize(
    ("driver", "complaint"),
    [
        (Driver(init=100), "cuInit says CUDA_ERROR_NO_DEVICE"),
        (Driver(init=3), "cuInit says error 3"),
        (Driver(count=0), "the driver finds no GPU"),
    ],
)
def test_a_driver_without_a_gpu(monkeypatch: pytest.MonkeyPatch, driver: Driver, complaint: str) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    with pytest.raises(ConfigError, match=complaint):
        capability.current_capability()


def test_tensorrt_builds_for_the_gpu_at_hand_only() -> None:
    assert target_problems(["current"], Path("timing.bin"), FULL) == []
    (problem,) = target_problems(["8.6"], None, FULL)
    assert "is 8.6, which TensorRT 11.4 does not build for; accepted: current" in problem
    assert targets.target_problems(["8.6", "nonsense"], None, RTX) == []  # another check refuses unknown capabilities


class Config:
    """The part of an IBuilderConfig that concerns timing caches."""

    def __init__(self, accepts: bool = True) -> None:
        self.accepts, self.given = accepts, b""

    def create_timing_cache(self, data: bytes) -> Config:
        self.given = data
        return self

    def set_timing_cache(self, cache: Config, ignore_mismatch: bool) -> bool:
        return self.accepts and not ignore_mismatch

    def serialize(self) -> bytes:
        return self.given + b"more"


def test_a_timing_cache_is_read_and_written(tmp_path: Path) -> None:
    path = tmp_path / "timing.bin"
    for expected in (b"more", b"moremore"):
        cache = timing_cache.read_timing_cache(Config(), path, Refusal(None, None, {}))
        timing_cache.write_timing_cache(cache, path)
        assert path.read_bytes() == expected
    assert list(tmp_path.iterdir()) == [path]


def test_a_timing_cache_of_another_gpu_is_refused(tmp_path: Path) -> None:
    class Silent:
        errors = ()

        def take_problems(self) -> list[str]:
            return []

    path = tmp_path / "timing.bin"
    with pytest.raises(PlanRefusedError, match=rf"^{re.escape(str(path))} is not a timing cache of this GPU"):
        timing_cache.read_timing_cache(Config(False), path, Refusal(Silent(), Silent(), {}))


def test_profiles_follow_from_the_sizes() -> None:
    model = CheckpointConfig(
        architecture="LlamaForCausalLM", dtype=DType.FLOAT16, vocab_size=32000, max_position_embeddings=4096,
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_size=128,
        intermediate_size=14336, norm_epsilon=1e-5, rotary_base=1e4,
    )  # fmt: skip
    config = BuildConfig(backend="tensorrt", tensorrt_config=TensorRtBuildConfig(), max_seq_len=1000)
    prefill, decode = make_profiles(config, declare(model))
    assert (prefill.name, decode.name) == ("prefill", "decode")
    assert prefill.sizes["num_tokens"] == (1, 2048, 8192)
    assert decode.sizes["num_tokens"] == decode.sizes["num_sequences"] == (1, 64, 2048)
    assert prefill.sizes["num_sequences_plus_1"] == (2, 65, 2049)
    assert prefill.sizes["max_blocks"] == (1, 32, 32)
    # A block takes 128 KiB per layer, and the pool of a layer is limited to 256 GiB.
    assert prefill.sizes["num_blocks"] == (1, 2048 * 32, 1 << 21)
    small, _ = make_profiles(replace(config, max_num_tokens=100), declare(model))
    assert small.sizes["num_sequences"] == (1, 64, 100)  # every sequence has at least one token
    tiny = replace(model, num_key_value_heads=1, head_size=2)
    assert make_profiles(replace(SMALL, tokens_per_block=1), declare(tiny))[0].sizes["num_blocks"].max == (1 << 31) - 1
