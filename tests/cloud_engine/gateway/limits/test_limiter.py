"""The limits that hold for a request, its reservations, and the words of refusals and headers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.accounting.prices import DatedPrice, PriceTable
from updraft.accounting.token_estimate import LENGTHENING, MULTIPLYING, NESTED, AnswerSize
from updraft.cloud_engine.gateway.access.principal import ANONYMOUS, Limits, Principal
from updraft.cloud_engine.gateway.ledger.ledger import UsageLedger
from updraft.cloud_engine.gateway.ledger.metering import UsageRow
from updraft.cloud_engine.gateway.ledger.opening import open_reader, open_store
from updraft.cloud_engine.gateway.limits.accounting import AccountingOptions, open_accounting
from updraft.cloud_engine.gateway.limits.limiter import Limiter, LimitError, duration
from updraft.cloud_engine.gateway.limits.limits_file import LimitsFile, read_limits_file
from updraft.cloud_engine.gateway.limits.request_size import RequestSize, size_of
from updraft.cloud_engine.gateway.limits.shared_memory import SharedMemoryStore
from updraft.cloud_engine.gateway.relay.call import _peek
from updraft.protocol.errors import (
    BudgetExceededError,
    ConfigurationError,
    InvalidRequestError,
    PermissionDeniedError,
    RequestTooLargeError,
)

PRICES = PriceTable.of([DatedPrice("m", input=10.0, output=20.0)])
Work = Callable[[Limiter], Coroutine[Any, Any, None]]


def principal(**limits: Any) -> Principal:
    return Principal("key_1", "tester", "acme", ("inference",), limits=Limits(**limits))


@pytest.fixture
def with_limiter(tmp_path: Path) -> Callable[..., None]:
    def run(work: Work, limits: LimitsFile = LimitsFile()) -> None:  # noqa: B008
        async def inside() -> None:
            file = tmp_path / "usage.sqlite3"
            UsageLedger(open_store(file)).close()
            store = SharedMemoryStore(tmp_path / "limits")
            await work(Limiter(store, limits, PRICES, open_reader(file)))
            await store.close()

        asyncio.run(inside())

    return run


def test_headers_as_openai_spells_them(with_limiter: Callable[..., None]) -> None:
    async def work(limiter: Limiter) -> None:
        caller = principal(requests_per_minute=60, tokens_per_minute=6000)
        reservation = await limiter.admit(caller, "m", 400, AnswerSize(200))
        assert [(name.decode(), value.decode()) for name, value in reservation.headers()] == [
            ("x-ratelimit-limit-requests", "60"),
            ("x-ratelimit-remaining-requests", "59"),
            ("x-ratelimit-reset-requests", "1s"),
            ("x-ratelimit-limit-tokens", "6000"),
            ("x-ratelimit-remaining-tokens", "5400"),
            ("x-ratelimit-reset-tokens", "6s"),
        ]
        await reservation.settle(10, 5, None)
        await reservation.settle(10, 5, None)
        after = dict((await limiter.admit(caller, "m", 0, AnswerSize(1))).headers())
        assert int(after[b"x-ratelimit-remaining-tokens"]) >= 6000 - 15 - 1

    with_limiter(work)


def test_a_refusal_says_which_limit_and_when_to_come_back(with_limiter: Callable[..., None]) -> None:
    async def work(limiter: Limiter) -> None:
        caller = principal(tokens_per_minute=1000)
        await limiter.admit(caller, "m", 100, AnswerSize(800))
        with pytest.raises(LimitError, match="1000 tokens per minute: 900 are used or reserved") as refused:
            await limiter.admit(caller, "m", 100, AnswerSize(100))
        assert refused.value.status == 429
        assert refused.value.to_body()["error"]["code"] == "rate_limit_exceeded"
        headers = refused.value.headers()
        assert headers["retry-after"] == "6"
        assert headers["x-should-retry"] == "true"
        assert headers["x-ratelimit-remaining-tokens"] == "100"
        with pytest.raises(LimitError, match="lower max_tokens") as refused:
            await limiter.admit(caller, "m", 10, AnswerSize(1001))
        assert "retry-after" not in refused.value.headers()
        assert refused.value.headers()["x-should-retry"] == "false"

    with_limiter(work)


def test_an_estimate_alone_never_makes_a_request_too_large(with_limiter: Callable[..., None]) -> None:
    async def work(limiter: Limiter) -> None:
        for prompt, most in ((10**6, 100), (10, None), (10**6, None)):
            reservation = await limiter.admit(principal(tokens_per_minute=500), "m", prompt, AnswerSize(most))
            await reservation.settle(1, 0, None)
            await asyncio.sleep(0.2)  # 1 token drains in 120 ms

    with_limiter(work)


def test_each_answer_counts_that_names_no_limit(with_limiter: Callable[..., None]) -> None:
    async def work(limiter: Limiter) -> None:
        await limiter.admit(principal(tokens_per_minute=10_000), "m", 100, AnswerSize(None, 9))
        with pytest.raises(LimitError):
            await limiter.admit(principal(tokens_per_minute=10_000), "m", 100, AnswerSize(None))

    with_limiter(work)


def test_tenants_and_models_have_limits_too(with_limiter: Callable[..., None]) -> None:
    async def work(limiter: Limiter) -> None:
        first = await limiter.admit(ANONYMOUS, "m", 1, AnswerSize(1))
        with pytest.raises(LimitError, match="This model is limited to 1 requests at once") as refused:
            await limiter.admit(ANONYMOUS, "m", 1, AnswerSize(1))
        assert refused.value.headers()["retry-after"] == "1"
        await first.settle(1, 1, None)
        await limiter.admit(principal(), "m", 1, AnswerSize(1))
        with pytest.raises(LimitError, match="This tenant is limited to 1 requests per minute"):
            await limiter.admit(principal(), "other", 1, AnswerSize(1))

    with_limiter(
        work, LimitsFile(tenants={"acme": Limits(requests_per_minute=1)}, models={"m": Limits(max_concurrency=1)})
    )


def test_budgets_outlive_the_process(with_limiter: Callable[..., None], tmp_path: Path) -> None:
    """A new process begins with what the ledger says; a model without a price is refused where a budget holds."""
    caller = principal(usd_per_day=0.5, usd_per_month=1.0)
    spent = UsageRow(request_id="r", key_id="key_1", tenant="acme", model="m", cost_usd=0.45)
    ledger = UsageLedger(open_store(tmp_path / "usage.sqlite3"))

    async def spend() -> None:
        ledger.settle(spent)

    asyncio.run(spend())
    ledger.close()

    async def work(limiter: Limiter) -> None:
        reservation = await limiter.admit(caller, "m", 1000, AnswerSize(1000))  # may cost 3 cents
        with pytest.raises(LimitError, match=r"0\.5 US dollars a day: \$0\.48 are used.*Try again in 1s") as refused:
            await limiter.admit(caller, "m", 1000, AnswerSize(1000))
        assert refused.value.headers()["x-should-retry"] == "true", "the first may give back what it does not use"
        with pytest.raises(BudgetExceededError, match=r"0\.48 are used") as spent_budget:
            await limiter.admit(caller, "m", 4000, AnswerSize(1000))
        assert spent_budget.value.status == 429
        assert 0 < int(spent_budget.value.headers()["retry-after"]) <= 86_400
        await reservation.settle(10, 10, 0.001)
        await limiter.admit(caller, "m", 1000, AnswerSize(1000))
        with pytest.raises(PermissionDeniedError, match="has no price"):
            await limiter.admit(caller, "unknown", 1, AnswerSize(1))
        await limiter.admit(principal(), "unknown", 1, AnswerSize(1))

    with_limiter(work)


def test_gateways_that_name_the_ledger_by_link_and_by_path_share_the_limits(tmp_path: Path) -> None:
    async def work() -> None:
        link, caller = tmp_path / "links" / "usage", principal(max_concurrency=1)
        link.parent.mkdir()
        link.symlink_to(tmp_path / "usage")
        by_path, by_link = (open_accounting(AccountingOptions(str(path))) for path in (tmp_path / "usage", link))
        reservation = await by_path.limiter.enter(caller)
        with pytest.raises(LimitError):
            await by_link.limiter.enter(caller)
        await reservation.settle(0, 0, None)
        assert [*link.parent.iterdir()] == [link]
        for accounting in (by_path, by_link):
            await accounting.close()
            accounting.ledger.close()

    asyncio.run(work())


def test_a_request_takes_the_store_three_times(
    with_limiter: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it enters, with its whole answer, and at its end. Without limits it takes the store never."""

    async def work(limiter: Limiter) -> None:
        calls: list[str] = []
        store = limiter.store

        def counted(name: str, call: Any) -> Any:
            calls.append(name)
            return call

        monkeypatch.setattr(store, "admit", lambda *given, call=store.admit: counted("admit", call(*given)))
        monkeypatch.setattr(store, "settle", lambda *given, call=store.settle: counted("settle", call(*given)))
        caller = principal(requests_per_minute=60, tokens_per_minute=6000, max_concurrency=9, usd_per_day=50.0)
        await limiter.admit(caller, "m", 1, AnswerSize(1))  # seeds the budget
        calls.clear()
        for limits in (caller, principal()):
            reservation = await limiter.admit(limits, "m", 1, AnswerSize(1), await limiter.enter(limits))
            await reservation.settle(1, 1, 0.001)
        assert calls == ["admit", "admit", "settle"]

    with_limiter(work)


