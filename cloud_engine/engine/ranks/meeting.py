"""Where the ranks of one model meet: in a private folder, or at rank 0's address if they run on several machines."""

from __future__ import annotations

import hashlib
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from ....protocol.errors import ConfigurationError
from ....protocol.safety.system import interface_of, socket_address
from ..config import EngineConfig

KEY_VARIABLE = "UPDRAFT_GROUP_KEY"

_COMMANDS, _STORE = "commands", "store"
_SHORTEST_KEY = 16
_TCP = "tcp://"


@dataclass(frozen=True, slots=True)
class Meeting:
    """The addresses of rank 0's two sockets. On TCP they use consecutive ports and CURVE (RFC 26/CurveZMQ).

    All machines derive the same CURVE key pair from `key`, so a machine without the key neither joins nor listens.
    """

    # Folder, or tcp:// address of the first socket.
    place: str
    key: str | None = field(default=None, repr=False)

    @classmethod
    def of_machines(cls, config: EngineConfig) -> Meeting:
        """Return where the machines of `config` meet, with the key in UPDRAFT_GROUP_KEY. Raises ConfigurationError."""
        key = os.environ.get(KEY_VARIABLE, "")
        if len(key) < _SHORTEST_KEY:
            fault = (
                f"Set {KEY_VARIABLE} to the same random text of at least {_SHORTEST_KEY} characters on each machine."
            )
            raise ConfigurationError(fault, param=KEY_VARIABLE)
        return cls(f"{_TCP}{_resolved(config.master_addr)}:{config.master_port}", key)

    @classmethod
    def named(cls, place: str) -> Meeting:
        """Return the meeting at a place, with the key in UPDRAFT_GROUP_KEY if the place is an address."""
        return cls(place, os.environ[KEY_VARIABLE] if place.startswith(_TCP) else None)

    @property
    def commands(self) -> str:
        return self.place if self.key else socket_address(Path(self.place) / _COMMANDS)

    @property
    def store(self) -> str:
        if not self.key:
            return socket_address(Path(self.place) / _STORE)
        host, _, port = self.place.rpartition(":")
        return f"{host}:{int(port) + 1}"

    @property
    def interface(self) -> str | None:
        """The network interface for the ranks' collectives. None: unknown, so gloo and NCCL choose one."""
        if not self.key:
            return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
        return _interface_to(self.place.removeprefix(_TCP).rpartition(":")[0])

    def bind(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
        """Return rank 0's end of `address`. Raises ConfigurationError if it cannot be bound."""
        listening = self._socket(context, zmq.ROUTER, address)
        listening.router_mandatory = True
        listening.curve_server = self.key is not None
        try:
            listening.bind(address)
        except zmq.ZMQError as error:
            listening.close()
            fault = f"Rank 0 cannot listen on {address}: {error}. Set master_addr to an address of this machine."
            raise ConfigurationError(fault, param="master_addr") from error
        return listening

    def connect(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, kind: int, rank: int | None = None
    ) -> zmq.Socket[bytes]:
        """Return a rank's end of `address`, of kind DEALER or REQ. ZeroMQ waits until rank 0 listens.

        Rank 0 sends to the rank by its number.
        """
        connected = self._socket(context, kind, address)
        if rank is not None:
            connected.identity = routing_id(rank)
        if self.key is not None:
            connected.curve_serverkey = _key_pair(self.key)[0]
        connected.connect(address)
        return connected

    def authenticator(self, context: zmq.Context[zmq.Socket[bytes]]) -> ThreadAuthenticator | None:
        """Return rank 0's check of the others' keys, which runs until it is stopped. None in a private folder."""
        if self.key is None:
            return None
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback(credentials_provider=_SameKey(_key_pair(self.key)[0]))
        return authenticator

    def _socket(self, context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> zmq.Socket[bytes]:
        made = context.socket(kind)
        made.set_hwm(0)  # unlimited: rank 0 is at most two steps ahead
        made.linger = 0
        made.ipv6 = "[" in address
        if self.key is not None:
            made.curve_publickey, made.curve_secretkey = _key_pair(self.key)
        return made


@dataclass(frozen=True, slots=True)
class _SameKey:
    """A credentials provider, as `zmq.auth` has them: it accepts one public key, in Z85."""

    public: bytes

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002 - the interface of zmq.auth
        return key == self.public


def routing_id(rank: int) -> bytes:
    """Return the ZeroMQ identity of a rank's socket for messages."""
    return f"rank-{rank}".encode()


def fingerprint(model: Path) -> str:
    """Return a digest of a model's configuration, and of the names and sizes of its weight files.

    Files that are missing or damaged have one, too: loading reports them.
    """
    if model.is_file():
        return f"{model.name} {model.stat().st_size}"
    config = model / "config.json"
    digest = hashlib.blake2b(config.read_bytes() if config.is_file() else b"", digest_size=16)
    for file in sorted(model.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
    return digest.hexdigest()


def _key_pair(key: str) -> tuple[bytes, bytes]:
    """Return the public and the secret CURVE key that belong to a group's key, in Z85."""
    secret = z85.encode(hashlib.blake2b(key.encode(), digest_size=32, person=b"updraft ranks").digest())
    return zmq.curve_public(secret), secret


def _resolved(host: str) -> str:
    """Return the first IP address of a host, in brackets if it is of version 6. Raises ConfigurationError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigurationError(f"master_addr: {host!r} is unknown: {error}.", param="master_addr") from error
    return f"[{address[0]}]" if family == socket.AF_INET6 else str(address[0])


def _interface_to(host: str) -> str | None:
    """Return the interface whose address this machine uses towards an IPv4 address. None: unknown."""
    if host.startswith("["):
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing
        except OSError:
            return None
        return interface_of(probe.getsockname()[0])
