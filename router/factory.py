"""Factory of tiers and gates from the settings: the only module that chooses concrete engines and policies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..classifier.policy.folders import named_folder, policy_folder_of
from ..classifier.policy.graph_files import CARD_NAME
from ..embedded.pocket import pocket_small_gguf
from ..embedded.pocket import policy_folder as pocket_policy_folder
from ..protocol.errors import ConfigurationError, ModelLoadError, UpdraftError
from ..protocol.safety.private_files import file_version, has_file
from ..protocol.settings import config_file
from .config import CloudTierConfig, RouterConfig
from .feedback.collector import ExperienceCollector, pair_name
from .gates.exploration import ExplorationGates
from .gates.gates import GateSelection, NoPolicyGates, NoSignalGates, check_policy, load_gates, uncalibrated
from .state import CloudCandidate, Tiers
from .tiers.cloud import HttpCloudTier
from .tiers.connection import CloudEndpoint
from .tiers.interfaces import LocalTier
from .tiers.local import EngineLocalTier, LoadBackoff
from .tiers.local_server.tier import (
    LocalServerModel,
    ServerAddress,
    ServerLocalTier,
    find_model,
    open_client,
    open_server,
    server_address,
)
from .tiers.providers.registry import provider_of

if TYPE_CHECKING:
    from ..classifier.online.experience import ExperienceStore
    from ..local_engine.engine import LocalEngine
    from ..local_engine.options import LocalOptions
    from ..model_files.identity import ModelIdentity
    from .tasks.book import TaskBook

log = logging.getLogger("updraft.router")

_SERVER_START_S = 5.0  # maximum seconds to wait for the local server if there is a cloud


def check_configured(config: RouterConfig) -> None:
    """Raise ConfigurationError if no tier is configured. The message lists the settings to set."""
    cloud = config.cloud_url is not None and not config.offline
    if config.local is None and not cloud:
        raise ConfigurationError(
            "No model is configured. Set local (a GGUF file, or a model fetched with `updraft pull`), or cloud_url and "
            "cloud_model (an OpenAI-compatible server), or both: as arguments, as options (--local, --cloud-url and "
            "--cloud-model), as UPDRAFT_LOCAL, UPDRAFT_CLOUD_URL and UPDRAFT_CLOUD_MODEL, or in "
            f"{config_file()}, which `updraft init` writes."
            + (" offline=true disables the cloud." if config.cloud_url is not None else ""),
            param="local",
            code="no_tier",
        )


def check_startable(config: RouterConfig) -> None:
    """Check like `check_configured`. Also raise ConfigurationError for an unusable or missing policy of a target."""
    check_configured(config)
    if config.stated_target != "confidence" and not has_policy(config) and _needs_policy(config):
        raise uncalibrated(str(config.stated_target))


def _needs_policy(config: RouterConfig) -> bool:
    """Return whether the target needs a calibrated policy. Learned tasks can keep a quality without one."""
    target = config.stated_target
    return target not in (None, "confidence") and not (target == "quality" and config.learn is not None)


def check_aliases(config: RouterConfig, tiers: Tiers) -> None:
    """Raise ConfigurationError for an alias that equals the local model's name, which is known only after loading."""
    if tiers.local is not None and (name := tiers.local.model_id) in config.aliases:
        raise ConfigurationError(f"aliases.{name} is the name of the local model. Rename the alias.", param="aliases")


def has_policy(config: RouterConfig) -> bool:
    """Return whether the configured pair has or may have a policy. Raises ConfigurationError for an unusable policy."""
    if config.local is None:
        if config.policy != "auto":
            from ..classifier.policy.policy import checked_card

            checked_card(named_folder(config.policy))
        return False
    address = local_server(config)
    if address is not None and address.model is None:
        return True  # only the server knows the model, so the policy is checked later
    name = model_file(config).stem if address is None else str(address.model)
    selection = selection_of(config, name)
    try:
        return check_policy(selection if address is None else replace(selection, local_model=None))
    except ModelLoadError:  # a missing model is reported elsewhere
        return True


async def load_tiers(config: RouterConfig) -> Tiers:
    """Load the configured tiers. Raises ConfigurationError and the errors of `with_local`."""
    check_startable(config)
    cloud = open_cloud(config)
    if cloud is not None and config.hold_tokens is not None and not cloud.continues:
        log.warning("hold_tokens has no effect without cloud_continues: streams are held until judged")
    try:
        tiers = Tiers(None, cloud, None, middle_tiers=() if cloud is None else open_middle_tiers(config))
        return await with_local(config, tiers, _SERVER_START_S)
    except BaseException:
        if cloud is not None:
            await cloud.aclose()
        raise


def open_cloud(config: RouterConfig) -> HttpCloudTier | None:
    """Return the best cloud, or None without a cloud or while offline."""
    if config.cloud_url is None or config.offline:
        return None
    return HttpCloudTier(endpoint_of(config, config.cloud_url))


