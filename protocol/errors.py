"""Exceptions with their HTTP status and OpenAI error body. Messages say what is wrong and how to fix it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

#: Header and code of a 500 that a gateway must not retry on another node.
ERROR_CODE_HEADER, REQUEST_FAILED = "x-updraft-error-code", "request_failed"
_MAX_MESSAGE, _MAX_PARAM = 4000, 200  # maximum characters of `message` and of `param`


def _bounded(message: str) -> str:
    """Cut the middle out of a long message, since messages end up in responses, logs and database rows."""
    half = _MAX_MESSAGE // 2
    return message if len(message) <= _MAX_MESSAGE else f"{message[:half]} ... {message[-half:]}"


class UpdraftError(Exception):
    """Base class of Updraft's exceptions.

    `status` is the HTTP status; `retryable` tells the client whether to retry (sent as `x-should-retry`, which the
    openai client obeys), and `retry_after_s` after how many seconds. A path in a message may hold bytes that are not
    UTF-8 (PEP 383): such bytes are escaped so that every terminal, log and response can show the message.
    """

    status: int = 500
    type: str = "server_error"
    default_code: ClassVar[str | None] = None
    retryable: ClassVar[bool] = False
    retry_after_s: float | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        self.message = _bounded(message).encode("utf-8", "backslashreplace").decode()
        super().__init__(self.message)
        self.param = param if param is None else param[:_MAX_PARAM]
        self.code = code if code is not None else self.default_code

    def rename(self, names: Mapping[str, str]) -> None:
        """Replace our name of a field by the caller's in `message` and `param`. `names`: caller's name by ours."""
        head = re.split(r"\W", self.param or "", maxsplit=1)[0]
        if self.param is not None and head in names:
            self.param = names[head] + self.param[len(head) :]
            self.message = re.sub(rf"\b{head}\b", names[head], self.message)

    def to_body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        after = {} if self.retry_after_s is None else {"retry-after": str(math.ceil(self.retry_after_s))}
        return {"x-should-retry": "true" if self.retryable else "false", **after}


class InvalidRequestError(UpdraftError):
    """Malformed or invalid request; a retry will not help."""

    status = 400
    type = "invalid_request_error"


def invalid_field(param: str | None, message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=param, code="invalid_value")


def invalid_value(param: str, fault: str) -> InvalidRequestError:
    return invalid_field(param, f"{param}: {fault}.")


class UnsupportedFeatureError(InvalidRequestError):
    """Valid option that this tier does not implement. Such options are refused, never ignored."""

    default_code = "unsupported_parameter"


class UnknownFieldError(InvalidRequestError):
    """Unknown field. The name is the caller's text, so responses may repeat the name but logs must not."""

    default_code = "invalid_value"


class WrongTypeError(InvalidRequestError):
    """Field with a value of the wrong JSON type."""

    default_code = "invalid_value"


class ContextLengthError(InvalidRequestError):
    """Prompt plus requested output exceeds the context window. Nothing is truncated."""

    default_code = "context_length_exceeded"


class RequestTooLargeError(InvalidRequestError):
    """Request body above the server's size limit."""

    status = 413
    default_code = "request_too_large"


class AuthenticationError(UpdraftError):
    """Missing or wrong API key."""

    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"


class PermissionDeniedError(UpdraftError):
    """Action that is forbidden to this caller."""

    status = 403
    type = "permission_error"
    default_code = "permission_denied"


class NotFoundError(UpdraftError):
    """Unknown route or resource."""

    status = 404
    type = "invalid_request_error"
    default_code = "not_found"


class ModelNotFoundError(NotFoundError):
    """Unknown model."""

    default_code = "model_not_found"


class MethodNotAllowedError(InvalidRequestError):
    """HTTP method that the route does not support."""

    status = 405
    default_code = "method_not_allowed"

    def __init__(self, message: str, allowed: str = "", **named: str | None) -> None:
        super().__init__(message, **named)
        self.allowed = allowed  # methods of the route, for the header `allow`

    def headers(self) -> dict[str, str]:
        return super().headers() | ({"allow": self.allowed} if self.allowed else {})


class ConflictError(UpdraftError):
    """Action that the server's present state does not allow."""

    status = 409
    type = "invalid_request_error"
    default_code = "conflict"


