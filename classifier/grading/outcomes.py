"""Graded runs of both tiers, and how they are kept: collection and training are separate commands with a file between.

The file is a plain `.npz`: ragged rows are laid end to end with offsets, so loading it never runs code (no pickle).
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...protocol.errors import ConfigurationError
from ..arrays import Array
from ..features.blocks import answer_hidden_of, view_of
from ..features.gate_inputs import PromptView, RunView
from ..graded_row import AnswerSignals, GradedRow, ModelStates

__all__ = ["graded", "load", "save"]

FORMAT_VERSION = 1

_TEXTS: dict[str, Callable[[GradedRow], str]] = {
    "prompt": lambda row: row.prompt,
    "answer": lambda row: row.answer or "",
    "finish_reason": lambda row: view_of(row).finish_reason,
    "kind": lambda row: row.domain,
    "family": lambda row: row.family,
}
_SERIES: dict[str, Callable[[GradedRow], Array]] = {
    "logprobs": lambda row: view_of(row).logprobs,
    "entropies": lambda row: view_of(row).entropies,
    "margins": lambda row: view_of(row).margins,
    "prompt_logprobs": lambda row: view_of(row).prompt_logprobs,
    "prompt_hidden": lambda row: view_of(row).prompt_hidden,
    "answer_hidden": lambda row: answer_hidden_of(view_of(row)),
}


def graded(view: RunView, weak: float, strong: float, domain: str, family: str = "") -> GradedRow:
    """A local run with both scores. What the cloud reads and writes is taken to be what the local model did."""
    told = AnswerSignals(view.logprobs, view.entropies, view.margins)
    states = ModelStates(view.prompt_logprobs, view.prompt_hidden, answer_hidden_of(view), view.finish_reason)
    tokens = float(len(view.prompt_logprobs)), float(len(view.logprobs))
    return GradedRow(view.prompt.text, weak, strong, domain, view.answer, told, *tokens, states, family)


def save(outcomes: Sequence[GradedRow], path: Path) -> None:
    """Write `outcomes` to `path` (.npz, compressed)."""
    arrays: dict[str, NDArray[Any]] = {
        "format_version": np.array(FORMAT_VERSION),
        "local_score": np.array([row.weak for row in outcomes], np.float64),
        "cloud_score": np.array([row.strong for row in outcomes], np.float64),
    }
    for name, text_of in _TEXTS.items():
        _put_texts(arrays, name, [text_of(row) for row in outcomes])
    for name, series_of in _SERIES.items():
        _put(arrays, name, [np.asarray(series_of(row), np.float32) for row in outcomes], np.float32)
    with path.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def load(path: Path) -> list[GradedRow]:
    """Read what `save` wrote. Raises ConfigurationError on a missing, damaged or foreign file."""
    try:
        # np.load leaves a file open that turns out to be no archive, so the file is ours.
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        version = int(arrays["format_version"])
        if version != FORMAT_VERSION:
            raise ConfigurationError(
                f"{path} has outcome format {version}, this version reads {FORMAT_VERSION}: collect the outcomes again."
            )
        return _outcomes(arrays)
    except FileNotFoundError as error:
        raise ConfigurationError(f"There is no outcome file at {path}: collect outcomes first.") from error
    except (OSError, EOFError, ValueError, KeyError, IndexError, zipfile.BadZipFile) as error:
        raise ConfigurationError(
            f"{path} is not an outcome file, or is damaged ({error}): collect it again."
        ) from error


def _put_texts(arrays: dict[str, NDArray[Any]], name: str, texts: Sequence[str]) -> None:
    _put(arrays, name, [np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8) for text in texts], np.uint8)


def _put(arrays: dict[str, NDArray[Any]], name: str, rows: list[NDArray[Any]], dtype: type) -> None:
    arrays[name] = np.concatenate(rows) if rows else np.empty(0, dtype)
    arrays[f"{name}_end"] = np.cumsum([len(row) for row in rows], dtype=np.int64)


def _read_texts(arrays: dict[str, NDArray[Any]], name: str) -> list[str]:
    return [row.tobytes().decode("utf-8", "surrogatepass") for row in _rows(arrays, name)]


def _rows(arrays: dict[str, NDArray[Any]], name: str) -> list[NDArray[Any]]:
    ends = arrays[f"{name}_end"]
    if len(ends) and (ends[-1] != len(arrays[name]) or np.any(np.diff(ends) < 0)):
        raise ValueError(f"the offsets of {name} do not fit")
    return np.split(arrays[name], ends[:-1]) if len(ends) else []


def _outcomes(arrays: dict[str, NDArray[Any]]) -> list[GradedRow]:
    texts = {name: _read_texts(arrays, name) for name in _TEXTS}
    series = {name: _rows(arrays, name) for name in _SERIES}
    found: list[GradedRow] = []
    for i in range(len(arrays["local_score"])):
        view = RunView(
            prompt=PromptView(texts["prompt"][i]),
            answer=texts["answer"][i],
            finish_reason=texts["finish_reason"][i],
            **{name: rows[i] for name, rows in series.items()},
        )
        weak, strong = float(arrays["local_score"][i]), float(arrays["cloud_score"][i])
        found.append(graded(view, weak, strong, texts["kind"][i], texts["family"][i]))
    return found
