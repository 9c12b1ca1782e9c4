"""The store of answers: whose they are, how they are listed, and when they are gone."""

from __future__ import annotations

import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from updraft.accounting.budget import DAY_S
from updraft.protocol.errors import ConfigurationError, NotFoundError
from updraft.router.storage.answer_store import AnswerStore, Page, StoredAnswer

CHAT = "chat.completion"


def answer(number: int, *, owner: str = "me", created: float | None = None, **fields: Any) -> StoredAnswer:
    created = time.time() if created is None else created
    given = {"model": "m", "metadata": {}, "body": {"text": f"secret {number}"}, "input": [], **fields}
    return StoredAnswer(owner=owner, kind=CHAT, id=f"id-{number}", created=created, **given)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., AnswerStore]]:
    stores: list[AnswerStore] = []

    def open_store(days: int = 30, most: int = 100) -> AnswerStore:
        stores.append(AnswerStore(tmp_path / "answers.sqlite3", days=days, most=most))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


def test_pages_go_through_all_in_either_order(opened: Callable[..., AnswerStore]) -> None:
    store = opened()
    for number in range(7):
        store.put(answer(number, model=f"m{number % 2}", metadata={"odd": str(number % 2)}))
    store.put(answer(3, owner="other"))
    for newest_first in (False, True):
        ids: list[str] = []
        after, more = None, True
        while more:
            page, more = store.page("me", CHAT, Page(3, after, newest_first))
            ids += [each.id for each in page]
            after = ids[-1]
        expected = [f"id-{number}" for number in range(7)]
        assert ids == (expected[::-1] if newest_first else expected)
    odd = [f"id-{number}" for number in (1, 3, 5)]
    assert [each.id for each in store.page("me", CHAT, Page(), model="m1")[0]] == odd
    assert [each.id for each in store.page("me", CHAT, Page(), metadata={"odd": "1"})[0]] == odd
    with pytest.raises(NotFoundError):
        store.page("me", CHAT, Page(after="id-9"))


def test_another_owner_can_do_nothing_with_it(opened: Callable[..., AnswerStore]) -> None:
    store = opened()
    store.put(answer(1))

    def labelled(owner: str, kind: Any, answer_id: str) -> StoredAnswer:
        return store.change(owner, kind, answer_id, lambda each: each.with_metadata({"a": "b"}))

    for attempt in (store.get, store.delete, labelled):
        with pytest.raises(NotFoundError):
            attempt("other", CHAT, "id-1")
    assert store.get("me", CHAT, "id-1").body == {"text": "secret 1"}
    assert labelled("me", CHAT, "id-1").metadata == {"a": "b"}
    assert opened().get("me", CHAT, "id-1").body["metadata"] == {"a": "b"}


def test_old_ones_and_too_many_are_gone(opened: Callable[..., AnswerStore]) -> None:
    store = opened(days=2, most=3)
    store.put(answer(0, created=time.time() - 2 * DAY_S - 1))
    with pytest.raises(NotFoundError):
        store.get("me", CHAT, "id-0")
    for number in range(1, 6):
        store.put(answer(number))
    assert [each.id for each in store.page("me", CHAT, Page())[0]] == ["id-3", "id-4", "id-5"]
    assert [each.id for each in opened(most=1).page("me", CHAT, Page())[0]] == ["id-5"]


def test_items_are_found_in_any_response(opened: Callable[..., AnswerStore]) -> None:
    store = opened()
    for number in range(45):
        body = {"output": [{"id": f"out-{number}"}]}
        store.put(replace(answer(number, body=body, input=[{"id": f"in-{number}"}]), kind="response"))
    wanted = {"out-0", "in-44", "in-20"}
    items, is_private = store.items("me", wanted)
    assert (set(items), is_private) == (wanted, False)
    for owner, item_id in (("me", "in-45"), ("other", "in-1")):
        with pytest.raises(NotFoundError, match=item_id):
            store.items(owner, {"in-44", item_id} if owner == "me" else {item_id})


def test_the_file_is_the_users_alone_and_forgets(tmp_path: Path, opened: Callable[..., AnswerStore]) -> None:
    store = opened()
    store.put(answer(1))
    path = tmp_path / "answers.sqlite3"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    store.delete("me", CHAT, "id-1")
    store.close()
    assert b"secret 1" not in path.read_bytes()


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite3"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE things (id)")
    connection.close()
    with pytest.raises(ConfigurationError, match="Choose another file"):
        AnswerStore(other, days=1, most=1)
    (tmp_path / "text").write_text("no database" * 100)
    with pytest.raises(ConfigurationError, match="as the store of answers"):
        AnswerStore(tmp_path / "text", days=1, most=1)
