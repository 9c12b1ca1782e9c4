"""HTTP requests to untrusted servers: allowed URLs, safe redirects and tokens, timeouts and retries."""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import httpx

from ...protocol.errors import DownloadError, InvalidRequestError, ModelNotFoundError, UpdraftError

_MAX_REDIRECTS = 10
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
_MAX_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """Timeouts and retries of downloads."""

    connect_s: float = 10.0
    read_s: float = 30.0
    # Number of consecutive failures after which the download is given up.
    tries: int = 5
    # Wait before the first retry, in seconds; doubles with each further retry.
    backoff_s: float = 1.0
    # Interval, in seconds, in which a server must send at least `min_bytes`.
    window_s: float = 30.0
    min_bytes: int = 16 * 1024
    # Number of new bytes that resets the count of failures.
    worthwhile: int = 1024 * 1024

    def wait_s(self, failures: int, asked_s: float = 0.0) -> float:
        """Return the seconds to wait after consecutive failures. `asked_s`: minimum, from the server's Retry-After."""
        return min(_MAX_WAIT_S, max(asked_s, self.backoff_s * 2 ** (failures - 1)))


class TemporaryError(Exception):
    """Temporary failure, worth a retry. `wait_s` is the server's Retry-After, in seconds."""

    def __init__(self, message: str, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.wait_s = wait_s


def new_client(retries: RetryLimits) -> httpx.Client:
    """Create a client without automatic redirects (see `open_stream`), and without compression, which breaks ranges."""
    timeout = httpx.Timeout(retries.read_s, connect=retries.connect_s)
    return httpx.Client(timeout=timeout, headers={"accept-encoding": "identity", "user-agent": "updraft"})


def check_url(text: str) -> httpx.URL:
    """Parse and check a URL: https, or http to this machine, and without a password. Raises InvalidRequestError."""
    try:
        url = httpx.URL(text)
        url.host.encode("idna")
    except (httpx.InvalidURL, UnicodeError) as error:
        raise InvalidRequestError(f"The URL is not valid: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise InvalidRequestError(f"Models can be downloaded from https:// only, not from {url.scheme}://{url.host}.")
    if url.userinfo:
        raise InvalidRequestError(f"The URL at {url.host} holds a password, which would appear in logs. Leave it out.")
    if url.scheme == "http" and not _is_this_machine(url.host):
        raise InvalidRequestError(
            f"http://{url.host} is not encrypted, so the model could be replaced in transit: use https://."
        )
    return url


def origin(url: httpx.URL) -> tuple[str, str, int]:
    return url.scheme, url.host, url.port or {"http": 80, "https": 443}.get(url.scheme, 0)


def open_stream(client: httpx.Client, address: str, headers: dict[str, str], token: str | None) -> httpx.Response:
    """Send a GET and return the response (200 or 206) with an unread body. `token` is sent to the first origin only.

    The caller must close the response. Raises TemporaryError for temporary failures; InvalidRequestError, DownloadError
    or ModelNotFoundError for permanent failures.
    """
    url = check_url(address)
    home = origin(url)
    for _ in range(_MAX_REDIRECTS + 1):
        # Never send the token to a redirect target: a hub's storage servers use signed URLs instead.
        secret = {"authorization": f"Bearer {token}"} if token and origin(url) == home else {}
        try:
            response = _send(client, client.build_request("GET", url, headers={**headers, **secret}))
        except httpx.TransportError as error:
            raise TemporaryError(f"{url.host}: {_reason(error)}") from error
        if response.status_code not in _REDIRECTS:
            return _usable(response, url)
        response.close()
        url = _redirected(url, response.headers.get("location", ""))
    raise DownloadError(f"{home[1]} redirects more than {_MAX_REDIRECTS} times.")


def body_of(response: httpx.Response) -> Iterator[bytes]:
    """Yield the raw bytes of the body. Raises TemporaryError if the connection breaks."""
    try:
        yield from response.iter_raw()
    except httpx.TransportError as error:
        raise TemporaryError(f"{response.url.host}: {_reason(error)}") from error


def validator_of(response: httpx.Response) -> str | None:
    """Return the ETag or modification date, which identifies a version of the file on the server."""
    return response.headers.get("etag") or response.headers.get("last-modified")


def _send(client: httpx.Client, request: httpx.Request) -> httpx.Response:
    """Send a request and wait for the response's headers. Runs in a thread with a total timeout, because a server that
    sends headers byte by byte would never exceed the read timeout. Raises TemporaryError, httpx.TransportError."""
    answer: Future[httpx.Response] = Future()

    def ask() -> None:
        try:
            response = client.send(request, stream=True)
        except Exception as error:  # noqa: BLE001 - raised again in the waiting thread
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)
            return
        if answer.set_running_or_notify_cancel():
            answer.set_result(response)
        else:
            response.close()

    threading.Thread(target=ask, name="updraft-asking", daemon=True).start()
    try:
        return answer.result((client.timeout.connect or 0) + (client.timeout.read or 0))
    except TimeoutError:
        if answer.cancel():
            raise TemporaryError(f"{request.url.host} sent no complete response in time") from None
        return answer.result()


def _redirected(url: httpx.URL, location: str) -> httpx.URL:
    try:
        target = check_url(str(url.join(location)))
    except (InvalidRequestError, httpx.InvalidURL) as error:
        raise DownloadError(f"{url.host} redirects to a URL that is refused: {error}") from error
    if url.scheme == "https" and target.scheme == "http":
        raise DownloadError(f"{url.host} redirects from https:// to http://{target.host}: refused.")
    return target


def _usable(response: httpx.Response, url: httpx.URL) -> httpx.Response:
    status = response.status_code
    if status in (200, 206) and response.headers.get("content-encoding", "identity") == "identity":
        return response
    response.close()
    if status in _PASSING:
        raise TemporaryError(f"{url.host} answers {status}", _retry_after(response))
    raise _refusal(status, url)


def _refusal(status: int, url: httpx.URL) -> UpdraftError:
    # Messages omit the path, which is secret in signed URLs.
    if status in (200, 206):
        return DownloadError(f"{url.host} sends the file compressed, although compression was not requested.")
    if status in (401, 403):
        return DownloadError(
            f"{url.host} does not allow this download ({status}). For a hub: accept the model's terms there, and set "
            "HF_TOKEN.",
            code="access_denied",
        )
    if status in (404, 410):
        return ModelNotFoundError(f"{url.host} has no such file ({status}).")
    return DownloadError(f"{url.host} answers {status}.")


def _retry_after(response: httpx.Response) -> float:
    try:
        return max(0.0, float(response.headers.get("retry-after", "0")))
    except ValueError:  # a date, which is rare: use the normal backoff
        return 0.0


def _reason(error: httpx.TransportError) -> str:
    if isinstance(error, httpx.TimeoutException):
        return "no answer in time"
    return str(error) or type(error).__name__


def _is_this_machine(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
