"""Models whose layers were quantised before they were published: what their formats' tensors stand for."""
