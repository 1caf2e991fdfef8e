"""Code that every room uses and that knows nothing about models: files, JSON, locks, numbers, progress."""
