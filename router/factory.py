"""From settings to running tiers: the only place that knows which engine and policy stand behind the names."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from ..classifier.policy.folders import named_folder, policy_folder_of
from ..classifier.policy.graph_files import CARD_NAME
from ..embedded.pocket import pocket_small_gguf
from ..embedded.pocket import policy_folder as pocket_policy_folder
from ..protocol.errors import ConfigurationError, ModelLoadError, UpdraftError
from ..protocol.safety.private_files import has_file
from ..protocol.settings import config_file
from .config import Middle, RouterConfig
from .feedback.collector import ExperienceCollector, pair_name
from .gates.exploration import ExplorationGates
from .gates.gates import NoPolicyGates, NoSignalGates, uncalibrated
from .gates.selection import GateSelection, check_policy, load_gates
from .state import CloudCandidate, Tiers
from .tiers.cloud import HttpCloudTier
from .tiers.connection import CloudEndpoint
from .tiers.idle import IdleLocalTier
from .tiers.interfaces import LocalTier
from .tiers.load_pause import LoadPause
from .tiers.local import EngineLocalTier
from .tiers.local_server.address import ServerAddress, server_address
from .tiers.local_server.tier import LocalServerModel, ServerLocalTier, find_model, open_client, open_server
from .tiers.providers.registry import provider_of

if TYPE_CHECKING:
    from ..classifier.online.experience import Experience
    from ..local_engine.engine import LocalEngine
    from ..local_engine.machine.memory_fit import KvCacheType
    from ..local_engine.options import LocalOptions
    from ..model_files.identity import ModelIdentity

log = logging.getLogger("updraft.router")

_SERVER_START_S = 5.0  # the cloud waits no longer for the local server


def check_configured(config: RouterConfig) -> None:
    """Raises ConfigurationError, which says what to set, where there is neither tier."""
    cloud = config.cloud_url is not None and not config.offline
    if config.local is None and not cloud:
        raise ConfigurationError(
            "No model is configured. Set local (a GGUF file, or a model fetched with `updraft pull`), or cloud_url and "
            "cloud_model (an OpenAI-compatible server), or both: as arguments, as UPDRAFT_LOCAL, UPDRAFT_CLOUD_URL and "
            f"UPDRAFT_CLOUD_MODEL, or in {config_file()}, which `updraft init` writes."
            + (" offline=true rules the cloud out." if config.cloud_url is not None else ""),
            param="local",
            code="no_tier",
        )


def check_startable(config: RouterConfig) -> None:
    """Also raises ConfigurationError for a target without a policy, and for a policy that cannot be used."""
    check_configured(config)
    target = config.stated_target
    if target != "confidence" and not has_policy(config) and target:
        raise uncalibrated(target)


def check_aliases(config: RouterConfig, tiers: Tiers) -> None:
    """Raises ConfigurationError for an alias that is the local model's own name, which is known once that is loaded."""
    if tiers.local is not None and (name := tiers.local.model_id) in config.aliases:
        raise ConfigurationError(f"aliases.{name} is the name of the local model: choose another.", param="aliases")


def has_policy(config: RouterConfig) -> bool:
    """Whether there is a policy for the configured pair, or may be. Raises ConfigurationError if it cannot be used."""
    if config.local is None:
        if config.policy != "auto":
            from ..classifier.policy.policy import checked_card

            checked_card(named_folder(config.policy))
        return False
    address = local_server(config)
    if address is not None and address.model is None:
        return True  # the server tells which model that is: its gates will say
    name = model_file(config).stem if address is None else str(address.model)
    selection = selection_of(config, name)
    try:
        return check_policy(selection if address is None else replace(selection, local_model=None))
    except ModelLoadError:  # whether there is a model is another question
        return True


async def load_tiers(config: RouterConfig) -> Tiers:
    """Load what `config` names. Raises ConfigurationError, and as `with_local` does."""
    check_startable(config)
    cloud = open_cloud(config)
    if cloud is not None and config.hold_tokens is not None and not cloud.continues:
        log.warning("hold_tokens waits for cloud_continues: streams are held until they are judged")
    try:
        tiers = Tiers(None, cloud, None, middle=() if cloud is None else middle_tiers(config))
        return await with_local(config, tiers, _SERVER_START_S)
    except BaseException:
        if cloud is not None:
            await cloud.aclose()
        raise


def open_cloud(config: RouterConfig) -> HttpCloudTier | None:
    """The best cloud; None where there is none, or it must not be asked."""
    if config.cloud_url is None or config.offline:
        return None
    return HttpCloudTier(endpoint_of(config, config.cloud_url))


def middle_tiers(config: RouterConfig) -> tuple[CloudCandidate, ...]:
    """The clouds between the device and the best one, with the timeouts of that one."""
    return tuple(
        CloudCandidate(
            each.model,
            HttpCloudTier(middle_endpoint(config, each)),
            each.skip_above,
            shares_key=urlsplit(each.url)[:2] == urlsplit(config.cloud_url or "")[:2],
        )
        for each in config.middle
    )


