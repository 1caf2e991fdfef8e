"""The ground of every room, without knowledge of models: files, JSON, locks, numbers, progress."""
