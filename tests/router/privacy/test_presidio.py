"""Presidio as a detector: off by default, named where it is missing, never asked to download anything."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from updraft.protocol.errors import ConfigurationError, MissingDependencyError
from updraft.router.privacy.rules import Privacy, PrivacyRules

PEOPLE = Privacy(presidio=("PERSON",))


class FakeEngine:
    """Knows one person. Made as Presidio's is."""

    def __init__(self, nlp_engine: Any, supported_languages: list[str]) -> None:
        self.read: list[str] = []
        assert nlp_engine["models"] == [{"lang_code": "en", "model_name": "en_core_web_sm"}]
        assert supported_languages == ["en"]

    def get_supported_entities(self, language: str) -> list[str]:
        return ["PERSON", "LOCATION"]

    def analyze(self, text: str, language: str, entities: list[str], score_threshold: float) -> list[str]:
        assert (language, entities, score_threshold) == ("en", ["PERSON"], 0.5)
        return ["found"] if "Ada Lovelace" in text else []


@pytest.fixture
def presidio(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Stands in for the packages; what is returned are the models that are installed."""
    models = {"en_core_web_sm"}
    analyzer, nlp, spacy = (
        ModuleType("presidio_analyzer"),
        ModuleType("presidio_analyzer.nlp_engine"),
        ModuleType("spacy"),
    )

    def provider(nlp_configuration: dict[str, Any]) -> Any:
        return SimpleNamespace(create_engine=lambda: nlp_configuration)

    vars(analyzer)["AnalyzerEngine"] = FakeEngine
    vars(nlp)["NlpEngineProvider"] = provider
    vars(spacy)["util"] = SimpleNamespace(is_package=models.__contains__)
    for module in (analyzer, nlp, spacy):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return models


@pytest.mark.usefixtures("presidio")
def test_presidio_matches_stay_on_the_device() -> None:
    rules = PrivacyRules(PEOPLE)
    body = {"messages": [{"role": "user", "content": "Who was Ada Lovelace?"}]}
    assert asyncio.run(rules.match(body)) == "presidio"
    assert rules.search("Who was she?") is None
    assert rules.search("Ada&#32;Lovelace") == "presidio"


def test_a_model_that_is_missing_is_named_and_not_downloaded(presidio: set[str]) -> None:
    presidio.clear()
    with pytest.raises(MissingDependencyError, match="python -m spacy download en_core_web_sm"):
        PrivacyRules(PEOPLE)


@pytest.mark.usefixtures("presidio")
def test_an_unknown_entity_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown entity CAT\. Known: LOCATION, PERSON"):
        PrivacyRules(Privacy(presidio=("CAT",)))


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "presidio_analyzer", None)
    with pytest.raises(MissingDependencyError, match="pip install presidio-analyzer"):
        PrivacyRules(PEOPLE)
    assert PrivacyRules(Privacy()).search("Ada Lovelace") is None
