"""Every failure Updraft reports, as one small tree that knows its own OpenAI wire shape.

An error says what is wrong and what to do about it. `to_body()` is the JSON that OpenAI clients understand:
`{"error": {"message", "type", "param", "code"}}`.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

_MAX_MESSAGE, _MAX_PARAM = 4000, 200  # characters


def _bounded(message: str) -> str:
    """Beginning and end of a message that repeats something long: it stands in answers, logs and rows."""
    half = _MAX_MESSAGE // 2
    return message if len(message) <= _MAX_MESSAGE else f"{message[:half]} ... {message[-half:]}"


class UpdraftError(Exception):
    """Base of all errors raised on purpose.

    `status` is the HTTP status on the wire; `retryable` says whether the same request may succeed later
    (`x-should-retry`, which the openai client obeys). Paths in a message may hold bytes that are no UTF-8 (PEP 383):
    they are written as escapes, so that every terminal, log and response can show it.
    """

    status: int = 500
    type: str = "server_error"
    default_code: ClassVar[str | None] = None
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        self.message = _bounded(message).encode("utf-8", "backslashreplace").decode()
        super().__init__(self.message)
        self.param = param if param is None else param[:_MAX_PARAM]
        self.code = code if code is not None else self.default_code

    def to_body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        return {"x-should-retry": "true" if self.retryable else "false"}


class InvalidRequestError(UpdraftError):
    """The request itself is wrong; sending it again will not help."""

    status = 400
    type = "invalid_request_error"


def invalid_value(param: str, fault: str) -> InvalidRequestError:
    """The error for a field with a fault."""
    return InvalidRequestError(f"{param}: {fault}.", param=param, code="invalid_value")


class UnsupportedFeatureError(InvalidRequestError):
    """A well-formed option that this tier does not implement. Refused, never ignored."""

    default_code = "unsupported_parameter"


class UnknownFieldError(InvalidRequestError):
    """A field that no reader here knows. Its name is the caller's text: fit for an answer, not for a log."""

    default_code = "invalid_value"


class WrongTypeError(InvalidRequestError):
    """A field holds another kind of JSON than it is for, whoever reads it."""

    default_code = "invalid_value"


class ContextLengthError(InvalidRequestError):
    """Prompt plus requested output does not fit the context window. Nothing is truncated."""

    default_code = "context_length_exceeded"


class RequestTooLargeError(InvalidRequestError):
    """The body is larger than this server takes."""

    status = 413
    default_code = "request_too_large"


class AuthenticationError(UpdraftError):
    """The API key is missing or wrong."""

    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"


class PermissionDeniedError(UpdraftError):
    """The caller may not do this, with whatever key."""

    status = 403
    type = "permission_error"
    default_code = "permission_denied"


class NotFoundError(UpdraftError):
    """There is no such route."""

    status = 404
    type = "invalid_request_error"
    default_code = "not_found"


class ModelNotFoundError(NotFoundError):
    """There is no such model here."""

    default_code = "model_not_found"


class MethodNotAllowedError(InvalidRequestError):
    """The route knows another method.

    `allowed`: the methods it knows, for the `Allow` header.
    """

    status = 405
    default_code = "method_not_allowed"

    def __init__(self, message: str, allowed: str = "", *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param=param, code=code)
        self.allowed = allowed

    def headers(self) -> dict[str, str]:
        return super().headers() | ({"allow": self.allowed} if self.allowed else {})


class RateLimitError(UpdraftError):
    """A limit of requests or tokens is reached."""

    status = 429
    type = "rate_limit_error"
    default_code = "rate_limit_exceeded"
    retryable = True


class BudgetExceededError(RateLimitError):
    """The day's budget for the cloud is spent.

    `renews_s`: seconds until there is a new budget.
    """

    default_code = "budget_exceeded"
    retryable = False

    def __init__(
        self, message: str, *, renews_s: float | None = None, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.renews_s = renews_s

    def headers(self) -> dict[str, str]:
        after = {} if self.renews_s is None else {"retry-after": str(math.ceil(self.renews_s))}
        return {**super().headers(), **after}


class OverloadedError(UpdraftError):
    """Queue full, draining, or no healthy node: try again later."""

    status = 503
    type = "overloaded_error"
    default_code = "overloaded"
    retryable = True

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "retry-after": "1"}


