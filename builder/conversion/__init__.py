"""From a Hugging Face model directory to a checkpoint, and from a checkpoint to a quantised one."""
