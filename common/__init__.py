"""What every room uses and what knows nothing of models: files, JSON, locks, numbers, progress."""
