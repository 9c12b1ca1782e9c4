"""Disguises that the detectors see through (nested escapes, grouped cards, issuers' keys), and texts they let pass."""

from __future__ import annotations

import base64
import quopri
from itertools import accumulate
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
        *(f"jane.roe{at}example.org" for at in (r"\100", r"\0100", r"\x{40}", r"\000040", r"\N{COMMERCIAL AT}", r"\@")),
        *(f"jane.roe{at}example.org" for at in ("%u0040", "&commat", " @ ", "(at)", " [at] ", "[@]", "**@**", "`@`")),
        *(f"jane.roe{at}example.org" for at in ("@<wbr>", "<b>@</b>", "@<!-- x -->", '<span class="a">@</span>')),
        *(f"jane.roe{dot}org" for dot in ("@example(dot)", "@example [dot] ", "@example<i>.</i>")),
        *(f"jane.roe{dot}" for dot in ("@example&period;org", "@example&#46org", "%2540example%252Eorg")),
        quopri.encodestring(MAIL.replace("@", "\x00").encode()).decode().replace("=00", "=40"),
        "jane.roe@ex=\nample.org",
        f"data {base64.b64encode(f'write to {MAIL} today'.encode()).decode()}",
        base64.b64encode(b"a.roe@x.org").decode(),
        base64.b64encode(base64.b64encode(f"write to {MAIL} today".encode())).decode(),
        base64.b64encode(f"write to {MAIL} today".encode("utf-16-le")).decode(),
        base64.b64encode(f"write to {quote(MAIL)} today".encode()).decode(),
        MAIL.encode().hex(),
        MAIL.encode().hex(" "),
        ", ".join(f"0x{octet:02x}" for octet in MAIL.encode()),
        "\n"
        + "\n".join(f"{at:08x}: {MAIL.encode()[at : at + 16].hex(' ', 2)}  {MAIL[at : at + 16]}" for at in (0, 16)),
        "\n" + "\n".join(f"{at:08x}  {MAIL.encode()[at : at + 16].hex(' ')}  |.|" for at in (0, 16)) + "\n",
        MAIL.translate({code: 0xE0000 + code for code in range(128)}),
        "jane.[roe@exam](https://a.example/b)ple.org",
        "jane.roe@![](x)example.org",
        "?to=" + "".join(f"%{octet:02X}" for octet in "jane@example.org".translate({64: 0xFF20}).encode()),
    ],
)
def test_escaped_address_is_found(text: str) -> None:
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


@pytest.mark.parametrize("mark", [",", "|", ":", ";", ".", "/", "\\", "=", "_", "\u00b7", "\u30fb", "\t", "  ", " , "])
@pytest.mark.parametrize(
    ("digits", "sizes"),
    [
        ("6212345678901234569", (4, 4, 4, 4, 3)),
        ("6212345678901234569", (6, 13)),
        ("6212345678901234569", (8, 11)),
        ("6212345678901234569", (5, 5, 5, 4)),
        ("621234567890123457", (4, 4, 4, 4, 2)),
        ("4222222222222", (4, 3, 3, 3)),
        ("4111111111111111", (5, 3, 4, 4)),
        ("4111111111111111", (1,) * 16),
        ("4111111111111111", (2,) * 8),
    ],
)
def test_a_card_is_found_in_odd_groups(digits: str, sizes: tuple[int, ...], mark: str) -> None:
    def grouped(number: str) -> str:
        ends = list(accumulate(sizes))
        return mark.join(number[end - size : end] for size, end in zip(sizes, ends, strict=True))

    assert ALL.search(f"it is {grouped(digits)} thanks") == "credit_card"
    wrong = digits[:-1] + str((int(digits[-1]) + 1) % 10)
    assert ALL.search(f"it is {grouped(wrong)} thanks") is None


def test_a_card_is_found_where_several_marks_part_its_groups() -> None:
    assert ALL.search("4111-1111 1111.1111") == "credit_card"
    assert ALL.search("4111, 1111 - 1111 / 1111") == "credit_card"
    assert ALL.search("4111<br>1111<br>1111<br/>1111") == "credit_card"


@pytest.mark.parametrize("mark", ["", " ", "-", ".", ",", "/", "|", "_", ":", "\u00b7", "\u2011", "\t", " / "])
def test_an_account_is_found_in_groups(mark: str) -> None:
    for groups in (("DE89", "3704", "0044", "0532", "0130", "00"), ("GB82", "WEST", "1234", "5698", "7654", "32")):
        assert ALL.search(f"to {mark.join(groups)} please") == "iban"
        assert ALL.search(f"to {mark.join((*groups[:-1], '99'))} please") != "iban"


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
        f"https://discord.com/api/webhooks/123456789012345678/{LETTERS}",
        f"M{LETTERS[:23]}.{LETTERS[:6]}.{LETTERS[:27]}",
        f"1102015431:AA{LETTERS[:33]}",
        *(f"{name}{'0123456789abcdef' * 2}" for name in ("SK", "AC", "key-", "dapi")),
        f"{'0123456789abcdef' * 2}-us12",
        *(
            f"{name}{LETTERS[:40]}"
            for name in ("secret_", "ntn_", "EAAA", "EAAC", "csk-", "sbp_", "fw_", "glc_", "pcsk_")
        ),
        *(
            f"{name}{LETTERS[:40]}"
            for name in ("sq0atp-", "ATATT3x", "figd_", "glsa_", "sntrys_", "tgp_v1_", "rubygems_")
        ),
        *(f"{name}{LETTERS[:40]}" for name in ("NRAK-", "PMAK-", "dp.pt.", "lsv2_pt_", "tskey-auth-", "tvly-", "fm2_")),
        f"{LETTERS[:14]}.atlasv1.{LETTERS}{LETTERS[:10]}",
        f"Authorization: Bearer {LETTERS[:40]}",
        "'authorization': 'Basic YWxpY2U6c2VjcmV0cGFzc3dvcmQ='",
        "postgres://admin:s3cret@db/prod",
        "https://:s3cret@[::1]:8080/",
        f"MISTRAL_API_KEY={LETTERS[:32]}",
        f"client_secret: '{LETTERS[:32]}'",
        '"password": "hunter2-hunter2"',
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
        "secret_manager_of_the_whole_house", "key-value-store-implementation", "token = authentication_token_of(user)",
        "http://localhost:8080/@user", "http://[::1]:80/", "a (at) b, dot (dot) com", "password: see chapter 12",
        "4,234,567,890,123,456", "a*b*c 4111*2", "<b>4111</b> 1111", "array[1] @ [2]",
        "-----BEGIN PUBLIC KEY-----", "npm_config_registry", "SG.", "whsec_", "github_pat_", "xox-1", "AIza", "sig=1",
        "R&D, AT&T, a&b;c", "100%25 of %s", "width=40&copy=1", "https://example.org/a/long-path/with_Many/parts-2024/index",
        "the quick brown fox " * 500, "0123456789abcdef" * 8, "A" * 400,
    ],
)  # fmt: skip
def test_harmless_texts_pass(text: str) -> None:
    assert ALL.search(text) is None
