"""What the detectors see through: escapes within escapes, grouped cards, issuers' keys; and what they let pass."""

from __future__ import annotations

import base64
import quopri
from urllib.parse import quote

import pytest
from updraft.router.privacy.rules import BUILTIN, Privacy, PrivacyRules

ALL = PrivacyRules(Privacy(builtin=tuple(BUILTIN)))
GROUPS = "4111", "1111", "1111", "1111"
MAIL = "jane.roe@example.org"
LETTERS = "Zq3xT7bLw9Kd2mNf8RvYc5HgJ1sPu6Ea4oXi0BtWQkzMnCDSlVrhyGjF"


def twice(text: str, times: int) -> str:
    for _ in range(times):
        text = quote(text, safe="")
    return text


@pytest.mark.parametrize(
    "text",
    [
        *(f"to={twice(MAIL, times)}" for times in (1, 2, 3, 5)),
        *(f"jane.roe{at}example.org" for at in ("&#64;", "&#64", "&#0064;", "&#x40;", "&commat;", "&COMMAT;")),
        *(f"jane.roe{at}example.org" for at in ("&amp;#64;", "&amp;amp;#64;", "&amp;commat;", "&amp#64;", "&#38;#64;")),
        *(
            f"jane.roe{at}example.org"
            for at in (r"\u0040", r"\x40", r"\u{40}", r"\U00000040", r"\\u0040", "%26%2364%3B")
        ),
        *(f"jane.roe{dot}" for dot in ("@example&period;org", "@example&#46org", "%2540example%252Eorg")),
        quopri.encodestring(MAIL.replace("@", "\x00").encode()).decode().replace("=00", "=40"),
        "jane.roe@ex=\nample.org",
        f"data {base64.b64encode(f'write to {MAIL} today'.encode()).decode()}",
        "?to=" + "".join(f"%{octet:02X}" for octet in "jane@example.org".translate({64: 0xFF20}).encode()),
    ],
)
def test_an_address_is_found_behind_its_escapes(text: str) -> None:
    assert ALL.search(f"see {text} please") == "email"


@pytest.mark.parametrize(
    "mark",
    [",", "|", ":", ";", ".", "\u00b7", "\u2022", "\u2013", "\u2014", "\u00a0", "\u202f",
     "\n", "\r\n", "\n\n", "\t", "/", "+", ", ", " | ", " : ",
     " \u00b7 ", "  \n", "\n- ", "\n* ", "\n> ", "** **", "`-`", " |\n| ", "\\\n"],
)  # fmt: skip
def test_a_card_is_found_in_groups(mark: str) -> None:
    assert ALL.search(f"it is {mark.join(GROUPS)} until 12/27") == "credit_card"
    assert ALL.search(f"it is {mark.join(('3782', '822463', '10005'))}!") == "credit_card"
    assert ALL.search(f"it is {mark.join((*GROUPS[:3], '1112'))} until 12/27") is None, "its check digit is wrong"
    column = mark.join((*GROUPS, "5105", "1051"))
    if mark not in ("\u00a0", "\u202f", "\t", "\u2013", "\u2014"):
        assert ALL.search(column) is None, "it is a longer column of numbers"


def test_a_card_in_a_table_of_markdown_is_found() -> None:
    assert ALL.search("| 4111 | 1111 | 1111 | 1111 |\n") == "credit_card"
    assert ALL.search("**4111** 1111 `1111` *1111*") == "credit_card"


@pytest.mark.parametrize(
    "key",
    [
        f"npm_{LETTERS[:36]}",
        f"SG.{LETTERS[:22]}.{LETTERS[:43]}",
        f"whsec_{LETTERS[:32]}",
        *(f"gh{kind}_{LETTERS[:36]}" for kind in "pousr"),
        f"github_pat_{LETTERS[:22]}_{LETTERS}",
        f"glpat-{LETTERS[:20]}",
        f"glrt-{LETTERS[:20]}",
        f"xoxb-123456789012-{LETTERS[:24]}",
        f"xoxe.xoxp-1-{LETTERS[:24]}",
        f"xapp-1-A0123-{LETTERS[:24]}",
        f"https://hooks.slack.com/services/T0123ABCD/B0123ABCD/{LETTERS[:24]}",
        f"AIza{LETTERS[:35]}",
        f"ya29.{LETTERS[:40]}",
        f"GOCSPX-{LETTERS[:28]}",
        '{"type": "service_account", "private_key_id": "0123456789abcdef0123456789abcdef01234567"}',
        f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={LETTERS}{LETTERS[:30]}==;EndpointSuffix=core.windows.net",
        f"Endpoint=sb://a.servicebus.windows.net/;SharedAccessKeyName=Root;SharedAccessKey={LETTERS[:43]}=",
        f"https://a.blob.core.windows.net/b?sv=2022-11-02&sp=r&sig={LETTERS[:40]}%3D",
        f"aws_secret_access_key = {LETTERS[:40]}",
        "AKIA" + LETTERS[:16].upper(),
        *(f"{kind}_live_{LETTERS[:24]}" for kind in ("sk", "rk")),
        f"sk-ant-api03-{LETTERS}",
        f"sk-proj-{LETTERS}",
        f"hf_{LETTERS[:34]}",
        f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.{LETTERS[:43]}",
        "-----BEGIN OPENSSH PRIVATE KEY-----",
        "-----BEGIN ENCRYPTED PRIVATE KEY-----",
    ],
)
def test_a_key_is_found_by_the_form_its_issuer_gives_it(key: str) -> None:
    rules = PrivacyRules(Privacy(builtin=("api_key",)))
    assert rules.search(f"please use {key} for it") == "api_key"
    assert rules.search(f'KEY="{key}"') == "api_key"


@pytest.mark.parametrize(
    "text",
    [
        "05/2024", "valid from 05/2024 to 07/2025", "01-2024", "05 2024", "(05) 2024",
        "05.2024-06.2024", "2024/05/06", "06.05.2024 10:30",
        "007 123", "ISO 0123", "5+12345678 is 12345683", "1999 2000 2001 2002",
        "2021, 2022, 2023, 2024", "2010|2014|2018|2022",
        "-----BEGIN PUBLIC KEY-----", "npm_config_registry", "SG.", "whsec_", "github_pat_", "xox-1", "AIza", "sig=1",
        "R&D, AT&T, a&b;c", "100%25 of %s", "width=40&copy=1", "https://example.org/a/long-path/with_Many/parts-2024/index",
        "the quick brown fox " * 500, "0123456789abcdef" * 8, "A" * 400,
    ],
)  # fmt: skip
def test_harmless_texts_pass(text: str) -> None:
    assert ALL.search(text) is None
