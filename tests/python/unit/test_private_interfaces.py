"""Private interfaces of other packages that we use still exist, in versions with an upper bound."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"
PROTOCOL, SANDBOX, REPLICAS = "serve/protocol.py", "runtime/template_sandbox.py", "serve/ray"
HTTPTOOLS = "uvicorn.protocols.http.httptools_impl"

# Package, our module that uses it, object, and the attributes that we use.
ATTRIBUTES = (
    ("uvicorn", PROTOCOL, f"{HTTPTOOLS}:STATUS_LINE", ""),
    (
        "uvicorn", PROTOCOL, f"{HTTPTOOLS}:HttpToolsProtocol",
        "connection_made connection_lost data_received resume_writing on_message_begin on_headers_complete "
        "on_message_complete on_response_complete send_400_response _unset_keepalive_if_required",
    ),
    ("uvicorn", "serve/server.py", "uvicorn:Server", "main_loop handle_exit serve"),
    ("jinja2", SANDBOX, "jinja2.compiler:CodeGenerator", "visit visit_For visit_ExprStmt visit_Concat writeline"),
    ("jinja2", SANDBOX, "jinja2.nodes:EnvironmentAttribute", ""),
    (
        "jinja2", SANDBOX, "jinja2.sandbox:ImmutableSandboxedEnvironment",
        "code_generator_class context_class intercepted_binops call call_binop",
    ),
    (
        "ray", REPLICAS, "ray.serve.request_router:RequestRouter",
        "initialize_state choose_replicas on_send_request on_request_completed",
    ),
    ("ray", REPLICAS, "ray.serve.request_router:RunningReplica", "replica_id multiplexed_model_ids"),
    ("ray", REPLICAS, "ray.serve.handle:DeploymentHandle", "broadcast options remote"),
    ("ray", REPLICAS, "ray.serve.handle:DeploymentBroadcastResponse", "results_async"),
)  # fmt: skip

# Package, our module that uses it, function or class, and the parameters that we pass or receive.
PARAMETERS = (
    ("uvicorn", PROTOCOL, f"{HTTPTOOLS}:HttpToolsProtocol", "config server_state app_state"),
    ("ray", REPLICAS, "ray.serve.request_router:PendingRequest", "routing_context metadata"),
    ("ray", REPLICAS, "ray.serve.handle:DeploymentBroadcastResponse.results_async", "timeout_s return_exceptions"),
    ("ray", REPLICAS, "ray.serve.config:RequestRouterConfig", "request_router_class request_router_kwargs"),
)  # fmt: skip

# Instance attributes: package, our module that uses it, class, and words in its source.
WORDS = (
    ("uvicorn", PROTOCOL, f"{HTTPTOOLS}:HttpToolsProtocol", "self.cycle self.pipeline self.flow self.url self.headers"),
    ("uvicorn", PROTOCOL, f"{HTTPTOOLS}:RequestResponseCycle", "self.response_started self.response_complete"),
    ("uvicorn", PROTOCOL, "uvicorn.protocols.http.flow_control:FlowControl", "self.read_paused self.write_paused"),
)


def find(package: str, place: str) -> Any:
    """Returns the object at module:attribute. Skips the test if the package is not installed."""
    pytest.importorskip(package, reason=f"{package} is not installed")
    module, _, path = place.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        assert hasattr(found, name), missing(package, place)
        found = getattr(found, name)
    return found


def missing(package: str, place: str) -> str:
    return f"{package} {importlib.metadata.version(package)} has no {place}"


@pytest.mark.parametrize(("package", "user", "place", "names"), ATTRIBUTES)
def test_attributes_are_there(package: str, user: str, place: str, names: str) -> None:
    found = find(package, place)
    for name in names.split():
        assert hasattr(found, name), f"{missing(package, f'{place}.{name}')}, which {user} uses"


@pytest.mark.parametrize(("package", "user", "place", "names"), PARAMETERS)
def test_parameters_are_there(package: str, user: str, place: str, names: str) -> None:
    known = inspect.signature(find(package, place)).parameters
    for name in names.split():
        assert name in known, f"{missing(package, f'{place}({name})')}, which {user} uses"


@pytest.mark.parametrize(("package", "user", "place", "words"), WORDS)
def test_instance_attributes_are_there(package: str, user: str, place: str, words: str) -> None:
    source = inspect.getsource(find(package, place))
    for word in words.split():
        assert f"{word} = " in source or f"{word}: " in source, f"{missing(package, f'{place} {word}')}, {user} uses it"


@pytest.mark.parametrize("package", ["uvicorn", "jinja2", "ray"])
def test_versions_have_an_upper_bound_and_are_within_it(package: str) -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    requirements = [Requirement(text) for group in groups for text in group]
    bounds = {requirement.specifier for requirement in requirements if requirement.name == package}
    assert len(bounds) == 1, "all extras name the same versions"
    (bound,) = bounds
    assert any(part.operator == "<" for part in bound)
    pytest.importorskip(package, reason=f"{package} is not installed")
    assert importlib.metadata.version(package) in bound