def test_the_policy_file(tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(
        '[tenants.acme]\nrequests_per_minute = 5\n\n[models."a/b"]\nusd_per_day = 2.5\n[weights]\nacme = 3\n'
    )
    limits = read_limits_file(file)
    assert limits.tenants == {"acme": Limits(requests_per_minute=5)}
    assert limits.models == {"a/b": Limits(usd_per_day=2.5)}
    assert limits.weights == {"acme": 3}
    file.write_text("[tenants.acme]\n[tenants.globex]\nmax_concurrency = 0\n")
    with pytest.raises(ConfigurationError, match=r"`tenants\.globex\.max_concurrency` must be at least 1"):
        read_limits_file(file)
    for wrong in (
        "[tenants.acme]\nrequests = 5\n",
        "[tenant.acme]\n",
        "[tenants.acme]\nmax_concurrency = 0\n",
        "[weights]\nacme = 0\n",
        '[tenants."a b"]\nmax_concurrency = 1\n',  # no tenant can have this name
        '[weights]\n"a b" = 1\n',
        "[",
    ):
        file.write_text(wrong)
        with pytest.raises(ConfigurationError, match=r"limits\.toml"):
            read_limits_file(file)
    file.write_text("[tenants.acme]\nconcurrent = 5\n")
    with pytest.raises(ConfigurationError, match=r"concurrent` is now `max_concurrency`"):
        read_limits_file(file)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0ms"), (0.0161, "17ms"), (1, "1s"), (59.2, "1m0s"), (360, "6m0s"), (3600, "1h0m0s"), (86_399, "23h59m59s")],
)
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def decode_size(body: bytes) -> RequestSize:
    """Of a request for a model, with the fields of `body`."""
    return size_of(body, _peek(b'{"model": "m", ' + body[1:]))


