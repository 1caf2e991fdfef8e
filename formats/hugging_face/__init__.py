"""Model directories as Hugging Face has them: their config.json, and how their layers are quantised."""
