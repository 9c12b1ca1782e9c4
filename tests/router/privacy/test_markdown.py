"""Secrets under Markdown and HTML marks, and secrets split over several messages; names of programs stay unmatched."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from updraft.router.privacy.rules import BUILTIN, Privacy, PrivacyRules

RULES = PrivacyRules(Privacy(builtin=tuple(BUILTIN), patterns={"project": r"(?i)\bproject aurora\b"}))
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
SECRETS = {
    "project": "Project Aurora",
    "phone": "+49 30 12345678",
    "credit_card": "4111111111111111",
    "iban": "DE89370400440532013000",
    "email": "ann.roe@example.com",
    "api_key": f"sk-proj-{LETTERS}",
}
KEYS = [
    f"ghp_{LETTERS}",
    f"sk-proj-{LETTERS}",
    "AKIAIOSFODNN7EXAMPLF",
    f"hf_{LETTERS}",
    f"sk_live_{LETTERS}",
    f"whsec_{LETTERS}",
]
MARKS = ["_", "__", "___", "*", "**", "`", "~~", "=="]


@pytest.mark.parametrize("rule", SECRETS)
def test_emphasis_is_no_disguise(rule: str) -> None:
    secret = SECRETS[rule]
    for mark in MARKS:
        for inner in ("", *({"_", "**", "`"} - {mark, mark[0], mark[0] * 2})):
            text = f"see {mark}{inner}{secret}{inner[::-1]}{mark}, please"
            assert RULES.search(text) == rule, text


@pytest.mark.parametrize("mark", ["__", "**", "*", "~~", "=="])
@pytest.mark.parametrize("rule", ["phone", "credit_card", "api_key"])
def test_emphasis_of_one_half_is_no_disguise(rule: str, mark: str) -> None:
    middle = len(SECRETS[rule]) - 5
    text = f"see {SECRETS[rule][:middle]}{mark}{SECRETS[rule][middle:]}{mark} please"
    assert RULES.search(text) == rule, text


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("form", ["_{}_", "my_{}_x", "mykey_{}", "<b>_{}_</b>", "\\_{}\\_"])
def test_a_key_inside_a_name_is_found(key: str, form: str) -> None:
    assert RULES.search(form.format(key)) == "api_key"


@pytest.mark.parametrize(
    "text",
    [
        "my_project_aurora_id",
        "self._project_aurora_id = project_aurora_",
        "load_hf_checkpoint_from_directory, _npm_install_all_dependencies",
        "idx_pk_users_organizations_id, my_sk_learn_model_configuration, x_whsec_signature_verification",
        "the_ghp_token_of_the_whole_organization_and_more",
        "2*3*4, 4111*2*1111, 10**15 == 10 ** 15, a*b*c",
        "3600*24*365*1000000 and 1234567*8901234*56",
        "4111<br>1111<br>1111<br>1111<br>5105<br>1051",
    ],
)
def test_names_and_products_are_no_secret(text: str) -> None:
    assert RULES.search(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "project<br>aurora", "project<br/>aurora", "project\\\naurora", "project <span title='a>b'>aurora</span>",
        'project <a href="x?a>b" class="c">aurora</a>', "pro<!-- a > b -->ject aurora",
    ],
)  # fmt: skip
def test_tags_and_marked_breaks_are_no_disguise(text: str) -> None:
    assert RULES.search(text) == "project"


def messages(*texts: str, role: str = "user", between: str = "") -> dict[str, Any]:
    turns = [{"role": role, "content": text} for text in texts]
    other = [{"role": "assistant", "content": between}] if between else []
    return {"messages": [turn for each in turns for turn in (each, *other)]}


def parts(*texts: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": text} for text in texts]}]}


@pytest.mark.parametrize(
    ("rule", "texts"),
    [
        ("project", ["about project", "aurora now"]),
        ("project", ["about project ", "aurora now"]),
        ("project", ["about project aur", "ora now"]),
        ("project", ["about project a", "uro", "ra now"]),
        ("project", ["w " * 900 + "project", "aurora" + " w" * 900]),
        ("phone", ["call +49 30", "12345678"]),
        ("api_key", ["the key sk-proj-abcd", "efghijklmn", "opqrstuv wxyz"]),
        ("email", ["write to ann.roe", "@", "example.com"]),
    ],
)
def test_a_split_secret_is_found(rule: str, texts: list[str]) -> None:
    for body in (messages(*texts), messages(*texts, between="Go on."), parts(*texts)):
        assert asyncio.run(RULES.match(body)) == rule


@pytest.mark.parametrize("pattern", ["^word", "word$"])
def test_an_anchor_means_no_cut(pattern: str) -> None:
    rules = PrivacyRules(Privacy(patterns={"mine": pattern}))
    text = "x" + " word" * 900 + " x"
    assert asyncio.run(rules.match(messages(text, "x", text))) is None


def test_texts_of_other_senders_are_not_joined() -> None:
    body = {"messages": [{"role": "user", "content": "project"}, {"role": "assistant", "content": "aurora"}]}
    assert asyncio.run(RULES.match(body)) is None


@pytest.mark.parametrize(
    "text", ["_a " * 300_000, "==a" * 300_000, "<a \"'" * 200_000, "<br>" * 200_000, "*1" * 400_000]
)
def test_marks_take_linear_time(text: str) -> None:
    began = time.process_time()
    RULES.search(text)
    assert time.process_time() - began < 10