class UpstreamError(UpdraftError):
    """A node or cloud endpoint failed, died, or answered nonsense."""

    status = 502
    type = "upstream_error"
    default_code = "upstream_failed"
    retryable = True


class QuarantinedRequestError(UpstreamError):
    """Several nodes failed while they had this very request: no other gets it for some minutes."""

    default_code = "request_quarantined"
    retryable = False


class CloudUnreachableError(UpstreamError):
    """A cloud could not be reached, also not by trying again. The client is not to repeat that."""

    default_code = "cloud_unreachable"
    retryable = False


class RequestTimeoutError(UpdraftError):
    """The time for this request is up."""

    status = 504
    type = "timeout_error"
    default_code = "timeout"
    retryable = True


class RequestCancelledError(UpdraftError):
    """The caller cancelled; nobody is waiting for this answer."""

    status = 499
    type = "cancelled"
    default_code = "cancelled"


class EngineError(UpdraftError):
    """The engine failed on a request that it should have served.

    `__cause__` holds the original.
    """

    type = "engine_error"
    default_code = "engine_failed"


class EngineDownError(EngineError):
    """The engine has died, or is being restarted: another node may take the request, or this one later."""

    status = 503
    default_code = "engine_down"
    retryable = True

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "retry-after": "1"}


class EngineRestartedError(EngineError):
    """A step failed and took this request with it. The engine has begun afresh: the same request may succeed."""

    default_code = "engine_restarted"
    retryable = True


class ModelLoadError(UpdraftError):
    """A model file or folder is missing, damaged, or of an unsupported kind."""

    type = "model_load_error"
    default_code = "model_load_failed"


class ModelTooLargeError(ModelLoadError):
    """The model needs more memory than there is.

    It takes `needed` bytes of the `available` ones. Loading it would swap the machine to death.
    """

    status = 507
    default_code = "model_too_large"

    def __init__(
        self, message: str, *, needed: int | None = None, available: int | None = None, **named: str | None
    ) -> None:
        super().__init__(message, **named)
        self.needed = needed
        self.available = available


class DownloadError(UpdraftError):
    """A model could not be fetched: the server is gone, refuses, or sends something else than it announced."""

    status = 502
    type = "download_error"
    default_code = "download_failed"
    retryable = True


class ChecksumError(DownloadError):
    """The bytes that arrived, or that lie on the disk, are not the ones they should be."""

    default_code = "checksum_mismatch"


class OfflineError(UpdraftError):
    """A download was asked for where the settings forbid the network."""

    status = 503
    type = "configuration_error"
    default_code = "offline"


class DiskSpaceError(UpdraftError):
    """The disk has no room for the file.

    `needed` bytes do not fit the `free` ones. None where nobody knows them.
    """

    status = 507
    type = "disk_space_error"
    default_code = "disk_full"

    def __init__(
        self, message: str, *, needed: int | None = None, free: int | None = None, **named: str | None
    ) -> None:
        super().__init__(message, **named)
        self.needed = needed
        self.free = free


class MissingDependencyError(UpdraftError):
    """An optional extra is not installed. The message says how to install it."""

    type = "configuration_error"
    default_code = "missing_dependency"


class ConfigurationError(UpdraftError):
    """A setting, flag, policy or port is unusable. The message says which, and what to change."""

    type = "configuration_error"
    default_code = "invalid_configuration"


class StorageError(ConfigurationError):
    """A file of Updraft's own cannot be opened, read or written: its folder, its disk or its contents are at fault."""

    status = 503
    default_code = "storage_unusable"


class PortInUseError(ConfigurationError):
    """Another process listens on the port."""

    default_code = "port_in_use"
