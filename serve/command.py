"""`adaptrt serve`: an engine and its adapters over HTTP."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from .._core import (
    AdapterError,
    ConfigError,
    DraftTargetDecodingConfig,
    ExecutorConfig,
    KvCacheConfig,
    ModelType,
    PeftCacheConfig,
)
from ..builder.commands import engine_flags
from ..builder.model_cache.first_use import EnginePlan
from ..common.number_flags import MAX_INT32, fraction, integer, seconds
from ..common.progress import progress_on
from ..common.regular_file import read_regular
from ..common.shown_value import shown
from ..formats.adapter.adapter_copy import TOKENIZER_FILE
from ..formats.checkpoint.pooling import POOLING_TYPES
from ..formats.sources import HubName, LocalName, ObjectName, Source, find_adapter, find_model, model_label, parse_name
from ..formats.sources.allowed import SHORT_HUB_PREFIX, AllowedSources, allowed_sources
from ..formats.sources.grammar import HUB_PREFIX, OBJECT_PREFIX, hub_name, object_name
from ..runtime.adapter_tokenizers import load_tokenizer, require_tokenizer
from ..runtime.chat_template import ChatTemplate
from ..runtime.engine import LoadedEngine, load_engine
from ..runtime.executor import Executor
from ..runtime.first_use import ModelOrEngine, make_engines
from ..runtime.guide_trial import GuideLimits
from ..runtime.images.opened import ImageLimits
from ..runtime.images.vision import memory_for_images
from ..runtime.llm_config import needs_chunks
from ..runtime.llm_options import recommended_sampling
from ..runtime.options.parallel import ParallelConfig
from ..runtime.orchestrator.mode import with_workers, without_parallel_config
from ..runtime.ranks import is_started_by_mpi
from .adapter_names import LONGEST_NAME, is_name, name_problem
from .media_hosts import MediaHosts
from .options import (
    CPUS_PER_ADAPTER_THREAD,
    DEFAULT_PORT,
    DEFAULT_QUEUE,
    MAX_JSON_DEPTH,
    MOST_ADAPTER_THREADS,
    MOST_CONNECTIONS,
    OTHER_FILES,
    ServerLimits,
    ServerOptions,
    num_connections,
)
from .places import allowed_host, allowed_origins
from .remote_adapters import check_packages, check_root
from .tenants import read_tenants
from .tools.forms import ALIASES, AUTO, FORMS, NONE, REASONING_ALIASES, REASONING_FORMS
from .vllm_flags import add_vllm_flags

API_KEY_VARIABLE: Final = "ADAPTRT_API_KEY"
ADMIN_API_KEY_VARIABLE: Final = "ADAPTRT_ADMIN_API_KEY"
_ROOTS: Final = "a directory, s3://BUCKET/PREFIX, or hf://ORGANISATION/NAME[@REVISION][/FOLDER]"
MAX_TEMPLATE_FILE_BYTES: Final = 1 << 22
"""Maximum size of the file of --chat-template."""
MAX_WORK_THREADS: Final = 256
"""Maximum number of threads for one kind of slow work."""
MAX_NICENESS: Final = 19
"""Linux's maximum."""
WORK_LIMITS: Final = (
    "max_batch_files",
    "max_batch_bytes",
    "max_batch_file_bytes",
    "max_batch_lines",
    "max_batches",
    "batch_lines",
    "adapter_threads",
    "adapter_niceness",
    "guide_threads",
    "text_threads",
    "template_threads",
    "image_threads",
    "max_images",
    "max_image_bytes",
    "max_image_pixels",
    "max_all_image_pixels",
    "image_fetch_seconds",
    "download_threads",
    "max_download_bytes",
    "download_cache_bytes",
    "max_adapter_upload_bytes",
    "max_uploaded_bytes",
    "max_old_versions",
    "max_old_version_bytes",
    "file_threads",
    "max_blob_bytes",
    "max_all_blobs_bytes",
    "max_waiting_work",
    "max_named_adapters",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's flags. Flags that vLLM's server also has keep their names."""
    parser.add_argument("model", metavar="MODEL", help=engine_flags.MODEL_HELP)
    _add_server(parser.add_argument_group("server"))
    _add_adapters(parser.add_argument_group("adapters"))
    _add_embeddings(parser.add_argument_group("embeddings"))
    _add_executor(parser.add_argument_group("executor"))
    _add_limits(parser.add_argument_group("limits"))
    engine_flags.add_arguments(parser)
    add_vllm_flags(parser.add_argument_group("vLLM's flags that have only one effect here"))


def _add_server(group: Any) -> None:
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument(
        "--port",
        type=integer(0, 65535),
        default=DEFAULT_PORT,
        help="port to listen on; 0: any free port (default: %(default)s)",
    )
    group.add_argument(
        "--api_key", nargs="+", default=[], metavar="KEY",
        help=f"keys, one of which clients must send; ${API_KEY_VARIABLE} may hold one too, hidden from other users",
    )  # fmt: skip
    group.add_argument(
        "--admin_api_key", nargs="+", default=[], metavar="KEY",
        help="keys, one of which clients must send to change adapters, create models and reset the prefix cache; "
        f"${ADMIN_API_KEY_VARIABLE} may hold one too (default: the keys of --api-key)",
    )  # fmt: skip
    group.add_argument(
        "--allowed_hosts", type=allowed_host, nargs="+", default=[], metavar="NAME",
        help="NAME or NAME:PORT under which browsers may reach the server to load adapters, such as a reverse proxy's",
    )  # fmt: skip
    group.add_argument(
        "--allowed_origins", type=allowed_origins, nargs="+", default=[], metavar="ORIGIN",
        help="web pages that may use the server, as https://app.example.com, or * for all; none of them may load "
        "adapters, unless --allowed-hosts names their host",
    )  # fmt: skip
    group.add_argument("--disable_fastapi_docs", action="store_true", help="serve no /docs and no /openapi.json")
    group.add_argument(
        "--served_model_name", nargs="+", default=[], metavar="NAME",
        help="names of the base model; answers show the first one (default: the directory's name)",
    )  # fmt: skip
    group.add_argument(
        "--chat_template", metavar="FILE",
        help="template that replaces the model's own, as a file or as its text; adapters' own templates still apply",
    )  # fmt: skip
    group.add_argument(
        "--trust_request_chat_template", action="store_true",
        help="allow requests to bring a chat template; it runs in a sandbox with the limits below",
    )  # fmt: skip
    group.add_argument(
        "--enable_tokenizer_info_endpoint", action="store_true",
        help="GET /tokenizer_info shows tokenizer_config.json and the chat template",
    )  # fmt: skip
    group.add_argument(
        "--tool_call_parser", choices=[AUTO, *FORMS, *ALIASES], default=AUTO, metavar="FORMAT",
        help="format in which the model writes function calls; auto: the one in its chat template; others: "
        f"{', '.join([*FORMS, *ALIASES])} (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--reasoning_parser", choices=[AUTO, NONE, *REASONING_FORMS, *REASONING_ALIASES], default=AUTO,
        metavar="FORMAT",
        help="format in which the model writes its reasoning, which answers have in a field of its own; auto: the one "
        "in its chat template; none: reasoning stays part of the text; others: "
        f"{', '.join([*REASONING_FORMS, *REASONING_ALIASES])} (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--enable_auto_tool_choice",
        action="store_true",
        help="vLLM's flag: no effect, because tool_choice 'auto' is always possible",
    )
    group.add_argument(
        "--generation_config", default="auto", metavar="auto|vllm|DIR",
        help="sampling of requests that do not set it; auto: from the model's generation_config.json, DIR: from the "
        "file there, vllm: temperature 1 (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--include_eos", action="store_true",
        help="token_ids, log probs and usage have the token that ended an answer, as in vLLM, unless a request says "
        "otherwise",
    )  # fmt: skip
    group.add_argument(
        "--batch_dir", type=Path, metavar="DIR",
        help="directory of clients' files and batches, which it serves then; it outlives the server, and only one "
        "server may use it",
    )  # fmt: skip
    group.add_argument(
        "--tenants", type=Path, metavar="FILE",
        help="JSON file with the weights and limits of tenants, by API key and adapter; SIGHUP reads it again",
    )  # fmt: skip
    group.add_argument(
        "--allowed_media_domains", nargs="+", action="extend", default=[], metavar="HOST",
        help="hosts from which images of requests are downloaded: a name or an address, either of them optionally with "
        ":PORT, or a network; names must lead to public addresses, or to addresses and networks that are listed too "
        "(default: none)",
    )  # fmt: skip
    group.add_argument(
        "--allowed_local_media_path", metavar="DIR",
        help="allow requests to name files of images below DIR, as file:///PATH",
    )  # fmt: skip
    group.add_argument(
        "--ollama_models", type=Path, metavar="DIR",
        help="allow clients to create models over this one (/api/create) and to store their adapters' files in DIR, "
        "which outlives the server; only one server may use it",
    )  # fmt: skip
    group.add_argument("--log_requests", "--enable_log_requests", action="store_true", help="log one line per request")


def _add_adapters(group: Any) -> None:
    group.add_argument(
        "--lora_modules", nargs="+", default=[], metavar="NAME=ADAPTER",
        help='adapters that are served from the start, by directory or name of the Hub; '
        'JSON is accepted too: {"name": ..., "path": ...}',
    )  # fmt: skip
    group.add_argument(
        "--adapter_root", nargs="+", type=_adapter_root, default=[], metavar="DIR",
        help="serve adapters below DIR, a directory, s3://BUCKET/PREFIX or hf://ORGANISATION/NAME, by their paths from "
        "it; each is loaded on its first request",
    )  # fmt: skip
    group.add_argument(
        "--allowed_adapter_sources", nargs="+", action="extend", default=[], metavar="SOURCE",
        help="hub:ORGANISATION/*, hub:ORGANISATION/NAME, s3://BUCKET/PREFIX/* or s3://BUCKET/PREFIX: clients may load "
        "adapters from there, which the server downloads; separated by spaces or commas (default: none)",
    )  # fmt: skip
    group.add_argument(
        "--enable_lora_loading", action="store_true",
        help="allow clients to load adapters from --adapter-root and --allowed-adapter-sources, and to unload adapters",
    )  # fmt: skip
    group.add_argument(
        "--enable_lora_upload", action="store_true", help="allow clients to send adapters as files, and to unload them"
    )
    group.add_argument(
        "--allow_no_op_adapters", action="store_true",
        help="serve adapters that change nothing, such as untrained ones; without it they are refused",
    )  # fmt: skip


def _add_embeddings(group: Any) -> None:
    group.add_argument(
        "--pooling_type", choices=POOLING_TYPES,
        help="hidden state that becomes a text's embedding (default: from the model's modules.json)",
    )  # fmt: skip
    group.add_argument(
        "--normalize_embeddings", choices=("true", "false"),
        help="true: embeddings are divided by their length (default: from the model's modules.json)",
    )  # fmt: skip
    group.add_argument(
        "--cut_embeddings", action="store_true",
        help="allow clients to ask for fewer dimensions; for models that were trained for it (Matryoshka)",
    )  # fmt: skip


def _add_executor(group: Any) -> None:
    group.add_argument(
        "--num_threads", type=integer(1, MAX_INT32), metavar="N", help="threads of the engine (default: all CPUs)"
    )
    group.add_argument("--kernels", default="", metavar="NAME", help="kernels (default: those chosen for this CPU)")
    engine_flags.add_device_ids(group)
    engine_flags.add_weight_memory(group)
    group.add_argument(
        "--kv_cache_tokens",
        type=integer(1),
        metavar="N",
        help="number of tokens that the KV cache holds (default: as many as memory allows)",
    )
    group.add_argument(
        "--max_state_snapshots", type=integer(0, MAX_INT32), metavar="N",
        help="for models that keep states: number of states from which later requests can continue (default: two for "
        "each sequence of a batch, as far as memory allows)",
    )  # fmt: skip
    group.add_argument(
        "--kv_cache_dir", type=Path, metavar="DIR",
        help="directory of a file for KV blocks that memory does not hold; it outlives the server, and only one server "
        "may use it",
    )  # fmt: skip
    group.add_argument(
        "--kv_cache_dir_bytes", type=integer(1), metavar="N", help="size of that file; required with --kv-cache-dir"
    )
    group.add_argument(
        "--host_cache_bytes", type=integer(0), metavar="N", help="host memory for adapters (default: the executor's)"
    )
    group.add_argument(
        "--device_cache_percent", type=fraction, metavar="F",
        help="fraction of the free memory for adapters that run in one batch (default: the executor's)",
    )  # fmt: skip
    group.add_argument(
        "--lora_storage", default=PeftCacheConfig().lora_storage, metavar="STORAGE",
        help="how adapters are kept in memory: exact; compressed, bfloat16 in twelve bits with the same answers; or "
        "int8, which changes answers (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--max_step_tokens", type=integer(1, MAX_INT32), metavar="N",
        help="maximum number of tokens of a step; longer prompts are divided, so that others wait less for their next "
        "token (default: the engine's max_num_tokens)",
    )  # fmt: skip
    group.add_argument(
        "--draft_model", metavar="MODEL",
        help="a small model with the same tokenizer, or its engine, that drafts tokens; only changes the speed (a "
        "model's engine is built with the defaults of the flags below)",
    )  # fmt: skip
    group.add_argument(
        "--max_draft_len",
        type=integer(1, MAX_INT32),
        metavar="N",
        help="maximum number of draft tokens per step (default: 4)",
    )
    group.add_argument(
        "--draft_kv_cache_bytes",
        type=integer(1),
        metavar="N",
        help="memory for the draft model's KV cache (default: as much as memory allows)",
    )
    group.add_argument(
        "--max_queue_size", type=integer(1, MAX_INT32), default=DEFAULT_QUEUE, metavar="N",
        help="maximum number of waiting requests; further ones are answered with 429 (default: %(default)s)",
    )  # fmt: skip


def _add_limits(group: Any) -> None:
    defaults = ServerLimits()
    for name, kind, text in (
        ("max_body_bytes", integer(1), "maximum size of a request's body"),
        ("max_json_bytes", integer(1), "maximum size of the JSON in a body"),
        ("max_json_items", integer(1), "maximum number of items of all lists and objects in a body's JSON"),
        ("max_json_depth", integer(1, MAX_JSON_DEPTH), "maximum nesting of lists and objects in a body's JSON"),
        ("max_header_bytes", integer(1), "maximum size of a request's line and headers"),
        ("max_prompts", integer(1), "maximum number of prompts or texts in one request"),
        ("max_answers", integer(1), "maximum number of answers to one request: its prompts times n"),
        (
            "max_log_probs",
            integer(1),
            "maximum number of log probs of one request: each token's own, and those of the most likely tokens",
        ),
        ("max_prompt_log_probs", integer(1), "maximum number of log probs of one prompt"),
        (
            "max_tokenize_tokens",
            integer(1),
            "maximum number of tokens of a text for /tokenize; more if the engine accepts longer prompts",
        ),
        (
            "max_template_bytes",
            integer(1),
            "maximum number of bytes that the expressions of a chat template make for one prompt",
        ),
        ("max_template_seconds", seconds(above_zero=True), "time limit for a chat template to write a prompt"),
        ("max_request_seconds", seconds(), "time after which a request ends with the tokens that it has; 0: no limit"),
        ("shutdown_seconds", seconds(), "time that running requests get after SIGTERM"),
        ("header_seconds", seconds(above_zero=True), "time limit for a request's head to arrive"),
        ("body_seconds", seconds(above_zero=True), "time limit for a request's body to arrive"),
        ("keep_alive_seconds", seconds(above_zero=True), "time that a connection may be idle between two requests"),
        (
            "write_seconds",
            seconds(above_zero=True),
            "time in which a client must read some of the answer that waits for it",
        ),
        ("max_batch_files", integer(1), "maximum number of stored files"),
        ("max_batch_bytes", integer(1), "maximum size of all stored files and of the results of running batches"),
        ("max_batch_file_bytes", integer(1), "maximum size of an uploaded file"),
        ("max_batch_lines", integer(1), "maximum number of requests in a batch"),
        ("max_batches", integer(1), "maximum number of stored batches, with those that have ended"),
        ("batch_lines", integer(1), "maximum number of requests of all batches that run at a time"),
        (
            "adapter_niceness",
            integer(0, MAX_NICENESS),
            "niceness of the threads that read and convert adapters, added to the server's (Linux only)",
        ),
        ("guide_threads", integer(1, MAX_WORK_THREADS), "threads that compile guides"),
        ("text_threads", integer(1, MAX_WORK_THREADS), "threads that tokenise and detokenise long texts"),
        ("template_threads", integer(1, MAX_WORK_THREADS), "threads that render chat templates"),
        ("image_threads", integer(1, MAX_WORK_THREADS), "threads that decode images and run the vision tower"),
        ("max_images", integer(0), "maximum number of images in one request"),
        ("max_image_bytes", integer(1), "maximum size of an image's file"),
        ("max_image_pixels", integer(1), "maximum number of an image's pixels"),
        ("max_all_image_pixels", integer(1), "maximum number of pixels of all images of a request together"),
        ("image_fetch_seconds", seconds(above_zero=True), "time limit to download all images of a request"),
        ("download_threads", integer(1, MAX_WORK_THREADS), "threads that download adapters and images for requests"),
        ("max_download_bytes", integer(1), "maximum size of an adapter that is downloaded for a request"),
        (
            "download_cache_bytes",
            integer(1),
            "maximum size of the cache of downloads; the least recently used ones are deleted",
        ),
        ("max_adapter_upload_bytes", integer(1), "maximum size of an adapter that a client sends"),
        ("max_uploaded_bytes", integer(1), "maximum size of all adapters that clients have sent"),
        (
            "max_old_versions",
            integer(0),
            "maximum number of replaced versions of adapters that requests can still ask for as NAME@DIGEST",
        ),
        ("max_old_version_bytes", integer(0), "maximum size of the files of these versions"),
        (
            "file_threads",
            integer(1, MAX_WORK_THREADS),
            "threads that look for adapters and read tokenizers and chat templates",
        ),
        (
            "max_stored_responses",
            integer(0),
            "maximum number of responses of /v1/responses in memory; the least recently used ones leave first; 0: none",
        ),
        ("max_stored_response_bytes", integer(1), "maximum size of these responses, with their conversations"),
        ("max_blob_bytes", integer(1), "maximum size of an adapter's file that /api/blobs stores"),
        ("max_all_blobs_bytes", integer(1), "maximum size of all these files"),
        (
            "max_waiting_work",
            integer(1),
            "maximum number of calls that wait for the threads of one kind; further ones are answered with 429",
        ),
        ("max_named_adapters", integer(0), "maximum number of adapters that metrics name; 0: none"),
    ):
        default = getattr(defaults, name)
        group.add_argument(f"--{name}", type=kind, default=default, metavar="N", help=f"{text} (default: {default})")
    group.add_argument(
        "--limit_mm_per_prompt", dest="max_images", type=_max_images, default=argparse.SUPPRESS, metavar="JSON",
        help='vLLM\'s form of --max-images: {"image": N}',
    )  # fmt: skip
    guides = GuideLimits()
    for name, text in (
        ("max_guide_seconds", "CPU time limit to compile a guide"),
        ("max_guide_bytes", "memory limit to compile a guide"),
        ("max_guide_characters", "maximum number of characters of a guide's grammar"),
    ):
        default = getattr(guides, name)
        group.add_argument(
            f"--{name}", type=integer(1, MAX_INT32), default=default, metavar="N", help=f"{text} (default: {default})"
        )
    group.add_argument(
        "--max_connections", type=integer(1, MAX_INT32), metavar="N",
        help=f"maximum connections (default: {MOST_CONNECTIONS}, or the limit of open files less {OTHER_FILES})",
    )  # fmt: skip
    group.add_argument(
        "--adapter_threads", type=integer(1, MAX_WORK_THREADS), metavar="N",
        help=f"threads that read and convert adapters (default: one for each {CPUS_PER_ADAPTER_THREAD} CPUs, at most "
        f"{MOST_ADAPTER_THREADS})",
    )  # fmt: skip


def options_of(args: argparse.Namespace) -> ServerOptions:
    """Returns the options that the flags describe. Raises ConfigError that names every flag that cannot be used."""
    problems = []
    names = model_names_of(args)
    problems += [
        f"served_model_name is '{name}'; expected 1 to {LONGEST_NAME} characters that can be printed"
        for name in names
        if not is_name(name)
    ]
    roots, root_problems = _roots(args)
    allowed, allowed_problems = _allowed_sources(args)
    problems += root_problems + allowed_problems
    try:
        num_connections(limits_of(args))
    except ConfigError as error:
        problems.append(str(error))
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
    if args.kv_cache_dir is not None and not (args.kv_cache_dir.is_dir() and os.access(args.kv_cache_dir, os.W_OK)):
        problems.append(f"kv_cache_dir is '{args.kv_cache_dir}'; expected a directory that can be written")
    if args.ollama_models is not None and not (args.ollama_models.is_dir() and os.access(args.ollama_models, os.W_OK)):
        problems.append(f"ollama_models is '{args.ollama_models}'; expected a directory that can be written")
    for name in ("max_draft_len", "draft_kv_cache_bytes"):
        if getattr(args, name) is not None and args.draft_model is None:
            problems.append(f"{name} is {getattr(args, name)} without draft_model; accepted: both, or neither")
    problems += ["api_key is empty; expected a key" for key in args.api_key if not key]
    problems += ["admin_api_key is empty; expected a key" for key in args.admin_api_key if not key]
    if args.tenants is not None:
        try:
            read_tenants(args.tenants, keys_of(args))
        except ConfigError as error:
            problems.append(f"tenants: {error}")
    hosts = MediaHosts()
    try:
        hosts = MediaHosts.of_entries(args.allowed_media_domains)
    except ConfigError as error:
        problems.append(str(error))
    media_root = Path(args.allowed_local_media_path) if args.allowed_local_media_path else None
    if media_root is not None and not media_root.is_dir():
        problems.append(f"allowed_local_media_path is '{media_root}'; expected a directory")
    chat_template, template_problems = _chat_template(args)
    problems += template_problems
    modules, module_problems = _lora_modules(args, names)
    problems += module_problems
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
        media_root=media_root,
        log_requests=args.log_requests,
        tenants=args.tenants,
        max_queue_size=args.max_queue_size,
        generation_config=args.generation_config,
        pooling_type=args.pooling_type,
        normalize_embeddings=None if args.normalize_embeddings is None else args.normalize_embeddings == "true",
        cut_embeddings=args.cut_embeddings,
        limits=limits_of(args),
    )


def _max_images(text: str) -> int:
    """Parses a value of limit_mm_per_prompt."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    number = given.pop("image", None) if isinstance(given, dict) else None
    if type(number) is not int or not 0 <= number <= MAX_INT32 or any(given.values()):
        raise argparse.ArgumentTypeError(f'it is {shown(text)}; expected {{"image": N}}, other kinds only with 0')
    return number


def _chat_template(args: argparse.Namespace) -> tuple[str | None, list[str]]:
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


def _adapter_root(text: str) -> str | HubName | ObjectName:
    """Parses a value of adapter_root. Reads no file: _roots() decides between a path and a name without prefix."""
    found: HubName | ObjectName | None
    if text.startswith(OBJECT_PREFIX):
        found = object_name(text)
    elif text.startswith((HUB_PREFIX, SHORT_HUB_PREFIX)):
        found = hub_name(text.removeprefix(HUB_PREFIX).removeprefix(SHORT_HUB_PREFIX))
    else:
        return text
    if found is None:
        raise argparse.ArgumentTypeError(f"it is '{text}'; expected {_ROOTS}")
    return found


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
                problems.append(f"adapter_root is '{given}'; expected {_ROOTS}")
        except AdapterError as error:
            problems.append(f"adapter_root: {error}")
    return tuple(roots), problems


def limits_of(args: argparse.Namespace) -> ServerLimits:
    """Returns the limits that the flags describe."""
    return ServerLimits(
        max_body_bytes=args.max_body_bytes,
        max_json_bytes=args.max_json_bytes,
        max_json_items=args.max_json_items,
        max_json_depth=args.max_json_depth,
        max_stored_responses=args.max_stored_responses,
        max_stored_response_bytes=args.max_stored_response_bytes,
        max_header_bytes=args.max_header_bytes,
        max_prompts=args.max_prompts,
        max_answers=args.max_answers,
        max_log_probs=args.max_log_probs,
        max_prompt_log_probs=args.max_prompt_log_probs,
        max_tokenize_tokens=args.max_tokenize_tokens,
        max_template_bytes=args.max_template_bytes,
        max_template_seconds=args.max_template_seconds,
        max_request_seconds=args.max_request_seconds,
        shutdown_seconds=args.shutdown_seconds,
        max_connections=args.max_connections,
        header_seconds=args.header_seconds,
        body_seconds=args.body_seconds,
        keep_alive_seconds=args.keep_alive_seconds,
        write_seconds=args.write_seconds,
        **{name: getattr(args, name) for name in WORK_LIMITS},
    )


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


def executor_config_of(args: argparse.Namespace) -> ExecutorConfig:
    """Returns the executor's configuration. Raises ConfigError that names every field that cannot be used."""
    config = ExecutorConfig(num_threads=args.num_threads, kernels=args.kernels, max_queue_size=args.max_queue_size)
    config.kv_cache_config = KvCacheConfig(
        max_tokens=args.kv_cache_tokens,
        max_state_snapshots=args.max_state_snapshots,
        host_cache_size=args.kv_cache_dir_bytes,
        host_cache_dir=None if args.kv_cache_dir is None else str(args.kv_cache_dir),
    )
    if args.device_ids is not None:
        config.parallel_config = ParallelConfig(device_ids=args.device_ids)
    config.weight_memory = args.weight_memory
    config.max_num_tokens = args.max_step_tokens
    config.peft_cache_config = PeftCacheConfig(
        host_cache_size=args.host_cache_bytes,
        device_cache_percent=args.device_cache_percent,
        lora_storage=args.lora_storage,
    )
    if args.draft_model is not None:
        draft = DraftTargetDecodingConfig(
            speculative_model_dir=str(args.draft_model), kv_cache_size=args.draft_kv_cache_bytes
        )
        if args.max_draft_len is not None:
            draft.max_draft_len = args.max_draft_len
        config.draft_target_decoding_config = draft
    checked, problems = without_parallel_config(config)
    if problems := [*problems, *checked.validate()]:
        raise ConfigError("; ".join(problems))
    return config


def make_executor(args: argparse.Namespace) -> Executor:
    """Makes the executor. Builds the model's engine on first use; an engine of several ranks gets worker processes.

    Raises AdaptrtError. Flags, sizes, model files and adapters of lora_modules are checked before an engine is built.
    """
    config = executor_config_of(args)
    options = engine_flags.engine_options_of(args)
    model = find_model(args.model)
    planned = ModelOrEngine.of(model, options)
    draft = None if args.draft_model is None else ModelOrEngine.of(find_model(args.draft_model))
    _check_files(args, model.directory, planned.plan)
    engine, config = make_engines(config, planned, draft, progress_on())
    loaded = load_engine(engine, weight_memory=args.weight_memory)
    for name in loaded.adapters:
        if (problem := name_problem(name, model_names_of(args))) is not None:
            raise ConfigError(f"{engine}: name of an adapter that the engine carries {problem}; see served_model_name")
    config.enable_chunked_context = needs_chunks(loaded) or _divides_prompts(args, loaded)
    config.max_beam_width = loaded.config.build_config.max_beam_width
    guide_limits = GuideLimits(args.max_guide_seconds, args.max_guide_bytes, args.max_guide_characters)
    return Executor(
        loaded,
        loaded.model_type,
        with_workers(config, loaded),
        guide_limits=guide_limits,
        compare_vocabularies=draft is None,
        reserved_memory=memory_for_images(loaded, ImageLimits(max_images=args.max_images)),
    )


def _divides_prompts(args: argparse.Namespace, engine: LoadedEngine) -> bool:
    """True if max_step_tokens is given. Raises ConfigError for engines that cannot divide prompts."""
    if args.max_step_tokens is None:
        return False
    if engine.model_type is not ModelType.DECODER_ONLY:
        raise ConfigError(
            f"max_step_tokens is {args.max_step_tokens}; expected none: {engine.directory} is an engine of "
            f"{engine.model_type.name}, which computes prompts whole"
        )
    return True


def _check_files(args: argparse.Namespace, model: Path, plan: EnginePlan | None) -> None:
    """Raises AdaptrtError for files of the model or of lora_modules that a server could not use."""
    recommended_sampling(model, args.generation_config)
    given, _ = _chat_template(args)
    if given is not None:
        ChatTemplate.of_text(given, {}, limits=limits_of(args).template)
    require_tokenizer(model / TOKENIZER_FILE)
    if plan is None or plan.is_made(progress_on()):
        return
    # If the engine exists, the service reads these files once.
    load_tokenizer(model / TOKENIZER_FILE)
    ChatTemplate.load(model)
    for name, path in _lora_modules(args, model_names_of(args))[0]:
        try:
            plan.check_adapter(Path(path))
        except AdapterError as error:
            raise ConfigError(f"lora_modules '{name}={path}': {error}") from error


def run(args: argparse.Namespace) -> int:
    """Serves until the process is told to end."""
    try:
        from .server import bind, serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"adaptrt serve needs {error.name}: pip install 'adaptrt[serve]'") from error
    options = options_of(args)
    args.model = find_model(args.model)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    # Under MPI only rank 0 listens, and the rank is known once the engine is loaded.
    listening = None if is_started_by_mpi() else bind(options)
    with contextlib.nullcontext() if listening is None else listening:
        executor = make_executor(args)
        if not executor.can_enqueue_requests():  # rank 0 serves the requests of all ranks
            executor.shutdown()
            return 0
        serve(
            executor,
            options,
            listening=listening,
            on_ready=lambda address: print(f"serving {args.model} at {address}", flush=True),
        )
    return 0


def _lora_modules(
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
