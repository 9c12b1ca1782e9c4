"""Launch parameters of kernels over logits: each row is split over enough programs to keep the GPU busy.

Results do not depend on the number of programs: sums are of integers or of whole tiles, and maxima are unique.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..runtime.numeric import cdiv

#: Tokens that a program processes at a time.
TILE = 1024
_PROGRAMS_PER_MULTIPROCESSOR = 8


@dataclass(frozen=True, slots=True)
class RowSplit:
    """Split of one row over programs."""

    programs: int
    # Tiles per program; the last program may have fewer.
    tiles: int
    # Tiles of the whole row.
    row_tiles: int


def split_row(rows: int, vocabulary: int, multiprocessors: int) -> RowSplit:
    row_tiles = cdiv(vocabulary, TILE)
    programs = max(1, _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // max(1, rows))
    tiles = cdiv(row_tiles, min(programs, row_tiles))
    return RowSplit(cdiv(row_tiles, tiles), tiles, row_tiles)
