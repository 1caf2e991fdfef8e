"""Number of Hypothesis's examples in CI and at night."""

from __future__ import annotations

from hypothesis import settings


def examples(in_ci: int, nightly: int) -> int:
    """Returns `nightly` with `--hypothesis-profile nightly`, otherwise `in_ci`."""
    return nightly if settings.default.max_examples > 100 else in_ci
