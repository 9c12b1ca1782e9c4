"""A node's registration with a gateway: heartbeats while it serves, and a deregistration when it stops."""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass, field
from typing import Any

import httpx

from ...protocol.errors import ConfigurationError
from ...protocol.http.access import is_loopback, key_proof
from ...protocol.http.lenient_json import error_in
from ...protocol.safety.redaction import is_sendable

_HEARTBEAT_S = 3.0  # seconds; less than a third of the gateway's lease
_TIMEOUT_S = 5.0
_SHUTDOWN_S = 2.0
_log = logging.getLogger("updraft.node")


@dataclass(frozen=True, slots=True)
class RegistrationOptions:
    """Options for registering a node with a gateway."""

    # URL of the gateway. If its host name has several addresses, each address is a separate gateway.
    gateway: str
    # API key with the scope `node`.
    key: str = field(repr=False)
    # URL at which the gateway reaches this node. None: the address that the node listens on.
    url: str | None = None

    def check(self, host: str, *, insecure: bool) -> None:
        """Check the options for a node that listens on `host`. Raises ConfigurationError."""
        try:
            gateway = httpx.URL(self.gateway)
            _ = gateway.host  # httpx decodes the host here and may raise
        except (httpx.InvalidURL, ValueError):
            gateway = httpx.URL()
        if gateway.scheme not in ("http", "https") or not gateway.host:
            raise ConfigurationError("--register must be an http(s) URL, like http://10.0.0.1:8000.", param="register")
        if gateway.scheme == "http" and not is_loopback(gateway.host) and not insecure:
            raise ConfigurationError(
                "--register would send the key unencrypted. Use https, or --insecure in a private network.",
                param="register",
            )
        if not is_sendable(self.key):
            raise ConfigurationError(
                "The key in --register-api-key-file has characters that an HTTP header cannot hold."
            )
        if self.url is None and host in ("", "0.0.0.0", "::"):
            raise ConfigurationError(
                f"The gateway cannot connect to --host {host}: set --register-as to a URL that reaches this node.",
                param="register_as",
            )


class Registration:
    """Registers this node with a gateway and sends heartbeats, from `start` until `leave`."""

    def __init__(self, options: RegistrationOptions, url: str, concurrency: int, api_key: str | None = None) -> None:
        """Prepare the registration. `api_key`: the key that requests to this node must send."""
        self._options = options
        self._body: dict[str, Any] = {"url": options.url or url, "concurrency": concurrency}
        if api_key is not None:
            self._body["proof"] = key_proof(api_key, self._body["url"])
        self._client = httpx.AsyncClient(
            headers={"authorization": f"Bearer {options.key}"}, timeout=_TIMEOUT_S, trust_env=False
        )
        self._task: asyncio.Task[None] | None = None
        self._logged: str | None = None
        self._is_lost = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def leave(self) -> None:
        """Stop the heartbeats and deregister at once. Further calls do nothing."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        failure = "timed out"
        try:
            async with asyncio.timeout(_SHUTDOWN_S):
                failure = await self._send("DELETE")
        except TimeoutError:
            pass
        finally:
            await self._client.aclose()
        if failure:
            _log.warning("Could not deregister from the gateway: %s", failure)

    async def _run(self) -> None:
        while True:
            self._log_state(await self._send("POST"))
            await asyncio.sleep(_HEARTBEAT_S)

    async def _send(self, method: str) -> str:
        """Send a heartbeat (POST) or deregistration (DELETE) to all gateways. Return their errors as one string."""
        url = httpx.URL(f"{self._options.gateway.rstrip('/')}/admin/nodes")
        answers = [self._send_to(method, url, address) for address in await _addresses(url)]
        return "; ".join(filter(None, await asyncio.gather(*answers)))

    async def _send_to(self, method: str, url: httpx.URL, address: str) -> str:
        """Send to one address of the gateway. The Host header and TLS use its host name, as in the certificate."""
        request = self._client.build_request(
            method,
            url.copy_with(host=address),
            json=self._body,
            headers={"host": url.netloc.decode("ascii")},
            extensions={"sni_hostname": url.host},
        )
        try:
            answer = await self._client.send(request)
        except httpx.HTTPError as failure:
            if method == "DELETE" and isinstance(failure, (httpx.NetworkError, httpx.ProtocolError)):
                return ""  # the gateway is gone, and this node's lease with it
            return f"{type(failure).__name__}: {failure}"
        if answer.status_code == 200 or (method, answer.status_code) == ("DELETE", 404):  # the lease may have ended
            return ""
        error: dict[str, Any] = error_in(answer.content, answer.status_code, f"HTTP status {answer.status_code}")
        return str(error["message"])

    def _log_state(self, failure: str) -> None:
        """Log each change of state once. Ignore a single failure after success: the gateway may be restarting."""
        was_lost, self._is_lost = self._is_lost, bool(failure)
        if failure == self._logged or (self._logged == "" and not was_lost):
            return
        self._logged = failure
        if failure:
            _log.warning("The gateway %s does not accept this node: %s", self._options.gateway, failure)
        else:
            _log.info("Registered at %s as %s", self._options.gateway, self._body["url"])


async def _addresses(url: httpx.URL) -> list[str]:
    """Return the addresses of the URL's host name if it has several, else the host name itself."""
    try:
        resolved = await asyncio.get_running_loop().getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
    except OSError:
        return [url.host]
    # Use one address family only: the same gateway may have an address in each.
    addresses = sorted({str(address[0]) for family, *_, address in resolved if family == resolved[0][0]})
    return addresses if len(addresses) > 1 else [url.host]
