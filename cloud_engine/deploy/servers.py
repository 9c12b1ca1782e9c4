"""Gateways and nodes as child processes, with options from the YAML file of `updraft cloud up`."""

from __future__ import annotations

import subprocess
import time
from contextlib import suppress
from typing import Any

import httpx
import msgspec

from ...protocol.errors import ConfigurationError, UpdraftError
from ...protocol.http.access import key_proof
from ...protocol.safety.system import child_environment, python_command
from ...protocol.settings import state_folder
from ..gateway.limits.accounting import AccountingOptions
from ..gateway.process import GatewayOptions
from ..node.process import NodeOptions
from ..node.registration import RegistrationOptions
from .config import CloudConfig, ModelDeployment, absolute
from .credentials import Credentials

_SHUTDOWN_S = 5.0  # seconds between the end of the drain and the process's exit
_READY = "ready "
_TIMEOUT_S = 5.0
_PAUSE_S = 0.3
_FOLLOWED_S = 1.0  # seconds until all gateway replicas know a new node


class ServerStartError(UpdraftError):
    """A gateway or node process failed to start; its log has the cause."""

    type = "process_error"
    default_code = "process_failed"


class ServerProcess:
    """A server process, started with options and stopped by `stop`.

    The options go through standard input, because they contain keys. The process inherits stderr for its log. It has
    its own process group, so that Ctrl-C reaches only the parent.
    """

    def __init__(self, options: GatewayOptions | NodeOptions, drain_s: float, **environment: str) -> None:
        self.name = "node" if isinstance(options, NodeOptions) else "gateway"
        self._drain_s = drain_s
        self._process = subprocess.Popen(
            python_command("-m", "updraft.cloud_engine.deploy.launch", self.name),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(PYTHONUNBUFFERED="1", **environment),
            process_group=0,
        )
        assert self._process.stdin is not None, "Popen creates a pipe for PIPE"
        with suppress(BrokenPipeError), self._process.stdin as pipe:  # `wait_ready` reports a dead child
            pipe.write(msgspec.json.encode(options, enc_hook=str))

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self) -> str:
        """Wait until the server is ready and return its URL. Raises ServerStartError if the process ends first."""
        assert self._process.stdout is not None, "Popen creates a pipe for PIPE"
        for line in self._process.stdout:
            if (text := line.decode(errors="replace")).startswith(_READY):
                return text.removeprefix(_READY).strip()
        code = self._process.wait()
        raise ServerStartError(f"A {self.name} exited with code {code} before it was ready. See the log above.")

    def ask_to_stop(self) -> None:
        if self.is_alive:
            self._process.terminate()

    def stop(self) -> None:
        """Stop the process after its requests in flight have finished, and wait until it is gone."""
        self.ask_to_stop()
        try:
            self._process.wait(self._drain_s + _SHUTDOWN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def gateway_options(config: CloudConfig) -> GatewayOptions:
    """Return the gateway's options. Raises ConfigurationError."""
    gateway = config.gateway
    return GatewayOptions(
        nodes=(),
        nodes_file=absolute(gateway.nodes_file),
        accounting=AccountingOptions(
            gateway.ledger or str(state_folder() / "gateway.sqlite3"),
            prices=gateway.prices,
            limits=absolute(gateway.limits),
        ),
        keys=config.keys,
        host=gateway.host,
        port=gateway.port,
        node_api_key=Credentials(config.keys).node_key(),
        max_waiting=gateway.max_waiting,
        workers=gateway.workers,
        drain_timeout_s=gateway.drain_timeout_s,
        allowed_hosts=gateway.allowed_hosts,
        insecure=config.insecure,
        exit_with_parent=True,
    )


def node_options(config: CloudConfig, model: ModelDeployment, host: str = "127.0.0.1", **more: Any) -> NodeOptions:
    """Return a node's options; `more` sets further fields. Raises ConfigurationError."""
    credentials = Credentials(config.keys)
    return NodeOptions(
        model.model,
        model.engine_config(),
        draft=model.draft,
        host=host,
        drain_timeout_s=model.drain_timeout_s,
        tool_call_parser=model.tool_call_parser,
        chat_template=model.chat_template,
        api_key=credentials.node_key(),
        insecure=config.insecure,
        exit_with_parent=True,
        registration=RegistrationOptions(config.url, credentials.register_key()),
        **more,
    )


def register_nodes(config: CloudConfig, urls: list[str], timeout_s: float = 60.0) -> None:
    """Register nodes and wait until all gateway replicas know them. Raises ConfigurationError after `timeout_s`."""
    credentials, until = Credentials(config.keys), time.monotonic() + timeout_s
    headers = {"authorization": f"Bearer {credentials.register_key()}"}
    with httpx.Client(base_url=config.url, headers=headers, timeout=_TIMEOUT_S, trust_env=False) as client:
        for url in urls:
            heartbeat = {"url": url, "proof": key_proof(credentials.node_key(), url)}
            while reason := _registration_failure(client, heartbeat):
                if time.monotonic() > until:
                    raise ConfigurationError(
                        f"The gateway {config.url} does not accept the node {url}: {reason}. "
                        "If they are on different machines, set `insecure: true`."
                    )
                time.sleep(_PAUSE_S)
    time.sleep(_FOLLOWED_S)


def _registration_failure(client: httpx.Client, heartbeat: dict[str, str]) -> str:
    try:
        answer = client.post("/admin/nodes", json=heartbeat)
        return "" if answer.is_success else f"{answer.status_code} {answer.text[:500]}"
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"
