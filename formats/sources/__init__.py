"""Names of models and adapters, and the directories that they stand for; see docs/names.md."""

from .grammar import HubName, LocalName, ObjectName, parse_name, weighted_sum_name
from .source import Source, find_adapter, find_model, find_sum, model_label

__all__ = [
    "HubName",
    "LocalName",
    "ObjectName",
    "Source",
    "find_adapter",
    "find_model",
    "find_sum",
    "model_label",
    "parse_name",
    "weighted_sum_name",
]
