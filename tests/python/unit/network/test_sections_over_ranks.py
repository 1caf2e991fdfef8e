"""Linear layers that make several values at once: ranks get a share of each."""

from __future__ import annotations

import pytest

from adaptrt.formats.network.weights import Part

# x of four heads of three outputs, one row of B for each of two groups, and dt of each head. Rank 1 of two has x from
# two ranges of the source.
PART = Part(
    source="in_proj",
    module="mamba_in_proj",
    outputs=18,
    units=1,
    rows=(range(10, 18), range(10)),
    source_outputs=18,
    sections=((12, 4), (2, 2), (4, 4)),
)


@pytest.mark.parametrize(
    ("tp_size", "tp_rank", "shares", "rows"),
    [
        (2, 0, [(0, 6), (12, 13), (14, 16)], [10, 11, 12, 13, 14, 15, 4, 6, 7]),
        (2, 1, [(6, 12), (13, 14), (16, 18)], [16, 17, 0, 1, 2, 3, 5, 8, 9]),
        # Ranks 2 and 3 share the second group.
        (4, 2, [(6, 9), (13, 14), (16, 17)], [16, 17, 0, 5, 8]),
        (4, 3, [(9, 12), (13, 14), (17, 18)], [1, 2, 3, 5, 9]),
    ],
)
def test_a_rank_has_a_share_of_each_section(
    tp_size: int, tp_rank: int, shares: list[tuple[int, int]], rows: list[int]
) -> None:
    cut = PART.cut(tp_size, tp_rank)
    assert [(share.start, share.stop) for share in cut.shares] == shares
    assert [row for part in cut.rows for row in part] == rows
    assert (cut.outputs, cut.num_remote_outputs) == (len(rows), PART.outputs - len(rows))
