"""Deploys, updates and removes a cloud on Ray, and sets the resources of each deployment."""

# pyright: reportMissingImports=false
from __future__ import annotations

import hashlib
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from ... import __version__
from ...protocol.errors import ConfigurationError, MissingDependencyError
from ...protocol.http.access import is_loopback
from ...protocol.http.server import bind_socket
from ...protocol.safety.system import END_SIGNALS, child_environment, python_command
from ...protocol.settings import state_folder
from . import servers
from .config import CloudConfig, ModelDeployment
from .credentials import Credentials

_log = logging.getLogger("updraft.cloud")
APP = "updraft"
_SHUTDOWN_S = 10.0
_SHUTDOWN_LOOP_S = 0.5  # wait before each check for requests in flight; Ray's default is 2 s
_CONNECT_S = 5.0
_START_S = 300.0  # maximum seconds until the proxies answer, which take over a minute to start on a busy machine
_HEALTH_S = 2.0  # seconds between health checks; Ray replaces a replica after three failed checks
_LOOK_BACK_S = 12.0
_SETTINGS, _HEADER_BYTES = b"\x04", 9  # HTTP/2: type of the first frame that a server sends, and size of a frame header
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + _SETTINGS + bytes(5)
_MAX_ONGOING = 4096  # set high, because the gateway has its own limits
_KEEP_ALIVE_S = 65
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # keep GPUs visible to replicas that reserve none
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": str(_START_S),  # Ray's 5 s end a proxy that still starts
}


def application(config: CloudConfig) -> Any:
    """Build the Ray Serve application. Raises ConfigurationError, or MissingDependencyError without Ray."""
    _require_ray()
    from ray import serve

    from .ray_deployments import DirectGateway, EngineNode, Gateway

    config.check()
    Credentials(config.keys).prepare()

    def deployment(kind: Any, **options: Any) -> Any:
        """Declare a deployment. `_internal` allows `version`; Ray's random versions would replace all replicas."""
        declared: Any = serve.deployment(kind)
        return declared.options(**options, _internal=True)

    updraft_models = [model for model in config.models if model.kind == "updraft"]
    nodes = [
        deployment(EngineNode, **node_options(model), version=node_version(config, model)).bind(config, model)
        for model in updraft_models
    ]
    kind = DirectGateway if config.gateway.direct else Gateway
    gateway = deployment(kind, **gateway_options(config), version=gateway_version(config))
    return gateway.bind(config, *nodes)


def gateway_version(config: CloudConfig) -> str:
    """Hash the gateway's options. Ray restarts the gateway if the hash changes.

    Behind proxies, Ray can change `workers` without a restart, so the hash does not cover this option.
    """
    runs, is_direct = servers.gateway_options(config), config.gateway.direct
    hashed = runs if is_direct else replace(runs, workers=1)
    return _version(config, (hashed, is_direct), runs.nodes_file, runs.accounting.limits, runs.accounting.prices)


def node_version(config: CloudConfig, model: ModelDeployment) -> str:
    runs = servers.node_options(config, model)
    return _version(config, runs, runs.chat_template)


def _version(config: CloudConfig, runs: Any, *files: str | Path | None) -> str:
    """Hash the options and the files that are read at startup. The hash reveals no keys, because keys are random."""
    digest = hashlib.sha256(msgspec.json.encode((__version__, config.revision, runs), enc_hook=str))
    for file in files:
        if file is not None and Path(file).is_file():
            digest.update(Path(file).read_bytes())
    return digest.hexdigest()[:16]


def gateway_options(config: CloudConfig) -> dict[str, Any]:
    gateway = config.gateway
    return {
        "name": "gateway",
        "num_replicas": 1 if gateway.direct else gateway.workers,
        "max_ongoing_requests": _MAX_ONGOING,
        "graceful_shutdown_wait_loop_s": _SHUTDOWN_LOOP_S,
        "graceful_shutdown_timeout_s": gateway.drain_timeout_s + _SHUTDOWN_S,
        "health_check_period_s": _HEALTH_S,
        "max_surge_percent": 0 if gateway.direct else 100,  # the old replica must free the port first
        "ray_actor_options": _actor(gateway.cpus, 0, gateway.labels),
    }


def node_options(model: ModelDeployment) -> dict[str, Any]:
    scaling, devices = model.autoscaling, model.devices // model.machines
    options: dict[str, Any] = {
        "name": model.name,
        "graceful_shutdown_wait_loop_s": _SHUTDOWN_LOOP_S,
        "graceful_shutdown_timeout_s": model.drain_timeout_s + _SHUTDOWN_S,
        "health_check_period_s": _HEALTH_S,
        "max_surge_percent": model.max_surge_percent,
        "ray_actor_options": _actor(model.cpus, devices, model.labels),
    }
    if model.machines > 1:
        options["placement_group_bundles"] = [{"CPU": model.cpus, "GPU": devices}] * model.machines
        options["placement_group_strategy"] = "SPREAD"
    elif devices > 1:  # keep all GPUs of a node on one machine
        options["placement_group_bundles"] = [{"CPU": model.cpus, "GPU": devices}]
        options["placement_group_strategy"] = "STRICT_PACK"
    if model.replicas.min == model.replicas.max:
        return {**options, "num_replicas": model.replicas.min}
    targets = {"requests": scaling.target_ongoing_requests, "kv_usage": scaling.kv_usage}
    policy = {"policy_function": "updraft.cloud_engine.deploy.autoscaling:LoadAutoscaler", "policy_kwargs": targets}
    options["autoscaling_config"] = {
        "min_replicas": model.replicas.min,
        "max_replicas": model.replicas.max,
        "upscale_delay_s": scaling.upscale_delay_s,
        "downscale_delay_s": scaling.downscale_delay_s,
        "look_back_period_s": _LOOK_BACK_S,
        "policy": policy,
    }
    return options


