"""Engine directories: their config.json, the engine file with its program, and accompanying files."""
