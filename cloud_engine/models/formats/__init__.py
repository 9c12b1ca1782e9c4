"""Formats of quantized checkpoints: one module per value of `quant_method` in `config.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ....protocol.errors import ModelLoadError
from ..fields import Fields
from . import awq, compressed_tensors, fp8, gptq, mxfp4
from .format import Format

FORMATS: Mapping[str, Callable[[Fields], tuple[Format, ...]]] = {
    "awq": awq.read,
    "compressed-tensors": compressed_tensors.read,
    "fp8": fp8.read,
    "gptq": gptq.read,
    "mxfp4": mxfp4.read,
}


def formats_of(fields: Fields) -> tuple[Format, ...]:
    """Return the formats that a checkpoint's layers may have besides the plain one; none without quantization.

    Raises ModelLoadError for an unknown method or unsupported settings.
    """
    settings = Fields(fields.mapping("quantization_config"), f"{fields.where}: quantization_config")
    if not settings.values:
        return ()
    method = str(settings.values.get("quant_method"))
    if method not in FORMATS:
        raise ModelLoadError(f"{settings.where}: method {method!r} is not supported; supported: {', '.join(FORMATS)}.")
    return FORMATS[method](settings)
