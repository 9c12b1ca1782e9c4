"""Privacy rules: what they find, what they let pass, that they never hang, and that nothing leaves the device."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cascade_bench import run
from hypothesis import given
from hypothesis import strategies as st
from router_fakes import FakeCloud, ScriptedGates
from updraft.protocol.errors import ConfigurationError
from updraft.protocol.http.forwarding import forwarded
from updraft.protocol.http.wire import WireRequest
from updraft.router.config import RouterConfig
from updraft.router.privacy.rules import BUILTIN, Privacy, PrivacyRules
from updraft.router.router import Router

ALL = Privacy(builtin=tuple(BUILTIN))
CARD = "4111111111111111"
MARKS = [*map(chr, (0xFE0F, 0xFE00, 0x180B, 0x180F, 0xE0100, 0xE0020, 0x34F, 0x115F, 0x1160, 0x3164, 0xFFA0, 0x17B4)),
         *"\x01\x7f\x00\x1b\x9f\u2060", "\ufe0f\u20e3"]  # fmt: skip

TRIED: list[str] = []  # what a forbidden socket was asked for; audit hooks cannot be taken off again
FORBIDDEN: list[bool] = []


def _forbid(event: str, arguments: tuple[Any, ...]) -> None:
    if FORBIDDEN and event in ("socket.connect", "socket.getaddrinfo", "socket.sendto", "socket.sendmsg"):
        TRIED.append(event)
        raise PermissionError(f"{event}: no sockets here")


@pytest.fixture
def no_sockets() -> Iterator[list[str]]:
    """Every attempt to reach anybody, from whatever code of this process, is noted and fails."""
    if not hasattr(sys, "_updraft_forbids"):
        sys.addaudithook(_forbid)
        sys._updraft_forbids = True
    TRIED.clear()
    FORBIDDEN.append(True)
    yield TRIED
    FORBIDDEN.clear()


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("email", "write to jane.doe+x@mail.example.org today"),
        ("email", "jörg@müller.example"),
        ("credit_card", "4111 1111 1111 1111 12/27 123"),
        ("credit_card", "order 99, card 5500-0000-0000-0004."),
        ("credit_card", "378282246310005"),
        ("credit_card", "\uff14111 1111\u00a01111 1111"),
        ("credit_card", "4111\u200b1111\u200b1111\u200b1111"),
        ("credit_card", "4111\u20131111\u20131111\u20131111 and 4111\u20111111"),
        ("credit_card", "4111.1111.1111.1111, and so on"),
        ("credit_card", "4111_1111_1111_1111"),
        ("credit_card", "order 12  4111  1111  1111  1111"),
        ("credit_card", "my card:\r\n4111\r\n1111\r\n1111\r\n1111\r\nthanks"),
        ("credit_card", "3782.822463.10005"),
        ("credit_card", "".join(chr(0x660 + int(digit)) for digit in "4111111111111111")),
        ("email", "jo\u00adhn\u200b@\u00adexam\u00adple.com"),
        ("phone", "0171.2345678"),
        ("phone", "01.23.45.67.89"),
        ("phone", "06 12 34 56 78"),
        ("phone", "06-12-34-56-78"),
        ("phone", "call\u200b030/90182000"),
        ("iban", "it is DE89 3704 0044 0532 0130 00 and thank you"),
        ("iban", "gb82west12345698765432"),
        ("iban", "DE89 3704 0044\n0532 0130 00"),
        ("iban", "DE89\t3704\t0044\t0532\t0130\t00"),
        ("iban", "DE89  3704  0044  0532  0130  00"),
        ("iban", "it is DE89-3704-0044-0532-0130-00."),
        ("iban", "DE89.3704.0044.0532.0130.00"),
        ("iban", "IBANDE89370400440532013000"),
        ("iban", "room AB12 IBAN DE89 3704 0044 0532 0130 00"),
        ("credit_card", " ".join(CARD)),
        ("credit_card", "it is " + "-".join(CARD) + ", valid"),
        ("credit_card", "4 1 1 1  1 1 1 1  1 1 1 1  1 1 1 1"),
        ("credit_card", "41 11 11 11 11 11 11 11"),
        ("credit_card", "37 82 82 24 63 10 00 5"),
        ("credit_card", "4111 1111  1111 1111"),
        ("credit_card", "41111  111 1111\t1111"),
        ("email", '"john doe"@example.com'),
        ("email", "joe@[192.168.0.1]"),
        ("email", "joe@example\u3002com"),
        ("email", "joe\\\\u0040example.com, and so on"),
        ("email", "https://x.example/?mail=joe%40example.com"),
        ("email", "joe&#64;example.com or joe&#x40;example.com"),
        ("credit_card", "\\ud835\\udfd2" + CARD[1:]),
        *(("credit_card", mark.join(CARD)) for mark in MARKS),
        *(("email", f"joe{mark}@{mark}example.com") for mark in MARKS),
        ("phone", "call +49 (30) 901820-0"),
        ("phone", "(212) 555-0123"),
        ("phone", "030/90182000"),
        ("api_key", "export KEY=sk-proj-abcdefghijklmnopqrstuvwx"),
        ("api_key", "AKIAIOSFODNN7EXAMPLE"),
        ("api_key", "ASIAIOSFODNN7EXAMPLE"),
        ("api_key", "-----BEGIN RSA PRIVATE KEY-----"),
    ],
)
def test_private_texts_match(rule: str, text: str) -> None:
    assert PrivacyRules(ALL).search(text) == rule


@pytest.mark.parametrize(
    "text",
    [
        "4111 1111 1111 1112",
        "1234567890123",
        "GB82 WEST 1234 5698 7654 33",
        "What is 347 + 586? In 2024 it was 12:30, on 2024-05-06.",
        "x @ y, a@b, sk-1, pi is 3.14159265358979",
        "4111\n1111\n1111\n1111\n5105\n1051\n0510\n5100",
        "0.1712345678, 01.02.2024, 05.2024, 0.05.12345 \u2013 and 1990\u20132024",
        "4111.1111.1111.1112, 4111  1111  1111",
        "4 1 1 1\n1 1 1 1\n1 1 1 1\n1 1 1 1",
        " ".join(CARD) + "\n" + " ".join(CARD),
        "41 11 11 11 11 11 11 11 11",
        "411 111 111 111 111 1",
        "2011-03-04 - 2024-05-16, 4111\t1111\n1111\t1111",
        "in AB12\nwe saw. the-fox in AB13 and then it left the room as it had come",
        "say \"a\"@once or '@app.route'",
        "C:\\new\\u0041 100% &#9; &#99999999; \\ud800 {",
        "version 1.2.3-4, 192.168.100.200:8080, $1,234,567.89",
        "",
    ],
)
def test_harmless_texts_pass(text: str) -> None:
    assert PrivacyRules(ALL).search(text) is None


@given(digits=st.text("0123456789", min_size=12, max_size=18), first=st.sampled_from("3456"))
def test_every_card_number_is_found_and_its_neighbour_is_not(digits: str, first: str) -> None:
    rules = PrivacyRules(Privacy(builtin=("credit_card",)))
    body = first + digits[:-1]
    total = sum(sum(divmod(2 * int(d), 10)) if i % 2 == 0 else int(d) for i, d in enumerate(reversed(body)))
    check = -total % 10
    assert rules.search(f"no. {body}{check}!") == "credit_card"
    assert rules.search(f"no. {body}{(check + 1) % 10}!") is None


@given(st.text(max_size=300))
def test_any_text_can_be_searched(text: str) -> None:
    PrivacyRules(ALL).search(text)


@pytest.mark.parametrize(
    "text",
    [
        "a" * 10**6,
        "1 " * 5 * 10**5,
        "DE00" + "A1 " * 3 * 10**5,
        "a@" * 5 * 10**5,
        "4111.1111." * 10**5,
        "1\u00ad\u2013" * 10**5,
        "1\ufe0f" * 5 * 10**5,
        "4 1 1 1 1 1 1 1 1 1 1 1 1 1 1 2, " * 3 * 10**4,
        "4111  " * 10**5,
        "AA11-\n" * 3 * 10**4,
        "\\" * 10**6,
        "%31" * 3 * 10**5,
        '"a"@' * 10**5,
        "[" * 10**6,
    ],
)
def test_no_pattern_hangs(text: str) -> None:
    rules = PrivacyRules(Privacy(builtin=tuple(BUILTIN), patterns={"bomb": r"(a+)+$", "words": r"(\w+\s?)*!"}))
    began = time.process_time()
    rules.search(text + "b?")
    assert time.process_time() - began < 10, "a backtracking engine needs longer than the universe has"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patterns": {"mine": "("}}, "privacy.patterns.mine is not a valid Rust regex: unclosed group"),
        ({"patterns": {"mine": "(?=x)"}}, "look-around.* is not supported"),
        ({"patterns": {"mine": r"(((\w{100}){100}){100}){100}"}}, "size limit"),
        ({"builtin": ("e-mail",)}, "there is no rule 'e-mail'. Known: email, credit_card"),
    ],
)
def test_rules_that_cannot_be_kept_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Privacy(**settings)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"expediente n\.º \d+", "el expediente n.º 12"),
        ("n.º de cédula", "el n.º de cédula"),
        ("Acme™", "about Acme™ Ltd"),
        ("12 m²", "it has 12 m² in all"),
        ("№ 5", "see № 5"),
        ("5 µg", "take 5 µg"),
        ("Frau\u00a0Weber", "this is Frau\u00a0Weber"),
        ("Frau Weber", "this is Frau\u00a0Weber"),
        ("cafe\u0301", "a cafe\u0301"),
        ("cafe\u0301", "a caf\u00e9"),
        ("caf\u00e9", "a cafe\u0301"),
        ("^Confidential", "Confidential: read this"),
        (r"\A\s*Confidential", "\n Confidential: read this"),
        ("only for us$", "this is only for us"),
        (r"^[A-Z]{3}-\d+$", "ABC-12"),
        (r"secret\z", "a secret"),
        ("^secret", "secret \ud800"),
        ("^secret", "\u00adse\u200bcret"),
    ],
)
def test_patterns_mean_the_text_as_it_is_written(pattern: str, text: str) -> None:
    """The match does not depend on the text before and after it in the request."""
    rules = PrivacyRules(Privacy(patterns={"mine": pattern}))
    body = conversation(("system", "Be kind."), ("user", text), ("user", "Thank you."))
    assert asyncio.run(rules.match(body)) == "mine"
    parts = [{"type": "text", "text": each} for each in (text[:4], text[4:])]
    assert asyncio.run(rules.match({"messages": [{"role": "user", "content": parts}], "user": "x"})) == "mine"


@pytest.mark.parametrize(("pattern", "text"), [("^Confidential", "not Confidential"), ("for us$", "for us all")])
def test_anchored_patterns_mean_the_ends_of_a_text(pattern: str, text: str) -> None:
    rules = PrivacyRules(Privacy(patterns={"mine": pattern}))
    assert asyncio.run(rules.match(conversation(("user", text), ("user", "Thank you.")))) is None


def test_many_texts_are_searched_quickly() -> None:
    rules = PrivacyRules(Privacy(builtin=tuple(BUILTIN), patterns={"first": "^secret", "last": "secret$"}))
    began = time.process_time()
    assert asyncio.run(rules.match({"input": [f"text {number} \u00b5" for number in range(200_000)]})) is None
    assert time.process_time() - began < 20


@pytest.mark.parametrize("ids", [[1, 2], [[1, 2], [3]], ["text", [1]]])
def test_token_ids_are_no_text_that_rules_could_read(bench: Any, cloud: FakeCloud, ids: list[Any]) -> None:
    async def test() -> None:
        async with bench(privacy=Privacy(patterns={"mine": "secret"})) as b:
            body = json.dumps({"model": "auto", "input": ids}).encode()
            refused = await b.handle(WireRequest("POST", "/v1/embeddings", body=body))
            error = json.loads(refused.body)["error"]
            assert (refused.status, error["code"], error["param"]) == (400, "private", None)
            assert "token ids" in error["message"]
            assert not cloud.requests
            assert [row.status for row in b.rows()] == [400]

    run(test())


SECRET = "my card is 4111 1111 1111 1111"


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": SECRET}]},
        {"messages": [{"role": "system", "content": SECRET}, {"role": "user", "content": "hi"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in (SECRET[:20], SECRET[20:])]}]},
        {"messages": [{"role": "user", "content": "hi"}], "user": SECRET},
    ],
)
def test_a_match_keeps_the_request_here_and_names_the_rule_only(
    bench: Any, cloud: FakeCloud, fields: dict[str, Any]
) -> None:
    async def test() -> None:
        async with bench(ScriptedGates(before=True), privacy=ALL) as b:
            info = (await b.answer(**fields))["updraft"]
            assert (info["tier"], info["gate"]) == ("local", 0)
            assert info["reason"] == "private: the rule credit_card keeps the request on this device"
            _, _, done = await b.stream(**fields)
            assert done
            refused = (await b.answer("cloud", **fields))["error"]
            assert (refused["code"], "credit_card" in refused["message"]) == ("private", True)
            b.local.too_long = True
            assert (await b.answer(**fields))["error"]["code"] == "context_length_exceeded"
            b.local.too_long = False
            body = json.dumps({"model": "auto", "input": [SECRET]}).encode()
            embeddings = await b.handle(WireRequest("POST", "/v1/embeddings", body=body))
            assert json.loads(embeddings.body)["error"]["code"] == "private"
            assert not cloud.requests
            assert (await b.answer())["updraft"]["tier"] == "cloud", "others go where they went"
        assert re.search(rb"4111\W{0,3}1111", b.ledger.read_bytes()) is None

    run(test())


CALL = {"type": "function", "function": {"name": "pay", "arguments": '{"card": "\\u0034111111111111111"}'}}


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [{"function": {"parameters": {"properties": {"card": {"type": "integer", "default": int(CARD)}}}}}]},
        {"tools": [{"function": {"parameters": {"properties": {"card": {"examples": [1, float(int(CARD))]}}}}}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}]},
    ],
)
def test_numbers_and_arguments_are_text_too(body: dict[str, Any]) -> None:
    assert run_match(body) == "credit_card"


def test_a_megabyte_of_single_digits_takes_less_than_a_second() -> None:
    rules = PrivacyRules(ALL)
    began = time.process_time()
    for gap in " -":
        assert rules.search(f"1{gap}" * 5 * 10**5) is None
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    "content",
    [
        {"mail": "joe@example.com"},
        {"card": "4111\u00a01111\u00a01111\u00a01111"},
        {"card": "\uff14" + CARD[1:]},
        {"iban": "DE89\n3704\n0044\n0532\n0130\n00"},
        {"card": float(int(CARD))},
        {"key": "-----BEGIN PRIVATE KEY-----\nabc"},
    ],
)
@pytest.mark.parametrize("role", ["tool", "user"])
def test_escaped_json_is_decoded_before_matching(role: str, content: dict[str, Any]) -> None:
    escaped = json.dumps(content).replace("@", "\\u0040")
    for text in (escaped, json.dumps(escaped), json.dumps({"result": escaped}), f"It says:\n{json.dumps(escaped)}\n."):
        if not isinstance(content.get("card"), float) or text.startswith("{"):
            assert run_match(conversation((role, text))) is not None, text
            parts = [{"type": "text", "text": each} for each in (text[:15], text[15:])]
            assert run_match({"messages": [{"role": role, "content": parts}]}) is not None, text


def test_patterns_mean_each_string_of_some_json() -> None:
    rules = PrivacyRules(Privacy(patterns={"mine": "^secret"}))
    assert asyncio.run(rules.match(conversation(("tool", '{"a": "\\u0073ecret"}')))) == "mine"
    assert asyncio.run(rules.match(conversation(("tool", '{"a": "no secret"}')))) is None


def test_json_in_json_can_be_deep() -> None:
    text = "[" * 900 + "1" + "]" * 900
    for _ in range(5):
        text = "[" * 900 + json.dumps(text) + "]" * 900
    assert run_match(conversation(("user", text))) is None
    assert run_match(conversation(("user", text.replace("1", f'"{CARD}"')))) == "credit_card"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "4111 1111"}, {"content": "1111 1111"}]},
        {"tools": [{"arguments": "{nonsense"}, {"arguments": "[" * 5000}, 10**300], "seed": int(CARD), "top_p": 1e308},
    ],
)
def test_separate_values_are_not_joined(body: dict[str, Any]) -> None:
    assert run_match(body) is None


@pytest.mark.parametrize(
    "values", [{"a": "4111 1111", "b": "1111 1111"}, ["4111-1111-", "1111-1111"], [41111111, 11111111]]
)
def test_a_card_in_neighbouring_values_is_seen(values: Any) -> None:
    arguments = [{"function": {"name": "pay", "arguments": json.dumps({"card": values})}}]
    assert run_match({"messages": [{"role": "assistant", "tool_calls": arguments}]}) == "credit_card"
    assert run_match({"messages": [{"role": "user", "content": "hi"}], "metadata": {"card": values}}) == "credit_card"


@pytest.mark.parametrize(
    "values", [["4111 1111", "x", "1111 1111"], [4111, 1111], [["4111 1111"], {"a name of a field": "1111 1111"}]]
)
def test_other_numbers_in_values_are_no_card(values: Any) -> None:
    assert run_match(conversation(("user", json.dumps(values)))) is None


SECRETS = {"email": "joe.doe@example.com", "api_key": "ghp_" + "a1B2c3D4e5" * 4}


@pytest.mark.parametrize(
    "encode",
    [
        base64.b32encode,
        lambda raw: base64.b32encode(raw).lower().rstrip(b"="),
        base64.b85encode,
        base64.a85encode,
        lambda raw: base64.a85encode(raw, adobe=True),
        lambda raw: raw.decode().replace("@", "+AEA-").replace("_", "+AF8-").encode(),
        lambda raw: b"+" + base64.b64encode(raw.decode().encode("utf-16-be")).rstrip(b"=") + b"-",
    ],
)
@pytest.mark.parametrize("rule", SECRETS)
def test_bytes_as_text_are_read(rule: str, encode: Callable[[bytes], bytes]) -> None:
    shown = encode(SECRETS[rule].encode()).decode()
    for text in (shown, f"What is {shown} here?", f'x: "{shown}".', f"({shown})"):
        assert run_match(conversation(("user", text))) == rule, text


def run_match(body: dict[str, Any]) -> str | None:
    return asyncio.run(PrivacyRules(ALL).match(body))


def test_private_requests_open_no_socket(no_sockets: list[str], tmp_path: Path) -> None:
    """The whole router with the packaged model, in a process in which nobody may connect to anything."""

    async def test() -> None:
        config = RouterConfig(
            local="pocket", cloud_url="http://127.0.0.1:9", cloud_model="big", confidence=0.999999, privacy=ALL
        )
        router = Router(config)

        async def ask(text: str, **options: Any) -> dict[str, Any]:
            fields = {"model": "auto", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **options}
            response = await router.chat(WireRequest("POST", "/v1/chat/completions", {}, json.dumps(fields).encode()))
            assert isinstance(response.body, bytes)
            return json.loads(response.body)["updraft"]

        try:
            assert (await ask(SECRET))["reason"].startswith("private: the rule credit_card")
            assert (await ask("hi", updraft={"private": True}))["reason"].startswith("private")
            assert no_sockets == []
            assert (await ask("Who was the first emperor of Rome?"))["route"] == "fallback"
            assert no_sockets, "the test can see a socket: this one tried"
        finally:
            await router.close()

    run(test())


def conversation(*content: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in content]}


@pytest.mark.parametrize(
    "content",
    [
        [("user", "My card: 4111 1111"), ("assistant", "Go on."), ("user", "1111 1111, valid until 12/27")],
        [("user", "4111-1111-11"), ("user", "11-1111")],
        [("user", "first 4111"), ("user", "1111."), ("user", "(1111)"), ("user", "1111 is the end")],
        [("user", "first half 4111.1111."), ("user", "1111.1111.")],
        [("user", "37828224"), ("assistant", "12"), ("user", "6310005")],
        [("user", "4111-1111-"), ("user", "1111-1111")],
        [("user", "4111/1111/"), ("user", "/1111/1111")],
        [("user", "it is 4111_1111_"), ("user", "1111_1111")],
        [("user", "4111\u20131111"), ("user", "1111\u20131111")],
        [("user", "4111\u200b1111\u200b"), ("user", "11\u00ad11 1111")],
        [("user", "it is 4111\u00a01111"), ("user", "\uff11111\u00a01111 thanks")],
        [("user", "4111\r\n1111"), ("user", "1111\n1111")],
        [("user", "it is 4111 1111" + " " * 70), ("user", "\n" * 70 + "1111 1111")],
        [("user", "4111 1111"), ("user", " "), ("user", "1111 1111")],
        [("user", "5100 " * 20 + "4111 1111"), ("user", "1111 1111 " + "5100 " * 20)],
    ],
)
def test_a_card_in_several_messages_is_seen(content: list[tuple[str, str]]) -> None:
    rules = PrivacyRules(Privacy(builtin=("credit_card",)))
    assert asyncio.run(rules.match(conversation(*content))) == "credit_card"
    parts = {"messages": [{"role": r, "content": [{"type": "text", "text": text}]} for r, text in content]}
    assert asyncio.run(rules.match(parts)) == "credit_card"


@pytest.mark.parametrize(
    "content",
    [
        [("user", "4111 1111"), ("user", "1111 1112")],
        [("user", "4111 1111"), ("assistant", "1111 1111")],
        [("user", "4111 1111 pens"), ("user", "1111 1111")],
        [("user", "4111 1111"), ("user", "and 1111 1111")],
        [("user", "4111 1111"), ("user", "so?"), ("user", "1111 1111")],
        [("user", ""), ("user", "1111 1111")],
        [("user", "4111\n1111\n1111\n1111\n5105"), ("user", "12")],
        [("user", "41111111" * 5), ("user", "1111 1111")],
    ],
)
def test_other_numbers_in_several_messages_are_no_card(content: list[tuple[str, str]]) -> None:
    assert asyncio.run(PrivacyRules(ALL).match(conversation(*content))) is None


@pytest.mark.parametrize(
    ("rule", "content"),
    [
        ("email", ["write to jane@", "example.org now"]),
        ("email", ["jane", "@example.org"]),
        ("api_key", ["it is sk-proj-abcdefgh", "ijklmnopqrstuvwxyz012345"]),
        ("iban", ["DE8937040044", "0532013000"]),
    ],
)
def test_a_word_in_several_messages_is_seen(rule: str, content: list[str]) -> None:
    between = [("user", content[0]), ("assistant", "Go on."), ("user", content[1])]
    assert run_match(conversation(*between)) == rule
    assert run_match(conversation(("user", content[0]), ("user", f"and {content[1]}"))) is None
    parts = [{"type": "text", "text": content[0]}, {"type": "refusal", "refusal": content[1]}]
    assert run_match({"messages": [{"role": "assistant", "content": parts}]}) == rule


def test_names_of_fields_are_text_too() -> None:
    assert run_match({"joe@example.com": 1}) == "email"
    assert run_match({"logit_bias": {CARD: 1}}) == "credit_card"


@pytest.mark.parametrize(
    "query", ["joe@example.com", "joe%2540example.com", "a=1&joe%40example.com=", "mail=joe@example.com"]
)
def test_headers_and_query_are_scanned(query: str) -> None:
    assert run_match({"?": forwarded({}, query).texts}) == "email"
    assert run_match({"?": forwarded({f"x-{CARD}": "a"}).texts}) == "credit_card"


def test_a_thousand_messages_of_digits_are_quick() -> None:
    started = time.process_time()
    asyncio.run(PrivacyRules(ALL).match(conversation(*(("user", "1 " * 500) for _ in range(500)))))
    assert time.process_time() - started < 5


@pytest.mark.parametrize("marks", ["\u0345\u0301", "\uff9e\u0334", "\u0301\u0327"])
def test_a_tower_of_marks_is_read_in_linear_time(marks: str) -> None:
    """Sorting them takes quadratic time, and holds up every thread meanwhile."""
    rules = PrivacyRules(Privacy(builtin=("email",)))
    began = time.process_time()
    assert rules.search(marks * 100_000 + " joe@example.com") == "email"
    assert time.process_time() - began < 5
