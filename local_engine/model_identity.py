"""Identity of a local model: its file, and the chat template that results from the options."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Container
from dataclasses import replace
from pathlib import Path

from ..model_files.gguf_header import GgufHeader
from ..model_files.gguf_reader import read_model_header
from ..model_files.identity import ModelIdentity, digest_of, quantization_of, weights_of
from ..protocol.errors import ModelLoadError
from ..text.templates.sources import CHATML, TemplateSources
from .options import LocalOptions

__all__ = ["engine_version", "identity_of", "template_sources"]

_ENGINE = "llama-cpp-python"


def identity_of(path: Path, options: LocalOptions) -> ModelIdentity:
    """Return a model's identity from its header and samples of its weights. Raises the errors of `LocalEngine.load`."""
    header = read_model_header(path)
    if options.chat_template is None and TemplateSources.of_gguf(header.metadata) is None:
        sources = TemplateSources(CHATML)  # any constant works: the default template depends only on the model file
    else:
        sources = template_sources(header, path.stem, options, ())
    try:
        weights = weights_of(path, header)
    except OSError as error:
        raise ModelLoadError(f"Cannot read the model file {path}: {error.strerror}.") from error
    template = digest_of({"default": sources.default, "tool_use": sources.tool_use})
    return ModelIdentity(quantization_of(header), weights, template, engine=engine_version())


def engine_version() -> str:
    try:
        return f"{_ENGINE} {importlib.metadata.version(_ENGINE)}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def template_sources(
    header: GgufHeader, model_id: str, options: LocalOptions, tokens: Container[str]
) -> TemplateSources:
    """Return the template that the options name, else the file's, else a default that suits the special `tokens`."""
    sources = TemplateSources.of(model_id, TemplateSources.of_gguf(header.metadata), options.chat_template, tokens)
    return sources if options.tool_call_parser == "auto" else replace(sources, tool_style=options.tool_call_parser)
