"""Flags of `adaptrt serve`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Final

from .._core import (
    PeftCacheConfig,
)
from ..builder.commands import engine_flags
from ..common.number_flags import MAX_INT32, fraction, integer, seconds
from ..common.shown_value import shown
from ..formats.checkpoint.pooling import POOLING_TYPES
from ..formats.sources import HubName, ObjectName
from ..formats.sources.allowed import SHORT_HUB_PREFIX
from ..formats.sources.grammar import HUB_PREFIX, OBJECT_PREFIX, hub_name, object_name
from ..runtime.guide_trial import GuideLimits
from .options import (
    CPUS_PER_ADAPTER_THREAD,
    DEFAULT_PORT,
    DEFAULT_QUEUE,
    MAX_JSON_DEPTH,
    MOST_ADAPTER_THREADS,
    MOST_CONNECTIONS,
    OTHER_FILES,
    ServerLimits,
)
from .places import allowed_host, allowed_origins
from .tools.forms import ALIASES, AUTO, FORMS, NONE, REASONING_ALIASES, REASONING_FORMS
from .vllm_flags import add_vllm_flags

API_KEY_VARIABLE: Final = "ADAPTRT_API_KEY"
ADMIN_API_KEY_VARIABLE: Final = "ADAPTRT_ADMIN_API_KEY"
ROOTS: Final = "a directory, s3://BUCKET/PREFIX, or hf://ORGANISATION/NAME[@REVISION][/FOLDER]"
"""Values of --adapter-root, for errors."""
MAX_WORK_THREADS: Final = 256
"""Maximum number of threads for one kind of slow work."""
MAX_NICENESS: Final = 19
"""Linux's maximum."""


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


def _adapter_root(text: str) -> str | HubName | ObjectName:
    """Parses a value of adapter_root. Reads no file: command_options.py tells paths from names."""
    found: HubName | ObjectName | None
    if text.startswith(OBJECT_PREFIX):
        found = object_name(text)
    elif text.startswith((HUB_PREFIX, SHORT_HUB_PREFIX)):
        found = hub_name(text.removeprefix(HUB_PREFIX).removeprefix(SHORT_HUB_PREFIX))
    else:
        return text
    if found is None:
        raise argparse.ArgumentTypeError(f"it is '{text}'; expected {ROOTS}")
    return found
