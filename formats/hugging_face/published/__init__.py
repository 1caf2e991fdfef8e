"""Formats of layers that were quantised before the model was published, one file a method."""