def _actor(cpus: float, devices: int, labels: dict[str, str]) -> dict[str, Any]:
    return {"num_cpus": cpus, "num_gpus": devices, **({"label_selector": labels} if labels else {})}


def run_on_ray(config: CloudConfig, address: str | None, on_ready: Callable[[str], None]) -> None:
    """Deploy or update a cloud, and call `on_ready` with the gateway's URL.

    With the address of a cluster, the cloud keeps running after this returns. Without one, start Ray on this machine
    and serve until KeyboardInterrupt. Raises ConfigurationError, PortInUseError, or MissingDependencyError without Ray.
    """
    _require_ray()
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray
    from ray import serve
    from ray.serve.schema import LoggingConfig

    if address is None:
        bind_socket(config.gateway.host, config.gateway.port).close()
    gateway = config.gateway
    http = {"host": gateway.host, "port": gateway.port, "keep_alive_timeout_s": _KEEP_ALIVE_S}
    handlers = {number: signal.getsignal(number) for number in END_SIGNALS}
    if address is not None:
        check_reachable(address)
    compiler = _start_compiler() if address is None else None
    own: dict[str, Any] = {} if address else {"include_dashboard": False}
    _join(address or "local", **own)
    for number, handler in handlers.items():  # restore the previous handlers: Ray's would abort the process
        signal.signal(number, handler)
    try:
        check_machines(config, ray.nodes())
        logs = LoggingConfig(log_level="WARNING", enable_access_log=False)
        proxies = "Disabled" if gateway.direct else "EveryNode"
        wait_for_proxies(lambda: serve.start(proxy_location=proxies, http_options=http, logging_config=logs))
        wait_for_proxies(lambda: serve.run(application(config), name=APP, logging_config=logs))
        on_ready(config.url)
        if address is None:
            signal.pause()
    finally:
        if address is None:
            serve.shutdown()
        ray.shutdown()
        if compiler is not None:
            compiler.kill()
            compiler.wait()


def wait_for_proxies(start: Callable[[], object], timeout_s: float = _START_S) -> None:
    """Repeat `start` while Ray's own wait for its proxies ends, whose 60 s are fixed. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            start()
            return
        except TimeoutError as error:
            if time.monotonic() >= deadline:
                raise
            _log.info("still waiting for Ray: %s", error)


def _start_compiler() -> subprocess.Popen[bytes] | None:
    """Compile the C kernels in the background while Ray starts. Return None if compiled kernels exist already."""
    if any((state_folder() / "native").glob("*.so")):
        return None
    return subprocess.Popen(python_command("-m", "updraft.kernels.runtime.native_library"), env=child_environment())


def remove_from_ray(address: str) -> None:
    """Stop the cloud on a cluster after its requests have finished. Raises ConfigurationError."""
    _require_ray()
    import ray
    from ray import serve

    check_reachable(address)
    _join(address)
    try:
        serve.delete(APP)
    finally:
        ray.shutdown()


def _join(address: str, **options: Any) -> None:
    """Connect to Ray. Raises ConfigurationError if there is no cluster at the address."""
    import ray

    try:
        ray.init(address=address, **options)
    except (ConnectionError, ValueError) as error:
        raise ConfigurationError(f"Cannot connect to Ray at {address}: {error}", param="address") from error


def check_reachable(address: str) -> None:
    """Check that an HTTP/2 server listens at `address`, as Ray would retry for minutes. Raises ConfigurationError."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return  # "auto": Ray finds a cluster, or reports the error itself
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S) as connection:
            connection.sendall(_HTTP2_HELLO)
            if connection.recv(_HEADER_BYTES)[3:4] != _SETTINGS and os.environ.get("RAY_USE_TLS", "0") == "0":
                raise OSError("another kind of server listens at this address")
    except (OSError, OverflowError) as error:
        raise ConfigurationError(f"No Ray cluster answers at {address}: {error}.", param="address") from error


def check_machines(config: CloudConfig, machines: list[dict[str, Any]]) -> None:
    if sum(bool(machine["Alive"]) for machine in machines) < 2:
        return
    if not config.insecure:
        raise ConfigurationError(
            "Between machines, Updraft sends keys over plain HTTP. Set `insecure: true` if their network is private.",
            param="insecure",
        )
    gateway = config.gateway
    if gateway.direct and (not gateway.labels or is_loopback(gateway.host) or gateway.host in ("", "0.0.0.0", "::")):
        raise ConfigurationError(
            "A direct gateway listens on one machine. Set `gateway.labels` to that machine's labels and `gateway.host` "
            "to its address.",
            param="host",
        )
    if gateway.workers > 1 and not gateway.labels:
        raise ConfigurationError(
            "Gateway workers share files. Set `gateway.labels` to the labels of one machine, or `workers: 1`.",
            param="labels",
        )


def _require_ray() -> None:
    try:
        import ray.serve  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("Ray is not installed: pip install '.[scale]' in a clone of Updraft.") from error
