"""Forms with a file, as audio comes: the fields that routing needs are read, and the bytes go on as they are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesHeaderParser

from ....protocol.errors import InvalidRequestError
from ....protocol.safety.names import MAX_NAME

_MAX_PARTS = 64
_MAX_HEAD = 4096  # bytes, of one part
_MAX_VALUE = 4 * MAX_NAME + 1  # bytes
_NAME = re.compile(rb";\s*name[*0-9]*\s*=", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Upload:
    model: str
    stream: bool


def read_upload(content_type: str, body: bytes) -> Upload:
    """Raises InvalidRequestError for what is no form, or names no model, or several.

    A node could read such a form otherwise, and serve a model that the key may not use.
    """
    fields = _fields(content_type, body)
    models = fields.get("model", [])
    if len(models) != 1 or not models[0] or len(models[0]) > MAX_NAME:
        raise InvalidRequestError("The form must have one field model, with a name.", param="model")
    return Upload(models[0], fields.get("stream", [""])[-1].lower() in ("true", "1"))


def _fields(content_type: str, body: bytes) -> dict[str, list[str]]:
    """The values of each field, cut to what a name may have."""
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_boundary("")
    parts = (b"\r\n" + body).split(b"\r\n--" + boundary.encode("latin-1", "replace"), _MAX_PARTS)
    if len(parts) > _MAX_PARTS:
        raise InvalidRequestError(f"The form has more than {_MAX_PARTS - 2} fields.", code="invalid_value")
    if header.get_content_type() != "multipart/form-data" or not boundary or not parts[-1].startswith(b"--"):
        raise InvalidRequestError("The body must be a form of the type multipart/form-data.", code="invalid_value")
    found: dict[str, list[str]] = {}
    for part in parts[1:-1]:
        head, _, value = part.removeprefix(b"\r\n").partition(b"\r\n\r\n")
        if len(head) > _MAX_HEAD:
            raise InvalidRequestError(f"The head of a field has more than {_MAX_HEAD} bytes.", code="invalid_value")
        name = BytesHeaderParser().parsebytes(head).get_param("name", None, "content-disposition")
        if not isinstance(name, str) or len(_NAME.findall(head)) != 1:
            raise InvalidRequestError("Each field of the form must have one name.", code="invalid_value")
        found.setdefault(name, []).append(value[:_MAX_VALUE].decode("utf-8", "replace"))
    return found
