"""TensorRT-LLM style checkpoints: their config, their files, and how they are made from Hugging Face models."""