class RateLimitError(UpdraftError):
    """Request or token rate limit exceeded."""

    status = 429
    type = "rate_limit_error"
    default_code = "rate_limit_exceeded"
    retryable = True


class BudgetExceededError(RateLimitError):
    """A cloud budget is spent."""

    default_code = "budget_exceeded"
    retryable = False

    def __init__(self, message: str, *, renews_s: float | None = None, **named: str | None) -> None:
        super().__init__(message, **named)
        self.retry_after_s = renews_s


class OverloadedError(UpdraftError):
    """Full queue, draining server, or no healthy node. The client should retry later."""

    status = 503
    type = "overloaded_error"
    default_code = "overloaded"
    retryable = True
    retry_after_s = 1


class UpstreamError(UpdraftError):
    """A node or cloud endpoint failed, died, or sent an invalid response."""

    status = 502
    type = "upstream_error"
    default_code = "upstream_failed"
    retryable = True


class QuarantinedRequestError(UpstreamError):
    """Several nodes failed while serving this request, so the gateway refuses it for some minutes."""

    default_code = "request_quarantined"
    retryable = False


class CloudUnreachableError(UpstreamError):
    """The cloud could not be reached, even after retries. The client should not retry again."""

    default_code = "cloud_unreachable"
    retryable = False


class RequestTimeoutError(UpdraftError):
    """The request exceeded its time limit."""

    status = 504
    type = "timeout_error"
    default_code = "timeout"
    retryable = True


class RequestCancelledError(UpdraftError):
    """The caller cancelled the request or half-closed its connection; no response is sent."""

    status = 499
    type = "cancelled"
    default_code = "cancelled"


class EngineError(UpdraftError):
    """The engine failed on a valid request."""

    type = "engine_error"
    default_code = "engine_failed"


class EngineDownError(EngineError):
    """The engine has died or is restarting. Retry on another node, or on this node later."""

    status = 503
    default_code = "engine_down"
    retryable = True
    retry_after_s = 1


class RequestFailedError(EngineError):
    """The engine failed on this request alone. The request may fail everywhere: change or report it."""

    default_code = REQUEST_FAILED

    def headers(self) -> dict[str, str]:
        return super().headers() | {ERROR_CODE_HEADER: REQUEST_FAILED}


class ModelLoadError(UpdraftError):
    """A model file or folder is missing, corrupt, or in an unsupported format."""

    type = "model_load_error"
    default_code = "model_load_failed"


class ModelTooLargeError(ModelLoadError):
    """The model needs more memory than is available.

    `needed` and `available` are in bytes. Loading the model anyway would make the machine swap until it hangs.
    """

    status = 507
    default_code = "model_too_large"

    def __init__(
        self, message: str, *, needed: int | None = None, available: int | None = None, **named: str | None
    ) -> None:
        super().__init__(message, **named)
        self.needed, self.available = needed, available


class DownloadError(UpdraftError):
    """A model download failed: the server is unreachable, refuses, or sends other data than it announced."""

    status = 502
    type = "download_error"
    default_code = "download_failed"
    retryable = True


class ChecksumError(DownloadError):
    """Downloaded or stored bytes do not match their checksum."""

    default_code = "checksum_mismatch"


class OfflineError(UpdraftError):
    """A download was requested, but the settings forbid network access."""

    status = 503
    type = "configuration_error"
    default_code = "offline"


class DiskSpaceError(UpdraftError):
    """The disk has too little free space for the file.

    `needed` and `free` are in bytes, or None if unknown.
    """

    status = 507
    type = "disk_space_error"
    default_code = "disk_full"

    def __init__(
        self, message: str, *, needed: int | None = None, free: int | None = None, **named: str | None
    ) -> None:
        super().__init__(message, **named)
        self.needed, self.free = needed, free


class MissingDependencyError(UpdraftError):
    """An optional extra is not installed. The message says how to install the extra."""

    type = "configuration_error"
    default_code = "missing_dependency"


class ConfigurationError(UpdraftError):
    """A setting, flag, policy or port is unusable. The message names it and says what to change."""

    type = "configuration_error"
    default_code = "invalid_configuration"


class StorageError(ConfigurationError):
    """A state file cannot be opened, read or written, because of its folder, its disk or its contents."""

    status = 503
    default_code = "storage_unusable"


class PortInUseError(ConfigurationError):
    """Another process is listening on the port."""

    default_code = "port_in_use"
