"""Engines built from a model directory on first use, and the cache of them; see docs/model-cache.md."""
