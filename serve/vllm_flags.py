"""Flags of vLLM's server for things that AdaptRT does in one way only. Values that ask for another way are refused."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Final

from ..common.shown_value import cut
from ..runtime.vllm_arguments import ENGINE_ARGUMENTS, Accepted, listed

_TLS: Final = "a reverse proxy serves TLS"
_EVERY: Final = "--allowed-origins allows all methods and headers"
_ANY: Final = (True, False)

SERVER_ARGUMENTS: Final[Mapping[str, Accepted]] = {
    "seed": Accepted((), "give seed in requests"),
    "tokenizer": Accepted((), "put tokenizer.json into the model's directory"),
    "speculative_config": Accepted((), "use --draft-model MODEL and --max-draft-len N"),
    "chat_template_content_format": Accepted(("auto",), "the template decides"),
    "default_chat_template_kwargs": Accepted((), "give chat_template_kwargs in requests"),
    "response_role": Accepted(("assistant",), "answers always have this role"),
    "tool_parser_plugin": Accepted((), "use --tool-call-parser"),
    "tool_server": Accepted((), "clients run the tools"),
    "return_tokens_as_token_ids": Accepted((False,), "give return_tokens_as_token_ids in requests"),
    "enable_prompt_tokens_details": Accepted(_ANY, "usage always has the number of cached tokens"),
    "enable_force_include_usage": Accepted((False,), "give stream_options.include_usage in requests"),
    "enable_server_load_tracking": Accepted(_ANY, "GET /load always has the number of requests"),
    "enable_request_id_headers": Accepted(_ANY, "answers always have the header X-Request-Id"),
    "disable_log_requests": Accepted((True,), "use --log-requests"),
    "disable_uvicorn_access_log": Accepted((True,), "use --log-requests"),
    "uvicorn_log_level": Accepted(
        ("critical", "error", "warning", "info", "debug", "trace"), "the log has the server's own lines only"
    ),
    "max_log_len": Accepted((), "prompts are not logged"),
    "ssl_keyfile": Accepted((), _TLS),
    "ssl_certfile": Accepted((), _TLS),
    "ssl_ca_certs": Accepted((), _TLS),
    "ssl_cert_reqs": Accepted((), _TLS),
    "uds": Accepted((), "use --host and --port"),
    "root_path": Accepted((), "a reverse proxy may serve the routes below a path without this flag"),
    "allowed_methods": Accepted(('["*"]', "*"), _EVERY),
    "allowed_headers": Accepted(('["*"]', "*"), _EVERY),
    "allow_credentials": Accepted((False,), "the server uses no cookies; pages send the key in Authorization"),
    "middleware": Accepted((), "use a reverse proxy"),
    "api_server_count": Accepted((1,), "use the replicas of adaptrt.serve.ray"),
    "headless": Accepted((False,), "the process that runs the engine serves HTTP"),
}
"""Arguments that only the server has."""


_OWN_FLAGS: Final = frozenset(
    {"reasoning_parser", "allowed_media_domains", "allowed_local_media_path", "limit_mm_per_prompt"}
)
"""Arguments of vLLM's engine that are flags of this server."""
_SHORT: Final = {"tensor_parallel_size": "-tp", "pipeline_parallel_size": "-pp", "data_parallel_size": "-dp"}


def add_vllm_flags(group: Any) -> None:
    """Declares the flags. Their values are not used. The help leaves refused flags out."""
    for name, accepted in {**ENGINE_ARGUMENTS, **SERVER_ARGUMENTS}.items():
        if name in _OWN_FLAGS:
            continue
        common: dict[str, Any] = {"dest": argparse.SUPPRESS, "default": argparse.SUPPRESS}
        names = [*([_SHORT[name]] if name in _SHORT else []), f"--{name}"]
        values = accepted.values
        if not values or isinstance(values[0], dict | list | set):
            group.add_argument(*names, action=_refusing(accepted), nargs="?", help=argparse.SUPPRESS, **common)
        elif isinstance(values[0], bool):
            for flag, value in ((f"--{name}", True), (f"--no_{name}", False)):
                if value not in values:
                    group.add_argument(flag, action=_refusing(accepted), nargs=0, help=argparse.SUPPRESS, **common)
                else:
                    is_shown = accepted.in_help and (value or True not in values)
                    shown = accepted.reason if is_shown else argparse.SUPPRESS
                    group.add_argument(flag, action="store_true", help=shown, **common)
        else:
            text = f"{listed(values)}: {accepted.reason}" if accepted.in_help else argparse.SUPPRESS
            group.add_argument(*names, type=_one_of(accepted), metavar="VALUE", help=text, **common)


def _refusing(accepted: Accepted) -> type[argparse.Action]:
    class Refuse(argparse.Action):
        """Exits with the reason why the flag is rejected."""

        def __call__(
            self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
        ) -> None:
            # The spelling of the help, which may have dashes where the declaration has underscores.
            shown = [name for name in self.option_strings if name.replace("_", "-") == (option or "").replace("_", "-")]
            parser.error(f"argument {shown[0] if shown else option}: not supported; {accepted.reason}")

    return Refuse


def _one_of(accepted: Accepted) -> Callable[[str], Any]:
    # float() accepts 0.0 for the integer 0. For ranges, only a lookup of an int is fast.
    is_text = isinstance(accepted.values[0], str)
    kind: Callable[[str], Any] = str if is_text else int if isinstance(accepted.values, range) else float

    def parse(text: str) -> Any:
        with contextlib.suppress(ValueError):
            value = kind(text)
            if value in accepted.values:
                return value
        raise argparse.ArgumentTypeError(f"it is {cut(text)}; expected {listed(accepted.values)}: {accepted.reason}")

    return parse
