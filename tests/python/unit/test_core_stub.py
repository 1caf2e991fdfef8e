"""The installed stub of adaptrt._core, which editors and type checkers read."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from adaptrt import _core

_STUB = Path(_core.__file__ or "").parent / "_core.pyi"
_MAKER = Path(__file__).parents[3] / "cpp" / "bindings" / "stub" / "make_stub.py"


@pytest.fixture(scope="module")
def stub() -> ast.Module:
    return ast.parse(_STUB.read_text(encoding="utf-8"))


def _class(stub: ast.Module, name: str) -> ast.ClassDef:
    (found,) = (node for node in stub.body if isinstance(node, ast.ClassDef) and node.name == name)
    return found


def _method(stub: ast.Module, owner: str, name: str) -> ast.FunctionDef:
    return next(node for node in _class(stub, owner).body if isinstance(node, ast.FunctionDef) and node.name == name)


def _defaults(function: ast.FunctionDef) -> dict[str, str]:
    """Returns the source text of each parameter's default, if it has one."""
    positional = function.args.args[len(function.args.args) - len(function.args.defaults) :]
    pairs = [*zip(positional, function.args.defaults, strict=True)]
    pairs += [(a, d) for a, d in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True) if d is not None]
    return {argument.arg: ast.unparse(default) for argument, default in pairs}


def test_the_stub_is_the_one_of_this_module() -> None:
    spec = importlib.util.spec_from_file_location("make_stub", _MAKER)
    assert spec is not None
    assert spec.loader is not None
    make_stub = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_stub)
    assert make_stub.make_stub(_core) == _STUB.read_text(encoding="utf-8")


def test_every_public_name_is_in_the_stub(stub: ast.Module) -> None:
    declared = {node.name for node in stub.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    declared |= {
        node.target.id for node in stub.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    public = {name for name in vars(_core) if not name.startswith("_")}
    assert declared == public


def test_classes_fields_and_functions_have_their_docstrings(stub: ast.Module) -> None:
    config = _core.ExecutorConfig
    assert ast.get_docstring(_class(stub, "ExecutorConfig")) == config.__doc__
    assert ast.get_docstring(_method(stub, "ExecutorConfig", "max_beam_width")) == config.max_beam_width.__doc__
    (kernels,) = (node for node in stub.body if isinstance(node, ast.FunctionDef) and node.name == "cpu_kernels")
    signature, _, documented = (_core.cpu_kernels.__doc__ or "").partition("\n\n")
    assert signature == "cpu_kernels() -> list[str]"
    assert ast.get_docstring(kernels) == documented.strip()
    assert ast.get_docstring(_class(stub, "StepSection")) == _core.StepSection.__doc__


def test_each_overload_has_its_own_docstring(stub: ast.Module) -> None:
    overloads = [
        node
        for node in _class(stub, "LoraLayout").body
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    ]
    documented = {bool(node.args.kwonlyargs): ast.get_docstring(node) for node in overloads}
    assert documented.keys() == {True, False}
    assert documented[True] is None
    assert documented[False]
    assert documented[False] in (_core.LoraLayout.__init__.__doc__ or "")


def test_parameters_have_their_defaults(stub: ast.Module) -> None:
    defaults = _defaults(_method(stub, "ExecutorConfig", "__init__"))
    assert defaults["max_beam_width"] == "1"
    assert defaults["gpu_weights_percent"] == "1.0"
    assert defaults["kernels"] == "''"
    assert defaults["max_queue_size"] == "None"
    assert defaults["batching_type"] == "BatchingType.INFLIGHT"
    assert defaults["scheduler_config"] == "SchedulerConfig()"
    assert "input_token_ids" not in _defaults(_method(stub, "Request", "__init__"))
    assert _defaults(_method(stub, "KvCacheRetentionConfig", "__init__"))["token_range_retention_configs"] == "[]"
