"""`adaptrt bench`: throughput and latency of the executor, compared with the machine's limits."""