def endpoint_of(config: RouterConfig, url: str) -> CloudEndpoint:
    return CloudEndpoint(
        url,
        config.cloud_api_key,
        config.cloud_continues,
        config.cloud_timeout_s,
        config.cloud_connect_timeout_s,
        config.send_drafts,
        provider_of(config.cloud_provider, url),
        config.cloud_headers,
        config.cloud_query,
    )


def middle_endpoint(config: RouterConfig, middle: Middle) -> CloudEndpoint:
    """The endpoint of a cloud between the device and the best one."""
    return replace(
        endpoint_of(config, config.cloud_url or middle.url),
        url=middle.url,
        api_key=middle.api_key,
        continues=middle.continues,
        provider=provider_of(middle.provider, middle.url),
        headers=middle.headers,
        query=middle.query,
    )


async def with_local(config: RouterConfig, tiers: Tiers, patience_s: float | None = None) -> Tiers:
    """`tiers` with the local model, if one is configured; where it cannot be loaded, the cloud answers alone.

    `patience_s`: for a local server, which may have to load the model first.
    Raises what `open_local` raises where there is no cloud, and ConfigurationError for a policy that cannot be used.
    """
    if config.local is None:
        return tiers
    try:
        tier = await open_local_tier(config, None if tiers.cloud is None else patience_s)
    except UpdraftError as error:
        if tiers.cloud is None:
            raise
        log.warning("the local model cannot be used, so that the cloud answers alone: %s", error.message)
        return replace(tiers, local_missing=error.with_traceback(None))
    try:
        gates = await asyncio.to_thread(load_gates_of, config, tier)
    except BaseException:
        await tier.aclose()
        raise
    if isinstance(tier, EngineLocalTier):
        load = lambda: EngineLocalTier(open_local(config))  # noqa: E731
        tier = IdleLocalTier(tier, load, config.local_idle_s, load_pause(config))
    return replace(tiers, local=tier, gates=gates, local_missing=None)


def load_pause(config: RouterConfig) -> LoadPause:
    """The pause after the local model could not be loaded."""

    def version() -> object:
        try:
            found = model_file(config).stat()
        except (OSError, UpdraftError):  # no file, or a server
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns

    return LoadPause(version)


async def open_local_tier(config: RouterConfig, patience_s: float | None = None) -> ServerLocalTier | EngineLocalTier:
    """The local model, on its server or in this process. Raises as `open_local`."""
    address = local_server(config)
    if address is None:
        return EngineLocalTier(await asyncio.to_thread(open_local, config))
    try:
        async with asyncio.timeout(patience_s):
            return await open_server(address, config.local_max_tokens)
    except TimeoutError as error:
        raise ModelLoadError(f"The local server at {address.url} has not answered in {patience_s} s.") from error


def local_server(config: RouterConfig) -> ServerAddress | None:
    """The server that has the local model; None where this process runs it itself."""
    return server_address(config.local, config.local_model)


def has_model_file(config: RouterConfig) -> bool:
    """Whether the local model, if there is one, is a file that this process runs."""
    return config.local is not None and local_server(config) is None


def served_model(config: RouterConfig) -> LocalServerModel | None:
    """The model of the local server, which is asked for it; None where the local model is a file.

    Not for an event loop. Raises ModelLoadError.
    """
    address = local_server(config)

    async def ask(address: ServerAddress) -> LocalServerModel:
        async with open_client() as client:
            return await find_model(client, address)

    return None if address is None else asyncio.run(ask(address))


def load_gates_of(config: RouterConfig, local: LocalTier) -> ExplorationGates:
    """The gates around this local tier.

    Raises ConfigurationError for a target that needs log-probabilities which a server does not give.
    """
    if not isinstance(local, ServerLocalTier):
        size = local.hidden_size if isinstance(local, EngineLocalTier | IdleLocalTier) else None
        return load_learning_gates(config, local.model_id, hidden_size=size)
    if local.has_signals:
        return load_learning_gates(config, local.model_id, lambda: local.identity, hidden_size=0)
    if config.stated_target or config.policy != "auto":
        raise ConfigurationError(
            f"The server {config.local} gives no log-probabilities for {local.model_id}, so that nothing tells how "
            f'sure it is: leave out {config.stated_target or "policy"}, and ask for it with model="local".',
            param=config.stated_target or "policy",
        )
    return ExplorationGates(NoSignalGates(), exploration=config.exploration, shadow=config.shadow)


def model_file(config: RouterConfig) -> Path:
    """The GGUF file of the local model. Raises ConfigurationError if there is none, or its name has no known form."""
    if config.local is None:
        raise ConfigurationError("No local model is configured.", param="local")
    if config.local == "pocket":
        return pocket_small_gguf()
    if local_server(config) is not None:
        raise ConfigurationError(f"{config.local} is a server, and this needs a model file.", param="local")
    from ..local_engine.store.library import model_path

    return model_path(config.local)


