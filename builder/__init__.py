"""From a Hugging Face checkpoint and PEFT adapters to an engine directory."""
