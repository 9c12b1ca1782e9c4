"""Presidio as an optional detector of names, places and other entities, without network access."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...protocol.errors import ConfigurationError, MissingDependencyError

PERSONAL = "presidio"
_PIECE = 50_000  # characters per call; spaCy takes at most a million, and needs memory for each character
_MIN_SCORE = 0.5  # minimum score, from 0 to 1, of an entity that Presidio finds


def presidio_detector(entities: tuple[str, ...], language: str, model: str) -> Callable[[str], bool] | None:
    """Return a detector of `entities`, or None without entities. Raises MissingDependencyError, and ConfigurationError
    for a missing model, which Presidio would otherwise download."""
    if not entities:
        return None
    analyzer = _module("presidio_analyzer", "pip install presidio-analyzer")
    spacy = _module("spacy", "pip install spacy")
    is_folder = len(Path(model).parts) > 1 and Path(model).exists()  # a path, not a package name
    if not (spacy.util.is_package(model) or is_folder):
        raise MissingDependencyError(
            f"privacy.presidio_model: {model} is not installed: python -m spacy download {model}."
        )
    models = [{"lang_code": language, "model_name": model}]
    nlp = _module("presidio_analyzer.nlp_engine", "pip install presidio-analyzer").NlpEngineProvider(
        nlp_configuration={"nlp_engine_name": "spacy", "models": models}
    )
    engine = analyzer.AnalyzerEngine(nlp_engine=nlp.create_engine(), supported_languages=[language])
    known: list[str] = engine.get_supported_entities(language)
    if unknown := sorted(set(entities) - set(known)):
        raise ConfigurationError(
            f"privacy.presidio: unknown entity {', '.join(unknown)}. Known: {', '.join(sorted(known))}.",
            param="privacy.presidio",
        )

    def has_entity(text: str) -> bool:
        pieces = (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))
        return any(
            engine.analyze(piece, language=language, entities=list(entities), score_threshold=_MIN_SCORE)
            for piece in pieces
        )

    return has_entity


def _module(name: str, remedy: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(f"privacy.presidio needs {name}, which is not installed: {remedy}.") from error