def open_local(config: RouterConfig) -> LocalEngine:
    """The engine of the local model. Raises ModelLoadError, ConfigurationError or MissingDependencyError."""
    from ..local_engine.opening import open_engine

    return open_engine(model_file(config), options_of(config), sound=pocket_small_gguf())


def local_name(config: RouterConfig) -> str:
    """The name under which the local model runs. Raises as `open_local` does."""
    served = served_model(config)
    return model_file(config).stem if served is None else served.name


def local_identity(config: RouterConfig) -> ModelIdentity:
    """The identity of the local model's weights and template. Raises as `open_local` does."""
    if (served := served_model(config)) is not None:
        return served.identity
    from ..local_engine.model_identity import identity_of

    return identity_of(model_file(config), options_of(config))


def hashed_identity(config: RouterConfig) -> ModelIdentity:
    """The same with the hash of the whole file, for what is made for it."""
    from ..model_files.identity import file_sha256

    identity = local_identity(config)
    return identity if local_server(config) else replace(identity, sha256=file_sha256(model_file(config)))


def options_of(config: RouterConfig) -> LocalOptions:
    """The options of the local model that this process runs."""
    from ..local_engine.options import LocalOptions, adapter_of

    device = config.local_options
    return LocalOptions(
        context_length=device.context_length,
        threads=device.threads,
        gpu_layers=device.gpu_layers,
        kv_cache_type=cast("KvCacheType | None", device.kv_cache_type),
        adapters=tuple(adapter_of(each) for each in device.adapters),
        default_max_tokens=config.local_max_tokens,
        tool_parser=config.tool_parser,
        chat_template=config.chat_template,
    )


def load_learner(config: RouterConfig, tiers: Tiers) -> ExperienceCollector | None:
    """The keeper of what use teaches; None where there is nothing to compare, or no file for it: answers matter more
    than what they teach, and without a learner nothing is explored.
    """
    if tiers.local is None or tiers.cloud is None:
        return None
    gates = tiers.gates if isinstance(tiers.gates, ExplorationGates) else None
    experience = _open_experience(config.experience)
    if experience is None:
        if gates is not None and gates.stop_exploring():
            log.warning("exploration is off: what it would teach is kept nowhere (experience)")
        return None
    pair = pair_name(_pair(config, tiers.local.model_id))
    explored = 1.0 if config.shadow else config.exploration
    return ExperienceCollector(experience, pair, explored=explored, keep_text=config.experience_text)


def _open_experience(path: Path | None) -> Experience | None:
    if path is None:
        return None
    from ..classifier.online.experience import Experience

    try:
        return Experience(path)
    except ConfigurationError as error:
        log.warning("this router learns nothing from use: %s", error.message)
        return None


def load_learning_gates(
    config: RouterConfig,
    model_id: str,
    identity: Callable[[], ModelIdentity] | None = None,
    *,
    hidden_size: int | None = None,
) -> ExplorationGates:
    """The gates of the pair, with exploration, shadow and drift alarm around them. `identity`, `hidden_size`: of the
    local model.
    """
    from ..classifier.calibration.drift import DriftMonitor

    gates = load_gates(replace(selection_of(config, model_id, identity), hidden_size=hidden_size))
    target = config.stated_target
    if target and target != "confidence" and isinstance(gates, NoPolicyGates):
        raise uncalibrated(target)
    monitor = None if gates.usual is None else DriftMonitor(gates.usual)
    learning = ExplorationGates(gates, exploration=config.exploration, shadow=config.shadow, monitor=monitor)
    learning.check(None)
    return learning


def selection_of(
    config: RouterConfig, model_id: str, identity: Callable[[], ModelIdentity] | None = None
) -> GateSelection:
    """The policies that the settings allow for a local model of this name."""
    models = _pair(config, model_id)
    return GateSelection(
        config.policy,
        models,
        own=_own_policies(config, models),
        allow_foreign=config.allow_foreign_policy,
        confidence=config.confidence,
        confidence_signal=config.confidence_signal,
        target=config.target,
        local_model=identity or (lambda: local_identity(config)),
    )


def _pair(config: RouterConfig, local: str) -> dict[str, str]:
    return {"local": local, "cloud": config.cloud_model}


def _own_policies(config: RouterConfig, models: dict[str, str]) -> tuple[Path, ...]:
    """The folders in which a policy of the pair may lie: the user's calibration comes before the packaged one."""
    calibrated = policy_folder_of(models)
    packaged = (pocket_policy_folder(),) if config.local == "pocket" else ()
    return ((calibrated,) if has_file(calibrated / CARD_NAME) else ()) + packaged
