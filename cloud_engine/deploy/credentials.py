"""The two keys that a gateway and its nodes use for authentication, in private files next to the key database."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from ...protocol.errors import ConfigurationError
from ...protocol.safety.private_files import write_private
from ...protocol.unicode_forms import read_text
from ..gateway.access.database import KeyDatabase, NewKey

_NAME = "cloud-nodes"  # name of the registration key in the database
_ACTOR = "updraft cloud"


@dataclass(frozen=True, slots=True)
class Credentials:
    """Creates and reads the key files. In a cluster, the files must be at the same path on every machine."""

    database: Path

    @property
    def register_file(self) -> Path:
        """File with the key (scope `node`) that nodes use to register with the gateway."""
        return self.database.with_name(f"{self.database.name}.register")

    @property
    def node_file(self) -> Path:
        """File with the key that the gateway sends with requests to nodes."""
        return self.database.with_name(f"{self.database.name}.node")

    def prepare(self) -> None:
        """Create keys and files that do not exist yet. Raises ConfigurationError."""
        database = KeyDatabase(self.database)
        if not self.register_file.exists():
            exists = _NAME in {record.principal.name for record in database.keys()}  # noqa: SIM118 - a method
            new = NewKey(_NAME, scopes=("node",))
            _, key = database.rotate(_NAME, _ACTOR) if exists else database.create(new, _ACTOR)
            write_private(self.register_file, key)
        if not self.node_file.exists():
            write_private(self.node_file, secrets.token_urlsafe(32))

    def register_key(self) -> str:
        return _read(self.register_file)

    def node_key(self) -> str:
        return _read(self.node_file)


def _read(file: Path) -> str:
    try:
        return read_text(file, ConfigurationError).strip()
    except OSError as error:
        raise ConfigurationError(
            f"Cannot read {file}: {error.strerror}. Copy it from the machine that ran `updraft cloud up`."
        ) from error
