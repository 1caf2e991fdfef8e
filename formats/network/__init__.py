"""The vocabulary that networks are declared in, and the sites where adapters act."""
