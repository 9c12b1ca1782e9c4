"""From settings to running tiers: the only place that knows which engine and policy stand behind the names."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..embedded.pocket import pocket_small_gguf
from ..protocol.errors import MissingDependencyError, UpdraftError
from .cloud_tier import HttpCloudTier
from .config import RouterConfig
from .gates import Gates, load_gates
from .local_tier import EngineLocalTier
from .shared import Rung, Tiers

if TYPE_CHECKING:
    from ..local_engine.engine import LocalEngine


async def load_tiers(config: RouterConfig) -> Tiers:
    """Load what `config` names. A machine without the `[edge]` extra gets a cloud-only router that says so.

    Raises ModelLoadError or ConfigurationError.
    """
    cloud = None if config.cloud_url is None or config.offline else HttpCloudTier(config)
    try:
        local, gates, missing = await _load_local(config)
    except BaseException:
        if cloud is not None:
            await cloud.aclose()
        raise
    return Tiers(local, cloud, gates, missing, () if cloud is None else middle_rungs(config))


def middle_rungs(config: RouterConfig) -> tuple[Rung, ...]:
    """The clouds between the device and the best one, with the timeouts of that one."""
    return tuple(
        Rung(
            each.model,
            HttpCloudTier(replace(config, cloud_url=each.url, cloud_api_key=each.api_key, middle=())),
            each.skip_above,
        )
        for each in config.middle
    )


async def _load_local(config: RouterConfig) -> tuple[EngineLocalTier | None, Gates | None, UpdraftError | None]:
    if config.local is None:
        return None, None, None
    try:
        engine = await asyncio.to_thread(_load_engine, config.local)
    except MissingDependencyError as error:
        return None, None, error
    try:
        gates = await asyncio.to_thread(_load_gates, config, engine.model_id)
    except BaseException:
        engine.close()
        raise
    return EngineLocalTier(engine), gates, None


def _load_engine(name: str) -> LocalEngine:
    from ..local_engine.opening import open_engine

    return open_engine(_model_file(name), sound=pocket_small_gguf())


def _model_file(name: str) -> Path:
    if name == "pocket":
        return pocket_small_gguf()
    from ..local_engine.store.library import model_path

    return model_path(name)


def _load_gates(config: RouterConfig, model_id: str) -> Gates:
    packaged: Path | None = None
    if config.local == "pocket" and config.policy == "auto":
        from ..embedded.pocket import policy_folder

        packaged = policy_folder()
    gates = load_gates(
        config.policy,
        models={"local": model_id, "cloud": config.cloud_model},
        packaged=packaged,
        allow_foreign=config.allow_foreign_policy,
        confidence=config.confidence,
    )
    gates.check(config.quality)
    return gates
