"""What holds for all tests, before any of them imports torch."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# The references' matrices are tiny, and pytest runs a process a core: threads of OpenMP and OpenBLAS would mostly wait
# for one another, which made the tests with transformers several times slower. Child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Of what CI draws hundreds of: --hypothesis-profile nightly.
settings.register_profile("nightly", max_examples=2500, deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-requests", type=int, default=2000, help="how many requests test_soak.py sends")
    parser.addoption("--soak-kills", type=int, default=2, help="how many workers test_orchestrator.py kills")
