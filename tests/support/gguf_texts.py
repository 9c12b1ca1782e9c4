"""Opens model files as an app does and gives each many texts, in child processes that may crash."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from forks import in_fork, run_child, serve_forks

TIMEOUT_S = 60
UNITS = ("a", "aA", "a ", "1", ".", " ", "\t", "\r\n", "\n", "中", "é", "e\u0301", "🙂", "'", "a.1")


def converse(paths: Sequence[Path], *, examples: int, longest: int) -> list[str]:
    """Return for each file "refused: ..." if its trial load failed, "" if all texts worked, or "crash: SIGSEGV".

    A text works if the engine answers or raises a typed error. `examples`: number of random texts per file. `longest`:
    length in characters of texts that repeat a single unit.
    """
    return run_child(__file__, paths, examples=examples, longest=longest)


def _end_of(path: Path, examples: int, longest: int) -> str:
    from updraft.local_engine.trial_load import attempt

    refused = in_fork(lambda: attempt(path), TIMEOUT_S)
    if refused:
        return f"refused: {refused}"
    return in_fork(lambda: _write_texts(path, examples, longest), TIMEOUT_S)


def _write_texts(path: Path, examples: int, longest: int) -> str:
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st
    from updraft.local_engine.engine import LocalEngine, LocalOptions
    from updraft.protocol.errors import UpdraftError
    from updraft.protocol.requests import Message
    from updraft.protocol.sampling import SamplingParams

    with LocalEngine.load(path, LocalOptions(max_model_len=128, threads=1)) as engine:

        @settings(max_examples=examples, database=None, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.text(st.characters(codec="utf-8"), max_size=60) | st.text("<|>s/0xF1\u2581 \0\n", max_size=20))
        def write(content: str) -> None:
            with suppress(UpdraftError):
                for _ in engine.start([Message("user", content)], SamplingParams(max_tokens=2)):
                    pass
            for special in (False, True):
                with suppress(UpdraftError):
                    engine.encode(content, allow_special=special)

        write()
        for unit in UNITS:
            with suppress(UpdraftError):
                engine.encode((unit * longest)[:longest])
    return ""


if __name__ == "__main__":
    import hypothesis  # noqa: F401 - once, before the forks

    serve_forks(_end_of)
