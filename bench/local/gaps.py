"""The effect of a long prompt on running streams: gaps between tokens before and during its prefill."""

from __future__ import annotations

import statistics
import threading
import time
from itertools import pairwise

from ...local_engine.engine import LocalEngine
from ...protocol.errors import EngineError
from ...protocol.sampling import SamplingParams
from ..shared.statistics import percentile

_READERS = 3
_IDLE_TOKENS = 64  # tokens of each stream before the long prompt starts


def gaps_during_prefill(engine: LocalEngine, prompt: str, seconds: float) -> dict[str, float]:
    """Return the median gap of three streams alone, the 99th percentile of their gaps during the prefill of `prompt`,
    and the ratio of the two. Streams may be as long as the prompt. The prefill is cancelled after `seconds`.

    Raises EngineError if no stream got two tokens.
    """
    readers = [_Reader(engine, str(number) * 16, len(prompt) - 16) for number in range(_READERS)]
    while any(reader.thread.is_alive() and len(reader.times) < _IDLE_TOKENS for reader in readers):
        time.sleep(0.01)
    run = engine.start_text(prompt, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    timer = threading.Timer(seconds, run.cancel)
    began = time.perf_counter()
    timer.start()
    for _ in run:
        pass
    ended = time.perf_counter()
    timer.cancel()
    for reader in readers:
        reader.finish(ended)
    idle = [gap for reader in readers for gap in reader.gaps(0, began)]
    p99 = percentile([gap for reader in readers for gap in reader.gaps(began, ended)], 99)
    if not idle or p99 is None:
        raise EngineError("All streams ended before the long prompt: there are no gaps to compare.")
    return {
        "idle_gap_s": statistics.median(idle),
        "prefill_watched_s": ended - began,
        "p99_gap_during_prefill_over_idle": p99 / statistics.median(idle),
    }


class _Reader:
    """A thread that reads one answer and records the time of each token."""

    def __init__(self, engine: LocalEngine, prompt: str, tokens: int) -> None:
        self.times: list[float] = []
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        self._run = engine.start_text(prompt, params)
        self._stop = threading.Event()
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def finish(self, moment: float) -> None:
        """Stop reading at the next token. If the answer ended before `moment`, the time until `moment` is a gap too."""
        self._stop.set()
        self.thread.join()
        if self.times and self.times[-1] < moment:
            self.times.append(moment)

    def gaps(self, since: float, until: float) -> list[float]:
        """Return the seconds between tokens, for all gaps that overlap the span."""
        return [later - earlier for earlier, later in pairwise(self.times) if later > since and earlier < until]

    def _read(self) -> None:
        for _ in self._run:
            self.times.append(time.perf_counter())
            if self._stop.is_set():
                self._run.cancel()
