"""A node's registration with a gateway: heartbeats while it serves, and a word when it leaves."""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass, field
from typing import Any

import httpx

from ...protocol.errors import ConfigurationError
from ...protocol.http.access import is_loopback, key_proof
from ...protocol.http.foreign import error_in
from ...protocol.safety.redaction import is_sendable

_HEARTBEAT_S = 3.0  # a lease is three of them
_TIMEOUT_S = 5.0
_LEAVE_S = 2.0
_log = logging.getLogger("updraft.node")


@dataclass(frozen=True, slots=True)
class RegistrationOptions:
    """The gateway, and the node's name there."""

    # The gateway's URL. Each address of its name is a gateway of its own.
    gateway: str
    # A key of the scope `node`.
    key: str = field(repr=False)
    # The URL under which the gateway reaches this node. None: the address that it listens on.
    url: str | None = None

    def check(self, host: str, *, insecure: bool) -> None:
        """Raises ConfigurationError for what cannot work with a node that listens on `host`."""
        try:
            gateway = httpx.URL(self.gateway)
            _ = gateway.host  # is decoded only now
        except (httpx.InvalidURL, ValueError):
            gateway = httpx.URL()
        if gateway.scheme not in ("http", "https") or not gateway.host:
            raise ConfigurationError("--register must be an http(s) URL, as http://10.0.0.1:8000.", param="register")
        if gateway.scheme == "http" and not is_loopback(gateway.host) and not insecure:
            raise ConfigurationError(
                "--register would send the key unencrypted: use https, or --insecure in a private network.",
                param="register",
            )
        if not is_sendable(self.key):
            raise ConfigurationError("The key of --register-key-file holds characters that no header can.")
        if self.url is None and host in ("", "0.0.0.0", "::"):
            raise ConfigurationError(
                f"--host {host} is no address for others: say with --register-as how the gateway reaches this node.",
                param="register_as",
            )


class Registration:
    """Tells a gateway of this node, for as long as `run` runs."""

    def __init__(self, options: RegistrationOptions, url: str, concurrency: int, api_key: str | None = None) -> None:
        """`api_key`: the key that requests to this node must carry."""
        self._options = options
        self._body: dict[str, Any] = {"url": options.url or url, "concurrency": concurrency}
        if api_key is not None:
            self._body["proof"] = key_proof(api_key, self._body["url"])
        self._client = httpx.AsyncClient(
            headers={"authorization": f"Bearer {options.key}"}, timeout=_TIMEOUT_S, trust_env=False
        )
        self._task: asyncio.Task[None] | None = None
        self._said: str | None = None
        self._is_lost = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def leave(self) -> None:
        """No more heartbeats; the gateway is told at once. A second time does nothing."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        failure = "time is up"
        try:
            async with asyncio.timeout(_LEAVE_S):
                failure = await self._send("DELETE")
        except TimeoutError:
            pass
        finally:
            await self._client.aclose()
        if failure:
            _log.warning("The gateway does not hear that this node leaves: %s", failure)

    async def _run(self) -> None:
        while True:
            self._say(await self._send("POST"))
            await asyncio.sleep(_HEARTBEAT_S)

    async def _send(self, method: str) -> str:
        """The gateways' objections to it; empty if there are none."""
        url = httpx.URL(f"{self._options.gateway.rstrip('/')}/admin/nodes")
        answers = [self._tell(method, url, address) for address in await _addresses(url)]
        return "; ".join(filter(None, await asyncio.gather(*answers)))

    async def _tell(self, method: str, url: httpx.URL, address: str) -> str:
        """By the name that a certificate has, whichever address is told."""
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
                return ""  # a gateway that ended: the lease does so by itself
            return f"{type(failure).__name__}: {failure}"
        if answer.status_code == 200:
            return ""
        error: dict[str, Any] = error_in(answer.content, answer.status_code, f"it answered {answer.status_code}")
        return str(error["message"])

    def _say(self, failure: str) -> None:
        """Each change once: heartbeats go on either way. A gateway that fails one of them may be starting anew."""
        was_lost, self._is_lost = self._is_lost, bool(failure)
        if failure == self._said or (self._said == "" and not was_lost):
            return
        self._said = failure
        if failure:
            _log.warning("The gateway %s does not take this node: %s", self._options.gateway, failure)
        else:
            _log.info("Registered at %s as %s", self._options.gateway, self._body["url"])


async def _addresses(url: httpx.URL) -> list[str]:
    """Of the gateways behind the URL's name; the name itself if that stands for one."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
    except OSError:
        return [url.host]
    # One gateway may have an address in each family.
    addresses = sorted({str(address[0]) for family, *_, address in found if family == found[0][0]})
    return addresses if len(addresses) > 1 else [url.host]
