"""The executor's face in Python: loading engines, adapters by name and from disk, and a text-level helper."""
