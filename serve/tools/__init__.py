"""Formats in which models write function calls: one file per format, with its parser and its grammar."""
