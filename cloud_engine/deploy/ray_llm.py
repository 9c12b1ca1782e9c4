"""Configuration of `ray.serve.llm` for models served by vLLM or SGLang on the same Ray cluster."""

from __future__ import annotations

from typing import Any

from ...protocol.errors import ConfigurationError
from .config import CloudConfig, ModelDeployment

ROUTE = "/llm"
_SGLANG = "ray.llm._internal.serve.engines.sglang:SGLangServer"


def serve_config(config: CloudConfig) -> dict[str, Any]:
    """Return the `ray.serve.llm` application for `serve deploy`, validated by Ray's classes if they are installed.

    Raises ConfigurationError if no model uses vLLM or SGLang, or if the validation fails.
    """
    written = [llm_config(model) for model in foreign_models(config)]
    if not written:
        raise ConfigurationError("No model in the file has kind vllm or sglang.", param="models")
    try:
        from ray.serve.llm import LLMConfig  # pyright: ignore[reportMissingImports]
    except ImportError:  # vLLM or SGLang is not installed
        pass
    else:
        for model_config in written:
            try:
                LLMConfig.model_validate(model_config)
            except ValueError as error:  # pydantic's errors are ValueErrors
                raise ConfigurationError(f"ray.serve.llm rejects a model: {error}", param="models") from error
    app = {"name": "llm", "route_prefix": ROUTE, "import_path": "ray.serve.llm:build_openai_app"}
    return {"applications": [{**app, "args": {"llm_configs": written}}]}


def foreign_models(config: CloudConfig) -> list[ModelDeployment]:
    return [model for model in config.models if model.kind != "updraft"]


def llm_config(model: ModelDeployment) -> dict[str, Any]:
    """Return the fields of `ray.serve.llm.LLMConfig` for a model."""
    replicas, scaling = model.replicas, model.autoscaling
    autoscaling = {
        "min_replicas": replicas.min,
        "max_replicas": replicas.max,
        "target_ongoing_requests": scaling.target_ongoing_requests,
        "upscale_delay_s": scaling.upscale_delay_s,
        "downscale_delay_s": scaling.downscale_delay_s,
    }
    parallel = {"tensor_parallel_size": model.devices} if model.devices > 1 else {}
    return {
        "model_loading_config": {"model_id": model.name, "model_source": model.model},
        "engine_kwargs": {**parallel, **model.engine},
        "deployment_config": {"autoscaling_config": autoscaling},
        **({"server_cls": _SGLANG} if model.kind == "sglang" else {}),
    }
