"""`adaptrt bench`: throughput and latency of the executor beside the machine's own limits."""

from .command import add_arguments, run

__all__ = ["add_arguments", "run"]
