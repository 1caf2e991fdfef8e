"""Implementations of the `adaptrt` commands; builder/cli.py has the table of commands."""
