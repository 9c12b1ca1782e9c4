"""A form that gateway and node may parse differently is refused: the gateway reads the model from the form."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from updraft.protocol.dialects.multipart import read_upload

FORM = "multipart/form-data"
NAME = "content-disposition: form-data; name="
HIDDEN = f'{NAME}"model"\r\n\r\nsecret'


def body_of(*parts: str) -> str:
    return "".join(f"--x\r\n{part}\r\n" for part in (f'{NAME}"model"\r\n\r\necho', *parts)) + "--x--\r\n"


def status(gateway: Any, kind: str, body: str) -> int:
    url, headers = f"{gateway.url}/v1/audio/transcriptions", {**gateway.headers, "content-type": kind}
    answer = httpx.post(url, content=body.encode(), headers=headers, timeout=60)
    assert answer.status_code != 400 or answer.json()["error"]["type"] == "invalid_request_error"
    return answer.status_code


@pytest.mark.parametrize(
    "parameters",
    [
        "boundary=x; boundary=y",
        "boundary=x; BOUNDARY=y",
        "boundary=x; boundary*=utf-8''y",
        "boundary*=utf-8''x",
        "boundary=x; boundary*0=y",
        "boundary*0=x",
        "boundary=x, multipart/form-data; boundary=y",
        'a="; boundary=y"; boundary=x',
        'boundary="\\x"',
        "boundary=x; charset=utf-16",
    ],
)
def test_only_one_plain_boundary_is_accepted(gateway: Any, parameters: str) -> None:
    assert status(gateway, f"{FORM}; {parameters}", body_of()) == 400


@pytest.mark.parametrize(
    "body",
    [
        f"--y\r\n{HIDDEN}\r\n--y--\r\n{body_of()}",
        f"{body_of()}--y\r\n{HIDDEN}\r\n--y--\r\n",
        body_of(f'{NAME}"a"\r\n\r\n\n--x\n{HIDDEN}'),
        body_of(f'{NAME}"a"\r\n\r\n\r--x\r{HIDDEN}'),
        body_of(f'{NAME}"a"\n\nb\r\nc: d\r\n\r\ne'),
        body_of(f"{NAME}'model'\r\n\r\nsecret"),
        body_of(f"{NAME}<model>\r\n\r\nsecret"),
        body_of(f'{NAME}"mod\\el"\r\n\r\nsecret'),
        body_of(f'{NAME}"%6dodel"\r\n\r\nsecret'),
        body_of(f'{NAME}"model "\r\n\r\nsecret'),
        body_of(f'{NAME}"a"; filename="b\\"; name="model"\r\n\r\nsecret'),
        body_of('content-disposition: form-data; filename="; name=a; "\r\n\r\nsecret'),
        body_of(f'{NAME}"a"\r\n--x\r\nb: c\r\n\r\nd'),
        body_of(f'{NAME}"a"\r\ncontent-transfer-encoding: base64\r\n\r\nYQ=='),
        body_of().replace('"model"', '"model"; filename="m"'),
    ],
)
def test_only_unambiguous_parts_are_accepted(gateway: Any, body: str) -> None:
    assert status(gateway, f"{FORM}; boundary=x", body) == 400


@pytest.mark.parametrize(
    ("parameters", "forwarded"),
    [
        ("boundary=x", "boundary=x"),
        ("Boundary=x;charset=utf-8", "boundary=x"),
        ('charset=UTF-8; boundary="x"', 'boundary="x"'),
    ],
)
def test_forms_of_usual_clients_are_accepted(gateway: Any, parameters: str, forwarded: str) -> None:
    files = (
        f'{NAME}"file"; filename="a \\"b\\" 100%.wav"\r\ncontent-type: audio/wav\r\n\r\n--x',
        f"{NAME}file2; filename=a.wav; filename*=utf-8''%c3%a4.wav\r\nContent-Transfer-Encoding: binary\r\n\r\na",
        f'{NAME}"timestamp_granularities[]"\r\n\r\nword',
    )
    body = "\r\n" + body_of(*files).replace("\r\n\r\n--x\r\n", "\r\n\r\n-x\r\n")
    assert status(gateway, f"{FORM}; {parameters}", body) != 400
    assert read_upload(f"{FORM}; {parameters}", body.encode()).content_type == f"{FORM}; {forwarded}"
