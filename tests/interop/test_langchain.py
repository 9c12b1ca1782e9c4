"""LangChain's own standard suites, for chat models and embeddings, through transport, daemon and gateway."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("langchain_tests")

from conftest import Place
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests


class _Placed:
    """The place of a run: LangChain's suites ask for their parameters through properties."""

    place: Place

    @pytest.fixture(autouse=True, scope="class")
    def _at(self, request: pytest.FixtureRequest, place: Place) -> None:
        request.cls.place = place

    def params(self) -> dict[str, Any]:
        clients = self.place.clients
        given = {"http_client": clients["sync"], "http_async_client": clients["async"]} if clients else {}
        return {"model": self.place.model, "base_url": self.place.url, "api_key": self.place.key, **given}


class TestChat(_Placed, ChatModelIntegrationTests):
    supports_json_mode = True
    supports_image_inputs = False  # its image is fetched from the web

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**self.params(), "stream_usage": True, "use_responses_api": False}


class TestEmbeddings(_Placed, EmbeddingsIntegrationTests):
    @property
    def embeddings_class(self) -> type[OpenAIEmbeddings]:
        return OpenAIEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {**self.params(), "check_embedding_ctx_length": False}
