"""Options of an application: flags of `adaptrt serve` by name, and its scaling."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..._core import ConfigError
from ...builder.cli import CommandParser
from ..command_flags import add_arguments

DEFAULT_MAX_ONGOING_REQUESTS: Final = 64
DEFAULT_MAX_ADAPTERS: Final = 128
DEFAULT_QUEUE_SLACK: Final = 4
_MODEL: Final = "model"
_NOT_HERE: Final = {
    "host": "Serve's proxies listen: http_options of Serve's configuration",
    "port": "Serve's proxies listen: http_options of Serve's configuration",
    "max_header_bytes": "Serve's proxies read the heads of requests",
    "max_connections": "Serve's proxies hold the connections",
    "header_seconds": "Serve's proxies hold the connections",
    "body_seconds": "Serve's proxies hold the connections",
    "keep_alive_seconds": "Serve's proxies hold the connections: keep_alive_timeout_s of http_options",
    "write_seconds": "Serve's proxies hold the connections",
    "allowed_origins": "a proxy in front of Serve answers web pages of other origins",
    "allowed_adapter_sources": "replicas load adapters only from below their own adapter roots",
    "tenants": "each replica would count for itself",
    "kv_cache_dir": "only one server may use its file, and there are several replicas",
    "ollama_models": "only one server may use its directory, and there are several replicas",
    "kv_cache_dir_bytes": "only one server may use its file, and there are several replicas",
}


class Scaling(BaseModel):
    """Number of replicas, and how requests are spread over them."""

    model_config = ConfigDict(extra="forbid")

    num_replicas: int | None = Field(None, ge=1)
    """None: 1, or autoscaling between min_replicas and max_replicas."""
    min_replicas: int | None = Field(None, ge=0)
    max_replicas: int | None = Field(None, ge=1)
    target_ongoing_requests: float | None = Field(None, gt=0)
    """Requests per replica that autoscaling aims at; None: half of max_ongoing_requests."""
    max_ongoing_requests: int = Field(DEFAULT_MAX_ONGOING_REQUESTS, ge=1)
    """Maximum number of requests per replica. Further requests go to another one, even if this one has the adapter."""
    adapter_affinity: bool = True
    """True: requests go to a replica that has their adapter."""
    adapter_queue_slack: int = Field(DEFAULT_QUEUE_SLACK, ge=0)
    """The adapter's replica is chosen while it has at most this many requests more than the least loaded replica."""
    max_adapters_per_replica: int = Field(DEFAULT_MAX_ADAPTERS, ge=1)
    """Number of recently used adapters per replica that routing considers; at most as many as its LoRA cache holds."""

    @model_validator(mode="after")
    def _check(self) -> Scaling:
        scales = self.max_replicas is not None
        if scales and self.num_replicas is not None:
            raise ValueError("num_replicas and max_replicas are given; accepted: one of them")
        for name in ("min_replicas", "target_ongoing_requests"):
            if getattr(self, name) is not None and not scales:
                raise ValueError(f"{name} is given without max_replicas")
        if scales and (self.min_replicas or 0) > (self.max_replicas or 0):
            raise ValueError(f"min_replicas is {self.min_replicas}; expected at most max_replicas, {self.max_replicas}")
        return self

    def serve_options(self) -> dict[str, Any]:
        """Returns the scaling options of Serve's deployment."""
        shared: dict[str, Any] = {"max_ongoing_requests": self.max_ongoing_requests}
        if self.max_replicas is None:
            return shared | {"num_replicas": self.num_replicas or 1}
        return shared | {
            "autoscaling_config": {
                "min_replicas": 1 if self.min_replicas is None else self.min_replicas,
                "max_replicas": self.max_replicas,
                "target_ongoing_requests": self.target_ongoing_requests or self.max_ongoing_requests / 2,
            }
        }


@dataclass(frozen=True)
class ApplicationOptions:
    """Options of an application."""

    flags: Mapping[str, Any]
    """Flags for parse_flags on the machine of each replica: paths are relative to that machine."""
    parsed: argparse.Namespace
    scaling: Scaling


def application_options(args: Mapping[str, Any]) -> ApplicationOptions:
    """Parses and checks all arguments. Reads no file. Raises ConfigError that names what is wrong."""
    flags = {name.replace("-", "_"): value for name, value in args.items()}
    problems = [f"{name} is given; {reason}" for name, reason in _NOT_HERE.items() if name in flags]
    if problems:
        raise ConfigError("; ".join(problems))
    scaling_fields = {name: flags.pop(name) for name in Scaling.model_fields if name in flags}
    try:
        scaling = Scaling.model_validate(scaling_fields)
    except ValidationError as error:
        said = [
            ": ".join([*map(str, problem["loc"]), problem["msg"].removeprefix("Value error, ")])
            for problem in error.errors(include_url=False, include_context=False, include_input=False)
        ]
        raise ConfigError("; ".join(said)) from error
    parsed = parse_flags(flags)
    if parsed.num_threads is None or parsed.num_threads < 1:
        raise ConfigError(
            f"num_threads is {parsed.num_threads}; expected 1 or more: Ray reserves as many CPUs for each replica"
        )
    return ApplicationOptions(flags, parsed, scaling)


def parse_flags(flags: Mapping[str, Any]) -> argparse.Namespace:
    """Parses flags as `adaptrt serve` does. Raises ConfigError.

    A value is a text, a number, a boolean, a list, or a text with the words of a list. A flag with the value None is
    ignored.
    """
    parser = _FlagParser(prog="adaptrt.serve.ray", description="")
    add_arguments(parser)
    given = {name: value for name, value in flags.items() if value is not None}
    if not isinstance(given.get(_MODEL), str):
        raise ConfigError(f"{_MODEL} is {given.get(_MODEL)!r}; accepted: {parser.action(_MODEL).help}")
    arguments = [given.pop(_MODEL)]
    for name, value in given.items():
        arguments += _arguments(parser, name, value)
    return parser.parse_args(arguments)


class _FlagParser(CommandParser):
    def action(self, name: str) -> argparse.Action:
        """Returns the action of a flag. Raises ConfigError for an unknown flag."""
        actions = {
            option.lstrip("-"): action
            for action in self._actions
            if action.dest != "help"
            for option in action.option_strings or [action.dest]
        }
        if name not in actions:
            ours = {flag for flag, action in actions.items() if action.dest == flag}
            known = ", ".join(sorted({*ours, *Scaling.model_fields} - set(_NOT_HERE)))
            raise ConfigError(f"'{name}' is not known; accepted: {known}")
        return actions[name]

    def knows(self, name: str) -> bool:
        """True if there is a flag of this name."""
        return f"--{name}" in self._option_string_actions

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _arguments(parser: _FlagParser, name: str, value: Any) -> Sequence[str]:
    action = parser.action(name)
    flag = action.option_strings[0]
    if action.nargs == 0:
        known = {"true": True, "false": False}
        is_on = known.get(value.lower()) if isinstance(value, str) else value
        if not isinstance(is_on, bool):
            raise ConfigError(f"{name} is {value!r}; accepted: true, false")
        # A flag without an opposite is switched off by leaving it out.
        return [flag] if is_on else [f"--no_{name}"] if parser.knows(f"no_{name}") else []
    if action.nargs == "+":
        words = shlex.split(value) if isinstance(value, str) else value
        if not isinstance(words, list) or not words:
            raise ConfigError(f"{name} is {value!r}; accepted: a list, or a text of words")
        return [flag, *map(str, words)]
    if not isinstance(value, (str, int, float)) or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; accepted: a text or a number")
    return [f"{flag}={value}"]
