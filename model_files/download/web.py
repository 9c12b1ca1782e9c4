"""Requests to servers that are not trusted: which addresses are taken, where a token goes, how long is waited."""

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
class RetryPolicy:
    """The limits of a download, and the number of its tries."""

    connect_s: float = 10.0
    read_s: float = 30.0
    # Failures in a row that are accepted.
    tries: int = 5
    # The first wait; each next one is twice as long.
    backoff_s: float = 1.0
    # A server fails that sends fewer than `min_bytes` in this time.
    window_s: float = 30.0
    min_bytes: int = 16 * 1024
    # A failure after so many new bytes starts a new row.
    worthwhile: int = 1024 * 1024

    def wait_s(self, failures: int, asked_s: float = 0.0) -> float:
        """The seconds to wait after so many failures in a row; `asked_s` is what the server asked for."""
        return min(_MAX_WAIT_S, max(asked_s, self.backoff_s * 2 ** (failures - 1)))


class PassingError(Exception):
    """A failure that another try may not meet; `wait_s` is what the server asked to wait."""

    def __init__(self, message: str, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.wait_s = wait_s


def new_client(retry_policy: RetryPolicy) -> httpx.Client:
    """Redirects are followed by `open_stream`. Compressed bodies would make positions in the file meaningless."""
    timeout = httpx.Timeout(retry_policy.read_s, connect=retry_policy.connect_s)
    return httpx.Client(timeout=timeout, headers={"accept-encoding": "identity", "user-agent": "updraft"})


def check_url(text: str) -> httpx.URL:
    """The address, if it may be asked: https, or http on this machine; no password in it.

    Raises InvalidRequestError.
    """
    try:
        url = httpx.URL(text)
        url.host.encode("idna")
    except (httpx.InvalidURL, UnicodeError) as error:
        raise InvalidRequestError(f"That is no usable address: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise InvalidRequestError(f"Models come from https:// addresses, not from {url.scheme}://{url.host}.")
    if url.userinfo:
        raise InvalidRequestError(f"The address at {url.host} holds a password: it would end up in lists and logs.")
    if url.scheme == "http" and not _is_this_machine(url.host):
        raise InvalidRequestError(
            f"http://{url.host} is not encrypted, so anybody on the way could exchange the model: use https://."
        )
    return url


def origin(url: httpx.URL) -> tuple[str, str, int]:
    return url.scheme, url.host, url.port or {"http": 80, "https": 443}.get(url.scheme, 0)


def open_stream(client: httpx.Client, address: str, headers: dict[str, str], token: str | None) -> httpx.Response:
    """The answer to a GET, 200 or 206, with its body unread: close it. `token` goes to the origin of `address` only.

    Raises PassingError for what may be better next time; InvalidRequestError, DownloadError or ModelNotFoundError
    for what will not.
    """
    url = check_url(address)
    home = origin(url)
    for _ in range(_MAX_REDIRECTS + 1):
        # Storage networks behind a hub have their own signed addresses: a token there is a token given away.
        secret = {"authorization": f"Bearer {token}"} if token and origin(url) == home else {}
        try:
            response = _send(client, client.build_request("GET", url, headers={**headers, **secret}))
        except httpx.TransportError as error:
            raise PassingError(f"{url.host}: {_reason(error)}") from error
        if response.status_code not in _REDIRECTS:
            return _usable(response, url)
        response.close()
        url = _redirected(url, response.headers.get("location", ""))
    raise DownloadError(f"{home[1]} redirects more than {_MAX_REDIRECTS} times.")


def body_of(response: httpx.Response) -> Iterator[bytes]:
    """The bytes as they arrive. Raises PassingError where the connection breaks."""
    try:
        yield from response.iter_raw()
    except httpx.TransportError as error:
        raise PassingError(f"{response.url.host}: {_reason(error)}") from error


def validator_of(response: httpx.Response) -> str | None:
    """The validator that tells one version of a file from another on the same server."""
    return response.headers.get("etag") or response.headers.get("last-modified")


def _send(client: httpx.Client, request: httpx.Request) -> httpx.Response:
    """The answer with its body unread. Headers that come drop by drop would never meet the limit of a single read: so
    all of them have as long as one connection and one read may take. Raises PassingError, httpx.TransportError."""
    answer: Future[httpx.Response] = Future()

    def ask() -> None:
        try:
            response = client.send(request, stream=True)
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
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
            raise PassingError(f"{request.url.host} sent no whole answer in time") from None
        return answer.result()


def _redirected(url: httpx.URL, location: str) -> httpx.URL:
    try:
        target = check_url(str(url.join(location)))
    except (InvalidRequestError, httpx.InvalidURL) as error:
        raise DownloadError(f"{url.host} redirects to an address that is refused: {error}") from error
    if url.scheme == "https" and target.scheme == "http":
        raise DownloadError(f"{url.host} redirects from https:// to http://{target.host}: refused.")
    return target


def _usable(response: httpx.Response, url: httpx.URL) -> httpx.Response:
    status = response.status_code
    if status in (200, 206) and response.headers.get("content-encoding", "identity") == "identity":
        return response
    response.close()
    if status in _PASSING:
        raise PassingError(f"{url.host} answers {status}", _retry_after(response))
    raise _refusal(status, url)


def _refusal(status: int, url: httpx.URL) -> UpdraftError:
    # The path stays out of it: in signed addresses it is a secret, too.
    if status in (200, 206):
        return DownloadError(f"{url.host} sends the file compressed, though that was not asked for.")
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
    except ValueError:  # a date: rare, and our own waits do as well
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
