"""How kernels over rows of a vocabulary are launched: a row is shared by as many programs as keep the GPU busy.

Whatever the number of programs, results are the same to the last bit: what is added up across programs are integers or
the sums of whole tiles, and maxima have one winner.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Tokens that a program handles at a time.
TILE = 1024
_PROGRAMS_PER_MULTIPROCESSOR = 8


@dataclass(frozen=True, slots=True)
class Share:
    """`programs` for each row, of `tiles` tiles each, the last one maybe fewer; `row_tiles` in all."""

    programs: int
    tiles: int
    row_tiles: int


def share_row(rows: int, vocabulary: int, multiprocessors: int) -> Share:
    row_tiles = -(-vocabulary // TILE)
    wanted = max(1, _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // max(1, rows))
    tiles = -(-row_tiles // min(wanted, row_tiles))
    return Share(-(-row_tiles // tiles), tiles, row_tiles)
