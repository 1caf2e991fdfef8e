"""Models, adapters and engines on disk, and their meaning. Nothing here builds or runs engines."""
