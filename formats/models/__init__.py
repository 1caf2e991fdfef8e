"""The supported model families, one file each; registry.py has their table."""
