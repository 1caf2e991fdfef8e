"""What holds for all tests, before any of them imports torch."""

from __future__ import annotations

import os

# The references' matrices are tiny, and pytest runs a process a core: threads of OpenMP and OpenBLAS would mostly wait
# for one another, which made the tests with transformers several times slower. Child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
