"""The tiny model of `tiny_gguf`, written once per session."""

import pytest
from tiny_gguf import TinyModel, tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> TinyModel:
    return tiny_model(tmp_path_factory.mktemp("gguf") / "tiny.gguf")
