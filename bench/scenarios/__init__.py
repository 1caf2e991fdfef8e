"""AdaptRT's own scenarios, compared with each other and with the machine's limits."""
