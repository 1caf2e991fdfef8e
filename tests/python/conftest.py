"""Settings that every test shares, applied before any test imports torch."""

from __future__ import annotations

import gc
import os

import pytest
from hypothesis import settings

# The reference matrices are tiny, and pytest runs one process per core. Threads of OpenMP and OpenBLAS would mostly
# wait for each other, which made the tests with transformers several times slower. Child processes inherit the setting.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# An example may take any time: a busy machine must not fail a test.
settings.register_profile("untimed", settings(), deadline=None)
settings.load_profile("untimed")
# CI draws hundreds of examples per property; `--hypothesis-profile nightly` draws thousands.
settings.register_profile("nightly", max_examples=2500, deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-requests", type=int, default=2000, help="how many requests test_soak.py sends")
    parser.addoption("--soak-kills", type=int, default=2, help="how many workers test_orchestrator.py kills")


def pytest_collectstart() -> None:
    """Collects no garbage while modules are imported, which makes none: a fifth of the time of the collection."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Hides the imported modules and the collected tests from the garbage collector.

    They stay until the end. To visit them takes half a second, and many tests of servers collect garbage.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
