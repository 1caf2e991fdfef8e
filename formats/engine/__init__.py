"""Engine directories: their config.json, the engine file with its program, and files beside them."""
