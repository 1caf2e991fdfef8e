"""The supported model families: one file each, and registry.py with the table of them."""
