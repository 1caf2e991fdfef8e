"""Options of a server, from the flags of `adaptrt serve`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from .._core import (
    AdapterError,
    ConfigError,
)
from ..common.regular_file import read_regular
from ..common.shown_value import shown
from ..formats.sources import HubName, LocalName, ObjectName, Source, find_adapter, model_label, parse_name
from ..formats.sources.allowed import AllowedSources, allowed_sources
from .adapter_names import LONGEST_NAME, is_name, name_problem
from .command_flags import ADMIN_API_KEY_VARIABLE, API_KEY_VARIABLE, ROOTS
from .media_hosts import MediaHosts
from .options import (
    ServerLimits,
    ServerOptions,
    num_connections,
)
from .remote_adapters import check_packages, check_root
from .tenants import read_tenants

MAX_TEMPLATE_FILE_BYTES: Final = 1 << 22
"""Maximum size of the file of --chat-template."""


def options_of(args: argparse.Namespace) -> ServerOptions:
    """Returns the options that the flags describe. Raises ConfigError that names every flag that cannot be used."""
    names = model_names_of(args)
    roots, root_problems = _roots(args)
    allowed, source_problems = _allowed_sources(args)
    hosts, host_problems = _media_hosts(args)
    chat_template, template_problems = chat_template_of(args)
    modules, module_problems = lora_modules_of(args, names)
    problems = [
        *_name_problems(args, names),
        *root_problems,
        *source_problems,
        *_limit_problems(args),
        *_combination_problems(args),
        *host_problems,
        *_file_problems(args),
        *template_problems,
        *module_problems,
    ]
    if problems:
        raise ConfigError("; ".join(problems))
    return ServerOptions(
        host=args.host,
        port=args.port,
        served_model_name=names,
        api_keys=keys_of(args),
        admin_api_keys=admin_keys_of(args),
        allowed_hosts=tuple(args.allowed_hosts),
        allowed_origins=tuple(dict.fromkeys(origin for origins in args.allowed_origins for origin in origins)),
        disable_fastapi_docs=args.disable_fastapi_docs,
        adapter_roots=roots,
        allowed_adapter_sources=allowed,
        enable_lora_loading=args.enable_lora_loading,
        enable_lora_upload=args.enable_lora_upload,
        allow_no_op_adapters=args.allow_no_op_adapters,
        lora_modules=modules,
        chat_template=chat_template,
        trust_request_chat_template=args.trust_request_chat_template,
        enable_tokenizer_info_endpoint=args.enable_tokenizer_info_endpoint,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        include_eos=args.include_eos,
        batch_dir=args.batch_dir,
        ollama_models=args.ollama_models,
        media_hosts=hosts,
        media_root=_media_root(args),
        log_requests=args.log_requests,
        tenants=args.tenants,
        max_queue_size=args.max_queue_size,
        generation_config=args.generation_config,
        pooling_type=args.pooling_type,
        normalize_embeddings=None if args.normalize_embeddings is None else args.normalize_embeddings == "true",
        cut_embeddings=args.cut_embeddings,
        limits=limits_of(args),
    )


def _name_problems(args: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Returns the problems of names of the base model and of keys."""
    problems = [
        f"served_model_name is '{name}'; expected 1 to {LONGEST_NAME} characters that can be printed"
        for name in names
        if not is_name(name)
    ]
    return problems + [
        f"{flag} is empty; expected a key"
        for flag in ("api_key", "admin_api_key")
        for key in getattr(args, flag)
        if not key
    ]


def _limit_problems(args: argparse.Namespace) -> list[str]:
    try:
        num_connections(limits_of(args))
    except ConfigError as error:
        return [str(error)]
    return []


def _combination_problems(args: argparse.Namespace) -> list[str]:
    """Returns the problems of flags that need other flags or packages."""
    problems = []
    if args.enable_lora_loading and not args.adapter_root and not args.allowed_adapter_sources:
        problems.append(
            "enable_lora_loading is given without adapter_root; expected a directory below which clients may load, or "
            "allowed_adapter_sources"
        )
    if args.allowed_adapter_sources and not args.enable_lora_loading:
        problems.append(
            f"allowed_adapter_sources is {' '.join(args.allowed_adapter_sources)} without enable_lora_loading; "
            "accepted: both, or neither"
        )
    problems += [
        f"{name} needs python-multipart: pip install 'adaptrt[serve]'"
        for name in ("batch_dir", "enable_lora_upload")
        if getattr(args, name) and find_spec("python_multipart") is None
    ]
    if (args.kv_cache_dir is None) != (args.kv_cache_dir_bytes is None):
        names_of_both = ("kv_cache_dir", "kv_cache_dir_bytes")
        given, missing = names_of_both if args.kv_cache_dir_bytes is None else names_of_both[::-1]
        problems.append(f"{given} is {getattr(args, given)} without {missing}; expected both, or neither")
    return problems + [
        f"{name} is {getattr(args, name)} without draft_model; accepted: both, or neither"
        for name in ("max_draft_len", "draft_kv_cache_bytes")
        if getattr(args, name) is not None and args.draft_model is None
    ]


def _file_problems(args: argparse.Namespace) -> list[str]:
    """Returns the problems of directories and of the file of tenants."""
    problems = [
        f"{name} is '{directory}'; expected a directory that can be written"
        for name in ("kv_cache_dir", "ollama_models")
        if (directory := getattr(args, name)) is not None and not (directory.is_dir() and os.access(directory, os.W_OK))
    ]
    if args.tenants is not None:
        try:
            read_tenants(args.tenants, keys_of(args))
        except ConfigError as error:
            problems.append(f"tenants: {error}")
    media_root = _media_root(args)
    if media_root is not None and not media_root.is_dir():
        problems.append(f"allowed_local_media_path is '{media_root}'; expected a directory")
    return problems


