"""Options and limits of a server."""

from __future__ import annotations

import resource
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from .._core import ConfigError
from ..common.usable_cpus import num_usable_cpus
from ..formats.sources import HubName, ObjectName, Source
from ..formats.sources.allowed import AllowedSources
from ..runtime.adapter_versions import VersionLimits
from ..runtime.images.opened import ImageLimits
from ..runtime.template_limits import DEFAULT_LIMITS, TemplateLimits
from .media_hosts import MediaHosts
from .places import Place

DEFAULT_PORT: Final = 8000
"""vLLM's default port, which clients' examples use."""
DEFAULT_QUEUE: Final = 1024
"""Number of requests that may wait by default."""
MOST_CONNECTIONS: Final = 8192
"""Maximum number of open connections by default."""
MAX_JSON_DEPTH: Final = 256
"""Maximum of max_json_depth: Python's parser recurses, and may be called from hundreds of frames deep."""
MOST_ADAPTER_THREADS: Final = 4
CPUS_PER_ADAPTER_THREAD: Final = 4
"""Number of the server's CPUs for each thread that reads adapters by default: steps of the engine need the others."""
OTHER_FILES: Final = 128
"""Number of files that a process may open in addition to its connections: engines, adapters, pipes, its log."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Limits of requests, connections and work. All times are in seconds."""

    max_body_bytes: int = 32 << 20
    max_json_bytes: int = 8 << 20
    """Size of the JSON in a body. Tensors after the JSON may fill the rest of max_body_bytes."""
    max_json_items: int = 300_000
    """Number of items of all lists and objects in a body's JSON."""
    max_json_depth: int = 64
    """Nesting depth of lists and objects in a body's JSON, including the outermost."""
    max_header_bytes: int = 64 << 10
    """Size of the request line and the headers together."""
    max_prompts: int = 1024
    """Number of prompts or texts in one request."""
    max_answers: int = 1024
    """Number of answers to one request: its prompts times n."""
    max_log_probs: int = 1 << 20
    """Number of log probs that a request asks for: each token's own, and those of the most likely tokens at its
    position.
    """
    max_prompt_log_probs: int = 1 << 16
    """Number of log probs of one prompt."""
    max_tokenize_tokens: int = 1 << 18
    """Number of tokens of a text for POST /tokenize; more if the engine accepts longer prompts."""
    max_template_bytes: int = DEFAULT_LIMITS.max_work
    """Bytes that a chat template's expressions may produce for one prompt."""
    max_template_seconds: float = DEFAULT_LIMITS.max_seconds
    """Time for a chat template to write a prompt."""
    max_request_seconds: float = 600.0
    """Time after which a request ends with the tokens that it has; 0: no limit."""
    shutdown_seconds: float = 30.0
    """Time that running requests get after SIGTERM."""
    max_connections: int | None = None
    """Number of open connections. None: as many as num_connections() allows."""
    header_seconds: float = 30.0
    """Time for a request's head, from the connection's start or from the head's first byte."""
    body_seconds: float = 300.0
    """Time for a request's body, from the end of its head."""
    keep_alive_seconds: float = 75.0
    """Time that a connection may be idle between two requests."""
    write_seconds: float = 60.0
    """Time in which a client must read some of the answer that waits for it."""
    max_batch_files: int = 1000
    """Number of stored files."""
    max_batch_bytes: int = 4 << 30
    """Size of all stored files and of the results of running batches together."""
    max_batch_file_bytes: int = 256 << 20
    """Size of an uploaded file."""
    max_batch_lines: int = 50_000
    """Number of requests in a batch."""
    max_batches: int = 1000
    """Number of stored batches, with those that have ended."""
    batch_lines: int = 8
    """Number of requests of all batches that run at a time."""
    adapter_threads: int | None = None
    """Threads that read and convert adapters. None: as many as num_adapter_threads() says."""
    adapter_niceness: int = 10
    """Niceness of these threads, added to the process's: steps of the engine go first. Only Linux has one per thread.
    """
    guide_threads: int = 2
    """Threads that compile guides."""
    text_threads: int = 2
    """Threads that tokenise and detokenise long texts."""
    template_threads: int = 2
    """Threads that render chat templates."""
    image_threads: int = 2
    """Threads that decode images and run the vision tower."""
    max_images: int = ImageLimits.max_images
    """Number of images in one request."""
    max_image_bytes: int = ImageLimits.max_bytes
    """Size of an image's file."""
    max_image_pixels: int = ImageLimits.max_pixels
    """Number of an image's pixels."""
    max_all_image_pixels: int = ImageLimits.max_all_pixels
    """Number of pixels of all images of a request together."""
    image_fetch_seconds: float = 10.0
    """Time to download all images of a request."""
    download_threads: int = 4
    """Threads that download adapters and images for requests."""
    max_download_bytes: int = 2 << 30
    """Size of an adapter that a request has downloaded."""
    download_cache_bytes: int = 32 << 30
    """Size of the cache of downloads, which requests fill."""
    max_adapter_upload_bytes: int = 1 << 30
    """Size of an adapter that a client sends."""
    max_uploaded_bytes: int = 4 << 30
    """Size of all adapters that clients have sent, which are kept in memory where the system has a place for it."""
    max_old_versions: int = VersionLimits.max_versions
    """Number of replaced versions of adapters that requests can still ask for."""
    max_old_version_bytes: int = VersionLimits.max_bytes
    """Size of the files of these versions."""
    file_threads: int = 4
    """Threads that look for adapters and read tokenizers and chat templates."""
    max_stored_responses: int = 1000
    """Number of responses of POST /v1/responses in memory; 0: none is stored."""
    max_stored_response_bytes: int = 256 << 20
    """Size of these responses, with their conversations."""
    max_blob_bytes: int = 2 << 30
    """Size of an adapter's file that POST /api/blobs stores."""
    max_all_blobs_bytes: int = 32 << 30
    """Size of all these files together."""
    max_waiting_work: int = 1024
    """Number of calls that may wait for the threads of one kind; further ones are answered with 429."""

    max_named_adapters: int = 64
    """Number of adapters that metrics name: in each list of a label, and with a series of their own."""

    @property
    def versions(self) -> VersionLimits:
        """Limits of old versions of adapters."""
        return VersionLimits(self.max_old_versions, self.max_old_version_bytes)

    @property
    def images(self) -> ImageLimits:
        """Limits of a request's images."""
        return ImageLimits(
            max_bytes=self.max_image_bytes,
            max_pixels=self.max_image_pixels,
            max_images=self.max_images,
            max_all_pixels=self.max_all_image_pixels,
        )

    @property
    def template(self) -> TemplateLimits:
        """Limits of chat templates."""
        return TemplateLimits(max_work=self.max_template_bytes, max_seconds=self.max_template_seconds)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Flags of `adaptrt serve` that do not concern the engine."""

    host: str = "127.0.0.1"
    """Address to listen on; empty: another process listens."""
    port: int = DEFAULT_PORT
    """0: any free port."""
    served_model_name: tuple[str, ...] = ()
    """Names of the base model; (): the name of its directory."""
    api_keys: tuple[str, ...] = ()
    """Keys that clients must send one of; (): no key is needed."""
    admin_api_keys: tuple[str, ...] = ()
    """Keys without which no client changes adapters; (): api_keys suffice."""
    allowed_hosts: tuple[Place, ...] = ()
    """Names under which browsers may reach the server to load adapters, for example a reverse proxy's."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the server, such as "https://app.example.com"; "*": all; (): its own only."""
    disable_fastapi_docs: bool = False
    """True: there are no /docs and /openapi.json."""
    adapter_roots: tuple[Path | HubName | ObjectName, ...] = ()
    """Directories, prefixes of object stores, and repositories of the Hub, where requests find adapters by name."""
    allowed_adapter_sources: AllowedSources = field(default_factory=AllowedSources)
    """Sources that clients may load adapters from, in addition to the roots."""
    enable_lora_loading: bool = False
    enable_lora_upload: bool = False
    """True: clients may send adapters, and unload adapters."""
    allow_no_op_adapters: bool = False
    """True: accepts adapters that change nothing."""
    lora_modules: tuple[tuple[str, Path | Source], ...] = ()
    """Adapters that are added at the start: name and directory, which may lie anywhere."""
    chat_template: str | None = None
    """Text of the template that replaces the model's; None: the model's own."""
    enable_tokenizer_info_endpoint: bool = False
    """True: GET /tokenizer_info shows the tokenizer's settings and the chat template."""
    trust_request_chat_template: bool = False
    """True: requests may bring a chat template."""
    tool_call_parser: str = "auto"
    """Format of function calls; "auto": the chat template shows it."""
    reasoning_parser: str = "auto"
    """Format of reasoning; "auto": the chat template shows it; "none": it is part of the text."""
    include_eos: bool = False
    """True: answers' tokens have the token that ended them, unless a request says otherwise."""
    batch_dir: Path | None = None
    """Directory of files and batches; None: there are none."""
    ollama_models: Path | None = None
    """Directory of the models that Ollama's clients create; None: they may not."""
    log_requests: bool = False
    tenants: Path | None = None
    """File with the rules of tenants; None: there are none."""
    max_queue_size: int = DEFAULT_QUEUE
    """Number of requests that may wait."""
    generation_config: str = "auto"
    """Sampling of requests that do not set it: "auto": the model's; "vllm": none; a directory with the file."""
    pooling_type: str | None = None
    """Pooling of embeddings; None: the model's own."""
    normalize_embeddings: bool | None = None
    """True: embeddings are normalised. None: the model's own setting."""
    cut_embeddings: bool = False
    """True: clients may ask for fewer dimensions. For models that were trained so that the first dimensions are
    embeddings too.
    """
    media_hosts: MediaHosts = field(default_factory=MediaHosts)
    """Hosts from which images of requests are downloaded."""
    media_root: Path | None = None
    """Directory below which requests may name files of images; None: they may not."""
    response_home: str = ""
    """Part of the ids of responses that stands for this replica; empty: there are no other replicas."""
    limits: ServerLimits = field(default_factory=ServerLimits)


def num_adapter_threads(limits: ServerLimits) -> int:
    """Returns the number of threads that read and convert adapters."""
    if limits.adapter_threads is not None:
        return limits.adapter_threads
    return max(1, min(MOST_ADAPTER_THREADS, num_usable_cpus() // CPUS_PER_ADAPTER_THREAD))


def num_connections(limits: ServerLimits) -> int:
    """Returns the maximum number of open connections. Raises ConfigError if the process may not open so many files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MOST_CONNECTIONS if files == resource.RLIM_INFINITY else files - OTHER_FILES
    if allowed < 1:
        raise ConfigError(f"the limit of open files is {files}; expected at least {OTHER_FILES + 1} (ulimit -n)")
    if limits.max_connections is None:
        return min(allowed, MOST_CONNECTIONS)
    if files != resource.RLIM_INFINITY and limits.max_connections > allowed:
        raise ConfigError(
            f"max_connections is {limits.max_connections}; expected at most {allowed}: the limit of open files is "
            f"{files} (ulimit -n), and {OTHER_FILES} are for other files"
        )
    return limits.max_connections
