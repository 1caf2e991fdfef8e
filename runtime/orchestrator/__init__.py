"""Orchestrator mode: one Python process has the executor and starts the processes that run its engine."""