def open_middle_tiers(config: RouterConfig) -> tuple[CloudCandidate, ...]:
    """Return the clouds between the device and the best cloud, with the timeouts of the best cloud."""
    return tuple(
        CloudCandidate(
            each.model,
            HttpCloudTier(tier_endpoint(config, each)),
            each.skip_above,
            shares_key=urlsplit(each.url)[:2] == urlsplit(config.cloud_url or "")[:2],
        )
        for each in config.middle_tiers
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


def tier_endpoint(config: RouterConfig, tier: CloudTierConfig) -> CloudEndpoint:
    """Return the endpoint of a cloud between the device and the best cloud."""
    return replace(
        endpoint_of(config, config.cloud_url or tier.url),
        url=tier.url,
        api_key=tier.api_key,
        continues=tier.continues,
        provider=provider_of(tier.provider, tier.url),
        headers=tier.headers,
        query=tier.query,
    )


async def with_local(config: RouterConfig, tiers: Tiers, timeout_s: float | None = None) -> Tiers:
    """Return `tiers` with the configured local model. If loading fails and there is a cloud, the cloud answers alone.
    `timeout_s`: maximum wait for a local server, which may have to load the model first. Raises the errors of
    `open_local` if there is no cloud, and ConfigurationError for an unusable policy."""
    if config.local is None:
        return tiers
    try:
        tier = await open_local_tier(config, None if tiers.cloud is None else timeout_s)
    except UpdraftError as error:
        if tiers.cloud is None:
            raise
        log.warning("the local model is unusable, so the cloud answers alone: %s", error.message)
        return replace(tiers, local_missing=error.with_traceback(None))
    try:
        gates = await asyncio.to_thread(load_gates_of, config, tier)
    except BaseException:
        await tier.aclose()
        raise
    return replace(tiers, local=tier, gates=gates, local_missing=None)


def load_backoff(config: RouterConfig) -> LoadBackoff:
    """Return the backoff after a failed load of the local model. It ends early if the model's file changes."""

    def version() -> object:
        try:
            return file_version(model_file(config))
        except UpdraftError:  # the model is on a server
            return None

    return LoadBackoff(version)


async def open_local_tier(config: RouterConfig, timeout_s: float | None = None) -> ServerLocalTier | EngineLocalTier:
    """Open the local model, on its server or in this process. Raises the errors of `open_local`."""
    address = local_server(config)
    if address is None:
        engine, load = await asyncio.to_thread(open_local, config), partial(open_local, config)
        return EngineLocalTier(engine, load, config.local_idle_s, load_backoff(config))
    try:
        async with asyncio.timeout(timeout_s):
            return await open_server(address, config.local_max_tokens)
    except TimeoutError as error:
        raise ModelLoadError(f"The local server at {address.url} did not answer in {timeout_s} s.") from error


def local_server(config: RouterConfig) -> ServerAddress | None:
    """Return the server of the local model, or None if this process runs the model."""
    return server_address(config.local, config.local_model)


def has_model_file(config: RouterConfig) -> bool:
    """Return whether the local model is a file that this process runs."""
    return config.local is not None and local_server(config) is None


def served_model(config: RouterConfig) -> LocalServerModel | None:
    """Ask the local server for its model; None for a file. Blocks, so not for event loops. Raises ModelLoadError."""
    address = local_server(config)

    async def ask(address: ServerAddress) -> LocalServerModel:
        async with open_client() as client:
            return await find_model(client, address)

    return None if address is None else asyncio.run(ask(address))


def load_gates_of(config: RouterConfig, local: LocalTier) -> ExplorationGates:
    """Load the gates of a local tier. Raises ConfigurationError for a target without the log-probabilities it needs."""
    if not isinstance(local, ServerLocalTier):
        size = local.hidden_size if isinstance(local, EngineLocalTier) else None
        return load_learning_gates(config, local.model_id, hidden_size=size)
    if local.has_signals:
        return load_learning_gates(config, local.model_id, lambda: local.identity, hidden_size=0)
    if config.stated_target or config.policy != "auto":
        raise ConfigurationError(
            f"The server {config.local} reports no log-probabilities for {local.model_id}, so its confidence is "
            f'unknown. Leave out {config.stated_target or "policy"}, and use model="local".',
            param=config.stated_target or "policy",
        )
    return ExplorationGates(NoSignalGates(), exploration=config.exploration, shadow=config.shadow)


def model_file(config: RouterConfig) -> Path:
    """Return the GGUF file of the local model. Raises ConfigurationError for a missing or invalid name."""
    if config.local is None:
        raise ConfigurationError("No local model is configured.", param="local")
    if config.local == "pocket":
        return pocket_small_gguf()
    if local_server(config) is not None:
        raise ConfigurationError(f"{config.local} is a server, but a model file is needed here.", param="local")
    from ..local_engine.store.library import model_path

    return model_path(config.local)


def open_local(config: RouterConfig) -> LocalEngine:
    """Open the engine of the local model. Raises ModelLoadError, ConfigurationError or MissingDependencyError."""
    from ..local_engine.opening import open_engine

    return open_engine(model_file(config), options_of(config), sound=pocket_small_gguf())


def local_name(config: RouterConfig) -> str:
    """Return the name of the running local model. Raises the errors of `open_local`."""
    served = served_model(config)
    return model_file(config).stem if served is None else served.name


def local_identity(config: RouterConfig) -> ModelIdentity:
    """Return the identity of the local model's weights and template. Raises the errors of `open_local`."""
    if (served := served_model(config)) is not None:
        return served.identity
    from ..local_engine.model_identity import identity_of

    return identity_of(model_file(config), options_of(config))


def hashed_identity(config: RouterConfig) -> ModelIdentity:
    """Return the local model's identity with a hash of the whole file, for policies made for this file."""
    from ..model_files.identity import file_sha256

    identity = local_identity(config)
    return identity if local_server(config) else replace(identity, sha256=file_sha256(model_file(config)))


def options_of(config: RouterConfig) -> LocalOptions:
    """Return the options of the local model in this process."""
    from ..local_engine.options import LocalOptions, adapter_of

    given: dict[str, Any] = asdict(config.local_options)
    given["adapters"] = tuple(map(adapter_of, config.local_options.adapters))
    return LocalOptions(
        **given,
        default_max_tokens=config.local_max_tokens,
        tool_call_parser=config.tool_call_parser,
        chat_template=config.chat_template,
    )


def load_learner(config: RouterConfig, tiers: Tiers) -> ExperienceCollector | None:
    """Return the collector of judged answers to learn from. If a tier or the file is missing, return None and switch
    exploration off."""
    if tiers.local is None or tiers.cloud is None:
        return None
    gates = tiers.gates if isinstance(tiers.gates, ExplorationGates) else None
    experience = _open_experience(config.experience)
    if experience is None:
        if gates is not None and gates.stop_exploring():
            log.warning("exploration is off, because no experience is stored (setting experience)")
        return None
    pair = pair_name(_pair(config, tiers.local.model_id))
    explored = 1.0 if config.shadow else config.exploration
    return ExperienceCollector(experience, pair, explored=explored, keep_text=config.experience_text)


def load_tasks(config: RouterConfig, tiers: Tiers) -> TaskBook | None:
    """Return the tasks of the running pair; None without the setting `learn`, or without both tiers. Blocks."""
    if config.learn is None or tiers.local is None or tiers.cloud is None:
        return None
    from .tasks.book import TaskBook
    from .tasks.rules import EXPLORATION, TASK_QUALITY, LearningRules
    from .tasks.store import TaskStore

    pair = pair_name(_pair(config, tiers.local.model_id))
    if config.local is not None:  # other weights or another template are another model, whatever its name
        identity = tiers.local.identity if isinstance(tiers.local, ServerLocalTier) else local_identity(config)
        pair = f"{pair} ({identity.weights[:8]}, {identity.template[:8]})"
    rules = LearningRules(
        pair,
        quality=TASK_QUALITY if config.quality is None else config.quality,
        exploration=max(EXPLORATION, config.exploration),
        has_gates=not isinstance(tiers.gates, ExplorationGates) or tiers.gates.has_policy,
        keep_text=config.experience_text,
    )
    try:
        return TaskBook(TaskStore(config.learn), rules)
    except ConfigurationError as error:
        log.warning("no tasks are learned: %s", error.message)
        return None


def _open_experience(path: Path | None) -> ExperienceStore | None:
    if path is None:
        return None
    from ..classifier.online.experience import ExperienceStore

    try:
        return ExperienceStore(path)
    except ConfigurationError as error:
        log.warning("no experience is stored: %s", error.message)
        return None


def load_learning_gates(
    config: RouterConfig,
    model_id: str,
    identity: Callable[[], ModelIdentity] | None = None,
    *,
    hidden_size: int | None = None,
) -> ExplorationGates:
    """Load gates with exploration, shadow mode and drift alarm for the local model `model_id`."""
    from ..classifier.calibration.drift import DriftMonitor

    gates = load_gates(replace(selection_of(config, model_id, identity), hidden_size=hidden_size))
    if _needs_policy(config) and isinstance(gates, NoPolicyGates):
        raise uncalibrated(str(config.stated_target))
    monitor = None if gates.typical_p_gain is None else DriftMonitor(gates.typical_p_gain)
    learning = ExplorationGates(gates, exploration=config.exploration, shadow=config.shadow, monitor=monitor)
    learning.check(None)
    return learning


def selection_of(
    config: RouterConfig, model_id: str, identity: Callable[[], ModelIdentity] | None = None
) -> GateSelection:
    """Return the policies that the settings allow for a local model of this name."""
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
    """Return the folders that may hold the pair's policy: the user's calibration, then the policy in the package."""
    calibrated = policy_folder_of(models)
    packaged = (pocket_policy_folder(),) if config.local == "pocket" else ()
    return ((calibrated,) if has_file(calibrated / CARD_NAME) else ()) + packaged
