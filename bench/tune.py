"""`updraft bench kernels --tune`: a few ways to launch each kernel on this GPU, and which of them are kept.

Only what is a matter of speed alone is varied, one thing at a time, around what the heuristic says. A launch counts if
its result is that of the heuristic's, which the tests hold against float64.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..kernels.runtime.launch import Launch, Launches, LaunchKey, Trial, read_launches, trying, write_launches
from .kernels import Case, Clock, Say

#: Tiles that may have any size; the others follow from what is computed.
_FREE_TILES: Mapping[str, Sequence[str]] = {"paged_attention": ("BLOCK_N",), "gated": ("BLOCK",)}
_FREE_OF_ROWS, _FREE_OF_PRODUCTS = ("ROWS",), ("BLOCK_FEATURES",)
_OVER_ROWS = ("gated", "rms_norm", "qk_norm")  # in one pass, of which there are no stages
_MOST_WARPS, _MOST_STAGES, _LEAST_TILE = 16, 5, 16
#: A launch has to be faster than the heuristic's by this much: less may be chance.
_LEAST_GAIN = 1.03
#: Sums are cut otherwise, in bfloat16.
_ROUNDING = 1e-2


def tune(makers: Iterable[Callable[[], Case]], clock: Clock, say: Say) -> dict[LaunchKey, Launch | None]:
    """For every place that the cases ask for a launch: the best one, None where that is the heuristic's.

    A place that several cases ask for is decided by the first of them.
    """
    tuner, decided = _Tuner(clock, say), dict[LaunchKey, Launch | None]()
    for make in makers:
        asked = Trial()
        expected, seconds = tuner.timed(make, asked)
        for place, heuristic in asked.looked_up.items():
            if place not in decided and expected is not None:
                found = tuner.best(make, place, _Heuristic(heuristic, expected, seconds))
                decided[place] = None if found == heuristic else found
    return decided


def candidates(kernel: str, heuristic: Launch) -> Iterator[Launch]:
    """Half and double the warps, a stage less and more, half and double of each tile that may have any size."""
    for warps in (heuristic.num_warps // 2, heuristic.num_warps * 2):
        if 1 <= warps <= _MOST_WARPS:
            yield replace(heuristic, num_warps=warps)
    for stages in (heuristic.num_stages - 1, heuristic.num_stages + 1):
        if 1 <= stages <= _MOST_STAGES and kernel not in _OVER_ROWS:
            yield replace(heuristic, num_stages=stages)
    for name, size in heuristic.tiles.items():
        if name in _free_tiles(kernel):
            for tile in (size // 2, size * 2):
                if tile >= (1 if name == "ROWS" else _LEAST_TILE):
                    yield replace(heuristic, tiles={**heuristic.tiles, name: tile})


def merged(known: Launches, decided: Mapping[LaunchKey, Launch | None]) -> dict[str, dict[str, Launch]]:
    """What is `known`, with what was `decided` in its place; for None the heuristic is to be asked again."""
    launches = {kernel: dict(entries) for kernel, entries in known.items()}
    for (kernel, key), launch in decided.items():
        entries = launches.setdefault(kernel, {})
        entries.pop(key, None)
        if launch is not None:
            entries[key] = launch
    return {kernel: entries for kernel, entries in launches.items() if entries}


def keep(path: Path, decided: Mapping[LaunchKey, Launch | None]) -> None:
    """In the file of a GPU, beside what is there. Raises ConfigurationError."""
    write_launches(path, merged(read_launches(path), decided))


@dataclass(frozen=True, slots=True)
class _Heuristic:
    """What it launches, what comes of it, and the seconds that takes."""

    launch: Launch
    result: Tensor
    seconds: float


@dataclass(frozen=True, slots=True)
class _Tuner:
    clock: Clock
    say: Say

    def best(self, make: Callable[[], Case], place: LaunchKey, heuristic: _Heuristic) -> Launch:
        """Of the heuristic's launch and its candidates."""
        kernel, key = place
        best, least_s = heuristic.launch, heuristic.seconds / _LEAST_GAIN
        for launch in candidates(kernel, heuristic.launch):
            name = f"{kernel}, {key}: {launch.num_warps} warps, {launch.num_stages} stages, {dict(launch.tiles)}"
            try:
                result, seconds = self.timed(make, Trial({place: launch}))
            except Exception as error:  # noqa: BLE001 - too many registers, too much memory: that is to be found out
                self.say(f"{name}: does not run: {str(error).strip().partition(chr(10))[0][:120]}")
                continue
            if result is None or not _agree(result, heuristic.result):
                self.say(f"{name}: another result")
                continue
            self.say(f"{name}: {heuristic.seconds / seconds:.2f}x")
            if seconds < least_s:
                best, least_s = launch, seconds
        return best

    @torch.inference_mode()
    def timed(self, make: Callable[[], Case], trial: Trial) -> tuple[Tensor | None, float]:
        """The result of a case on inputs that are always the same, and its median seconds; made anew, for a plan may
        depend on the launch, and a kernel may write over its inputs. No result: there is none to compare."""
        with trying(trial):
            torch.manual_seed(0)
            case = make()
            result = case.run(0)
            kept = result.clone() if isinstance(result, Tensor) else None
            return kept, statistics.median(self.clock(case.run, case.sets))


def _agree(result: Tensor, expected: Tensor) -> bool:
    """To the rounding of bfloat16, as a whole; tokens have to be the same."""
    if not expected.is_floating_point():
        return torch.equal(result, expected)
    difference = (result.double() - expected.double()).norm()
    return bool(difference <= _ROUNDING * expected.double().norm())


def _free_tiles(kernel: str) -> Sequence[str]:
    return _FREE_TILES.get(kernel, _FREE_OF_ROWS if kernel in _OVER_ROWS else _FREE_OF_PRODUCTS)
