"""The gateway in front of a real node: what no fake one can show."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Any

import openai
from gateway_keys import make_key
from tiny_model import write_model


def test_prefix_caches_of_keys_are_separate(spawn: Any, tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny", 0)
    node = spawn("-m", "updraft", "node", "--port", "0", "--model", str(model), "--threads", "1", "--exit-with-parent")
    keys = {name: make_key(tmp_path / "keys", name) for name in ("alice", "bob", "carol")}
    files = ("--keys", str(tmp_path / "keys"), "--ledger", str(tmp_path / "usage.sqlite"))
    gateway = spawn("-m", "updraft", "gateway", "--port", "0", "--node", node.url, *files, "--exit-with-parent")

    def cached(name: str, **options: Any) -> int:
        messages: list[Any] = [{"role": "user", "content": "A question of more than sixteen tokens, which is a block."}]
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=keys[name], max_retries=0, timeout=120) as client:
            answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1, **options)
        assert answer.usage and answer.usage.prompt_tokens_details
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert cached("alice") == 0
    assert cached("alice") > 16
    assert cached("bob") == 0
    assert cached("bob") > 16
    assert cached("bob", extra_body={"cache_salt": "of one of bob's users"}) == 0
    disguise = {"x-updraft-tenant": blake2b(b"alice", digest_size=16).hexdigest()}
    assert cached("carol", extra_headers=disguise) == 0
