"""Names of models and adapters, and the directories that they stand for; see docs/names.md."""

from .grammar import HubName, LocalName, parse_name
from .source import Source, find_adapter, find_model, find_sum

__all__ = ["HubName", "LocalName", "Source", "find_adapter", "find_model", "find_sum", "parse_name"]
