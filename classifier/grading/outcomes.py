"""Graded runs of both tiers, and how they are kept: collection and training are separate commands with a file between.

The file is a plain `.npz`: ragged rows are laid end to end with offsets, so loading it never runs code (no pickle).
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...protocol.errors import ConfigurationError
from ..features.gate_inputs import PromptView, RunView

FORMAT_VERSION = 1

_TEXTS: dict[str, Callable[[Outcome], str]] = {
    "prompt": lambda o: o.view.prompt.text,
    "answer": lambda o: o.view.answer,
    "finish_reason": lambda o: o.view.finish_reason,
    "kind": lambda o: o.kind,
    "family": lambda o: o.family,
    "split": lambda o: o.split,
}
_SERIES: dict[str, Callable[[Outcome], NDArray[Any]]] = {
    "logprobs": lambda o: o.view.logprobs,
    "entropies": lambda o: o.view.entropies,
    "margins": lambda o: o.view.margins,
    "prompt_logprobs": lambda o: o.view.prompt_logprobs,
    "prompt_hidden": lambda o: o.view.prompt_hidden,
    "answer_hidden": lambda o: np.empty(0, np.float32) if o.view.answer_hidden is None else o.view.answer_hidden,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One question that both tiers answered. Scores are in [0, 1]; `kind`, `family`, `split` say where it comes from.

    `kind` and `family` group the rows for leave-one-out evaluation; the classifier never sees them as features.
    """

    view: RunView
    local_score: float
    cloud_score: float
    kind: str
    family: str
    split: str

    @property
    def gain(self) -> bool:
        """Whether the cloud's answer is better than the local one: what every gate predicts."""
        return self.cloud_score > self.local_score


def save(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write `outcomes` to `path` (.npz, compressed)."""
    arrays: dict[str, NDArray[Any]] = {
        "format_version": np.array(FORMAT_VERSION),
        "local_score": np.array([o.local_score for o in outcomes], np.float64),
        "cloud_score": np.array([o.cloud_score for o in outcomes], np.float64),
    }
    for name, text_of in _TEXTS.items():
        _put_texts(arrays, name, [text_of(o) for o in outcomes])
    for name, series_of in _SERIES.items():
        _put(arrays, name, [np.asarray(series_of(o), np.float32) for o in outcomes], np.float32)
    with path.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def load(path: Path) -> list[Outcome]:
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


def _outcomes(arrays: dict[str, NDArray[Any]]) -> list[Outcome]:
    texts = {name: _read_texts(arrays, name) for name in _TEXTS}
    series = {name: _rows(arrays, name) for name in _SERIES}
    found: list[Outcome] = []
    for i in range(len(arrays["local_score"])):
        hidden = series["answer_hidden"][i]
        view = RunView(
            prompt=PromptView(texts["prompt"][i]),
            answer=texts["answer"][i],
            logprobs=series["logprobs"][i],
            entropies=series["entropies"][i],
            margins=series["margins"][i],
            prompt_logprobs=series["prompt_logprobs"][i],
            prompt_hidden=series["prompt_hidden"][i],
            answer_hidden=hidden if len(hidden) else None,
            finish_reason=texts["finish_reason"][i],
        )
        found.append(
            Outcome(
                view,
                float(arrays["local_score"][i]),
                float(arrays["cloud_score"][i]),
                texts["kind"][i],
                texts["family"][i],
                texts["split"][i],
            )
        )
    return found