@pytest.mark.parametrize("name", [*LENGTHENING, *NESTED])
def test_every_field_that_lengthens_answers_is_counted(name: str) -> None:
    given = {"maxTokens": 900} if name in NESTED else 900
    assert decode_size(json.dumps({"max_tokens": 500, name: given}).encode()).answer == AnswerSize(900)


@pytest.mark.parametrize("name", MULTIPLYING)
def test_every_field_that_multiplies_answers_is_counted(name: str) -> None:
    assert decode_size(json.dumps({"max_tokens": 500, name: 4}).encode()).answer == AnswerSize(500, 4)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 129}, "n"),
        ({"best_of": 10**9}, "best_of"),
        ({"messages": [{}] * 10_001}, "messages"),
        ({"tools": ["x" * 2**20]}, "tools"),
        ({"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "logit_bias"),
        ({"top_logprobs": 10**9, "logprobs": True}, "top_logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 1e9}, "prompt_logprobs"),
        ({"prompt": ["x"] * 129}, "prompt"),
        ({"prompt": ["x", *[[1]] * 128]}, "prompt"),
        ({"prompt": [[1, 2]] * 65, "n": 2}, "prompt"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": [[1]] * 2049}, "input"),
        ({"input": [{"role": "user", "content": "x"}] * 10_001}, "input"),
        ({"documents": ["x"] * 10_001}, "documents"),
        ({"texts": ["x"] * 10_001}, "texts"),
        ({"stop": ["x" * 100] * 11_000}, "stop"),
        ({"guided_grammar": "x" * 2**20}, "guided_grammar"),
    ],
)
def test_numbers_that_no_request_may_pass(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        decode_size(json.dumps(fields).encode())
    assert (refused.value.param, refused.value.status) == (param, 400)


@pytest.mark.parametrize("item", [b'""', b"{}", b"[1]", b'"\\\\"'])
@pytest.mark.parametrize("name", ["prompt", "messages", "input", "documents"])
def test_lists_longer_than_anybody_sends_are_not_decoded(name: str, item: bytes) -> None:
    with pytest.raises(RequestTooLargeError, match="send fewer"):
        decode_size(b'{"%s": [%s]}' % (name.encode(), b",".join([item] * 1_000_000)))


@pytest.mark.parametrize("body", [b'{"guided_json": "\\ud800"}', b'{"structured_outputs": {"json": "\\ud800"}}'])
def test_schemas_in_texts_that_are_no_json(body: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate pair"):
        decode_size(body)
    assert decode_size(b'{"structured_outputs": null, "guided_json": 5}')  # the node refuses what it does not know


@pytest.mark.parametrize(
    "fields",
    [
        {"top_logprobs": 20, "logprobs": True},
        {"logprobs": 5.0},
        {"prompt": ["x, [{"] * 64, "n": 2},
        {"input": [1, 2, 3] * 100_000},
        {"input": ["a, b, c, [d]"] * 2048},
        {"input": [{"role": "user", "content": "a, [b], {c}"}] * 10_000},
        {"documents": [{"text": "a, b"}] * 10_000, "text": "[" * 100},
    ],
)
def test_numbers_that_a_request_may_have(fields: dict[str, Any]) -> None:
    answers = decode_size(json.dumps(fields).encode()).answer.answers
    assert answers == len(fields.get("prompt", "x")) * fields.get("n", 1)


_SCHEMAS = (
    *("response_format", "tools", "functions", "text", "structured_outputs", "guided_json", "json_schema"),
    *("output_format", "output_config", "tool_choice"),
)


_TEXTS = ("guided_json", "json_schema", "structured_outputs")


@given(st.sampled_from(_SCHEMAS), st.integers(1, 60), st.text(alphabet='[{}]"\\', max_size=20), st.booleans())
def test_schemas_are_as_deep_as_their_brackets_outside_of_texts(
    field: str, depth: int, text: str, written: bool
) -> None:
    schema: Any = {"description": text}
    for _ in range(depth - 1):
        schema = {"items": schema}
    if written and field in _TEXTS:
        schema = json.dumps(schema)
        if field == "structured_outputs":
            schema = {"json": schema}
    body = json.dumps({field: schema}).encode()
    if depth <= 32:
        decode_size(body)
    else:
        with pytest.raises(InvalidRequestError, match=f"{field} is nested"):
            decode_size(body)


def test_sizes() -> None:
    size = decode_size(json.dumps({"n": 3, "max_tokens": 50, "prompt": "x" * 3000}).encode())
    assert size.answer == AnswerSize(50, 3)
    assert 3000 <= size.prompt_tokens < 3050
    two = decode_size(json.dumps({"prompt": ["a", "b"], "n": 3, "max_completion_tokens": 1, "max_tokens": 50}).encode())
    assert two.answer == AnswerSize(50, 6), "whichever limit the node reads"
    assert decode_size(b'{"prompt": [[1, 2], [3], [4]], "n": 2}').answer.answers == 6
    assert decode_size(b'{"prompt": [1, 2, 3]}').answer.answers == 1
    assert decode_size(json.dumps({"prompt": ['"[\\', "b"]}).encode()).answer.answers == 2
    for prompt, embeds, answers in (
        ("", ["QQ=="] * 8, 8),
        (None, "QQ==", 1),
        (["a", "b"], ["QQ=="] * 3, 5),
        ("a", [], 1),
    ):
        fields = {"prompt": prompt, "prompt_embeds": embeds}
        assert decode_size(json.dumps(fields).encode()).answer.answers == answers
    with pytest.raises(InvalidRequestError, match="prompt: got 129 answers"):
        decode_size(json.dumps({"prompt_embeds": ["QQ=="] * 129}).encode())
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * 100_000}}
    size = decode_size(json.dumps({"messages": [{"role": "user", "content": [image]}]}).encode())
    assert size.answer.limit is None
    assert 1500 <= size.prompt_tokens < 1600


@given(st.text(st.characters(codec="utf-8"), max_size=200), st.booleans())
def test_a_text_never_has_more_tokens_than_reckoned(text: str, escaped: bool) -> None:
    body = json.dumps({"prompt": text}, ensure_ascii=escaped).encode()
    reckoned = decode_size(body).prompt_tokens
    assert len(text.encode()) <= reckoned <= 6 * len(text) + 20, "a token is a byte at least"
