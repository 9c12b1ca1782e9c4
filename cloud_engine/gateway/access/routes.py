"""`/admin/keys` and `/admin/audit`: create, list, rotate and revoke keys at run time. Requires the scope `admin`."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....protocol.decoding import decode
from ....protocol.errors import ConfigurationError, InvalidRequestError
from ....protocol.http.app import read_body, send_json
from .database import KeyDatabase, KeyRecord, KeyRotation, NewKey
from .keys import KeyStore

_SECRET = {"cache-control": "no-store"}


class KeyRoutes:
    def __init__(self, keys: KeyStore) -> None:
        self._keys = keys

    async def list(self, request: Request) -> Response:
        database, _ = self._authenticate(request)
        return send_json({"keys": [public_fields(record) for record in await asyncio.to_thread(database.keys)]})

    async def create(self, request: Request) -> Response:
        database, actor = self._authenticate(request)
        new = decode(await read_body(request), NewKey)
        try:
            record, key = await asyncio.to_thread(database.create, new, actor)
        except ConfigurationError as error:
            if error.param != "name":
                raise
            raise InvalidRequestError(error.message, param="name", code="name_taken") from error
        return send_json({**public_fields(record), "key": key}, 201, _SECRET)

    async def rotate(self, request: Request) -> Response:
        database, actor = self._authenticate(request)
        rotation = decode(await read_body(request) or b"{}", KeyRotation)
        record, key = await asyncio.to_thread(database.rotate, request.path_params["key_id"], actor, rotation)
        return send_json({**public_fields(record), "key": key}, headers=_SECRET)

    async def revoke(self, request: Request) -> Response:
        database, actor = self._authenticate(request)
        record = await asyncio.to_thread(database.revoke, request.path_params["key_id"], actor)
        return send_json({"id": record.principal.key_id, "revoked": True})

    async def audit(self, request: Request) -> Response:
        database, _ = self._authenticate(request)
        return send_json({"audit": await asyncio.to_thread(database.audit)})

    def _authenticate(self, request: Request) -> tuple[KeyDatabase, str]:
        """Authenticate an admin; return the key database and the actor for the audit log."""
        principal = self._keys.principal(request.headers.get("authorization", ""))
        principal.require("admin")
        if self._keys.database is None:
            raise InvalidRequestError("This gateway runs with --no-auth, so it has no keys.", code="no_keys")
        return self._keys.database, f"{principal.name} ({principal.key_id})"


def public_fields(record: KeyRecord) -> dict[str, Any]:
    """Return the public fields of a key, without its secret."""
    facts = msgspec.to_builtins(record.principal)
    return {"id": facts.pop("key_id"), **facts, "created_at": record.created_at, "expires_at": record.expires_at}
