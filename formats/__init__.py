"""Models, adapters and engines as they are on disk, and what they mean. Nothing here builds or runs."""
