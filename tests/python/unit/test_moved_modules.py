"""Old names of modules that were moved out of adaptrt.builder."""

from __future__ import annotations

import importlib
import pickle
import pkgutil
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest

import adaptrt
from adaptrt.builder.moved import MOVED, new_name
from adaptrt.formats.engine.build_config import BuildConfig


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Forgets modules imported under old names before and after each test."""
    _forget()
    yield
    _forget()


def _forget() -> None:
    for name in list(sys.modules):
        if new_name(name) is not None:
            del sys.modules[name]


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_the_same_module_and_says_where_it_is_now(old: str) -> None:
    new = importlib.import_module(f"adaptrt.{MOVED[old]}")
    spec = new.__spec__
    with pytest.warns(DeprecationWarning, match=rf"^adaptrt\.builder\.{old} is now adaptrt\.{MOVED[old]}$"):
        assert importlib.import_module(f"adaptrt.builder.{old}") is new
    assert new.__spec__ is spec
    assert new.__name__ == f"adaptrt.{MOVED[old]}"


def test_every_module_of_a_moved_package_has_its_old_name() -> None:
    for old, new in MOVED.items():
        package = importlib.import_module(f"adaptrt.{new}")
        for inner in pkgutil.walk_packages(getattr(package, "__path__", ()), f"{package.__name__}."):
            module = importlib.import_module(inner.name)
            name = f"adaptrt.builder.{old}{inner.name[len(package.__name__) :]}"
            with pytest.warns(DeprecationWarning, match="is now"):
                found = importlib.import_module(name)
            assert found is module


def test_each_form_of_import_finds_the_module_of_the_new_name() -> None:
    code = """
import warnings
warnings.simplefilter("ignore")
import adaptrt.builder.checkpoint.config
from adaptrt.builder import adapter
from adaptrt.builder.adapter import convert, peft_reader
from adaptrt.builder.json_fields import JsonFields
from adaptrt.builder.network import ops
from adaptrt.builder.network.ops import RmsNorm
import adaptrt.formats.adapter.convert
import adaptrt.formats.adapter.peft_reader
import adaptrt.formats.checkpoint.config
import adaptrt.formats.network.ops
import adaptrt.common.json_fields
assert adaptrt.builder.checkpoint.config is adaptrt.formats.checkpoint.config
assert adapter is adaptrt.formats.adapter
assert convert is adaptrt.formats.adapter.convert
assert peft_reader is adaptrt.formats.adapter.peft_reader
assert JsonFields is adaptrt.common.json_fields.JsonFields
assert ops is adaptrt.formats.network.ops
assert RmsNorm is ops.RmsNorm
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_warning_names_the_line_of_the_import() -> None:
    with pytest.warns(DeprecationWarning, match=r"builder\.json_fields is now") as caught:
        import adaptrt.builder.json_fields  # noqa: F401
    assert [warning.filename for warning in caught] == [__file__]


def test_a_pickle_with_an_old_name_is_read() -> None:
    pickled = pickle.dumps(BuildConfig, protocol=0)
    old = pickled.replace(b"adaptrt.formats.engine.build_config", b"adaptrt.builder.config")
    assert old != pickled
    with pytest.warns(DeprecationWarning, match=r"adaptrt\.builder\.config is now"):
        assert pickle.loads(old) is BuildConfig


@pytest.mark.parametrize("name", ["adaptrt.builder.build", "adaptrt.builder.network.inputs", "adaptrt.serve", "os"])
def test_other_modules_are_found_as_ever(name: str) -> None:
    assert new_name(name) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert importlib.import_module(name).__name__ == name


@pytest.mark.filterwarnings("ignore:.* is now:DeprecationWarning")
@pytest.mark.parametrize("name", ["nothing", "adapter.nothing", "json_fields.nothing", "conversion.published.nothing"])
def test_a_name_that_never_was_is_not_found(name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        importlib.import_module(f"adaptrt.builder.{name}")


def test_no_module_of_ours_uses_an_old_name() -> None:
    names = [module.name for module in pkgutil.walk_packages(adaptrt.__path__, "adaptrt.")]
    assert not [name for name in names if new_name(name) is not None]