def _media_root(args: argparse.Namespace) -> Path | None:
    return Path(args.allowed_local_media_path) if args.allowed_local_media_path else None


def _media_hosts(args: argparse.Namespace) -> tuple[MediaHosts, list[str]]:
    """Returns the hosts from which images are downloaded, and the problems of the flag."""
    try:
        return MediaHosts.of_entries(args.allowed_media_domains), []
    except ConfigError as error:
        return MediaHosts(), [str(error)]


def chat_template_of(args: argparse.Namespace) -> tuple[str | None, list[str]]:
    """Returns the text of the template that replaces the model's, and the problems of the flag."""
    given = args.chat_template
    if given is None:
        return None, []
    try:
        return read_regular(Path(given), MAX_TEMPLATE_FILE_BYTES).decode("utf-8"), []
    except (OSError, ValueError) as error:
        # A value with a brace is the template itself, as in vLLM.
        return (given, []) if "{" in given else (None, [f"chat_template is {shown(given)}: {error}"])


def _allowed_sources(args: argparse.Namespace) -> tuple[AllowedSources, list[str]]:
    """Returns the sources that clients may load from, and the problems of the flag."""
    try:
        allowed = allowed_sources(args.allowed_adapter_sources)
        for name in allowed.kinds:
            check_packages(name)
    except (ConfigError, AdapterError) as error:
        return AllowedSources(), [str(error)]
    return allowed, []


def _roots(args: argparse.Namespace) -> tuple[tuple[Path | HubName | ObjectName, ...], list[str]]:
    """Returns the values of adapter_root, and the problems of the flag. Asks stores if they have the roots."""
    roots: list[Path | HubName | ObjectName] = []
    problems = []
    for given in args.adapter_root:
        try:
            meaning = parse_name(given, AdapterError) if isinstance(given, str) else given
            if not isinstance(meaning, LocalName):
                check_root(meaning)
                roots.append(meaning)
            elif meaning.path.is_dir():
                roots.append(meaning.path)
            else:
                problems.append(f"adapter_root is '{given}'; expected {ROOTS}")
        except AdapterError as error:
            problems.append(f"adapter_root: {error}")
    return tuple(roots), problems


def limits_of(args: argparse.Namespace) -> ServerLimits:
    """Returns the limits that the flags describe: each field has a flag of its name."""
    return ServerLimits(**{field.name: getattr(args, field.name) for field in fields(ServerLimits)})


def keys_of(args: argparse.Namespace) -> tuple[str, ...]:
    """Returns the keys from the flags and the environment; (): no key is needed.

    Raises ConfigError for a variable that is set and empty, which would leave the server open.
    """
    return (*args.api_key, *_key_in(API_KEY_VARIABLE))


def admin_keys_of(args: argparse.Namespace) -> tuple[str, ...]:
    """Returns the admin keys in the same way; (): other keys suffice everywhere."""
    return (*args.admin_api_key, *_key_in(ADMIN_API_KEY_VARIABLE))


def _key_in(variable: str) -> tuple[str, ...]:
    key = os.environ.get(variable)
    if key == "":
        raise ConfigError(f"{variable} is empty; expected a key, or a variable that is not set")
    return () if key is None else (key,)


def model_names_of(args: argparse.Namespace) -> tuple[str, ...]:
    """Returns the names of the base model. Answers show the first one."""
    # The name of a cached engine's directory tells clients nothing, so the model's directory gives the name.
    return tuple(args.served_model_name) or (model_label(args.model),)


def lora_modules_of(
    args: argparse.Namespace, model_names: Sequence[str]
) -> tuple[tuple[tuple[str, Path | Source], ...], list[str]]:
    """Returns names and directories of the adapters in lora_modules, and the problems of the flag."""
    modules: list[tuple[str, Path | Source]] = []
    problems = []
    for text in args.lora_modules:
        try:
            name, given = _lora_module(text)
            source = find_adapter(given)
        except (ConfigError, AdapterError) as error:
            problems.append(str(error))
            continue
        if (problem := name_problem(name, model_names)) is not None:
            problems.append(f"lora_modules {text!r}: the name {problem}")
        path = source.directory
        if not path.is_dir():
            problems.append(f"lora_modules {text!r}: {path} is not a directory; expected that of a PEFT adapter")
        if name in dict(modules):
            problems.append(f"lora_modules {text!r}: '{name}' is given twice; expected another name")
        modules.append((name, path if source.lease is None else source))
    return tuple(modules), problems


def _lora_module(text: str) -> tuple[str, str]:
    """Parses name=adapter, or vLLM's JSON."""
    if text.lstrip().startswith("{"):
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"lora_modules {text!r} is not JSON: {error}") from error
        unknown = set(fields) - {"name", "path", "base_model_name"}
        if (
            unknown
            or not all(isinstance(value, str) for value in fields.values())
            or not {"name", "path"} <= set(fields)
        ):
            raise ConfigError(
                f"lora_modules {text!r}: expected texts name and path, and base_model_name if it is known"
            )
        return fields["name"], fields["path"]
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ConfigError(f"lora_modules {text!r}: expected NAME=ADAPTER")
    return name, path
