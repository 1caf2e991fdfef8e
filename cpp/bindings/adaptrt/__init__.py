"""AdaptRT: compile a language model once, serve any mix of LoRA and DoRA adapters over it in one in-flight batch."""
