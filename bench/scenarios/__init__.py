"""AdaptRT's own scenarios: what it is measured by, beside itself and beside what the machine can do."""
