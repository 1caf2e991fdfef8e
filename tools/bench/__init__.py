"""`adaptrt bench`: throughput and latency of the executor beside the machine's own limits."""
