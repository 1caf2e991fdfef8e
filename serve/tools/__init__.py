"""Formats in which models write function calls and reasoning: one file per format, with its parser and its grammar."""
