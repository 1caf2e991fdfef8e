"""The executor in Python: loads engines and adapters, and generates text."""
