"""msgspec builds each decoded type at import: two threads that build one type at its first use crash the process."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from import_graph import ROOT, imports_of, sources

_BUILT_LATE = """
import importlib, json, sys
import msgspec, msgspec._utils as utils

sites = [(importlib.import_module(module), kind) for module, kind in json.load(sys.stdin)]
built, real = set(), utils._get_class_mro_and_typevar_mappings

def recorded(kind):
    built.add(f"{kind.__module__}.{kind.__qualname__}")
    return real(kind)

utils._get_class_mro_and_typevar_mappings = recorded
class Late(msgspec.Struct):
    pass
msgspec.json.Decoder(Late)
for module, kind in sites:
    msgspec.json.Decoder(eval(kind, vars(module)))
print(json.dumps(sorted(built)))
"""
_FIRST_REQUESTS = """
import threading, time
import msgspec._utils as utils
from updraft.protocol.decoding import read_object
from updraft.protocol.requests import read_chat, read_completion

real = utils._get_class_mro_and_typevar_mappings
def slow(kind):
    time.sleep(0.02)  # long enough for other threads to use the half-built type
    return real(kind)
utils._get_class_mro_and_typevar_mappings = slow

chat = b'{"model": "m", "messages": [{"role": "user", "content": "a"}], "stream_options": {}, "stream": true}'
parsed = []
def ask(number):
    time.sleep(number * 0.004)
    text = read_object(b'{"model": "n", "prompt": "a"}')
    parsed.append((read_chat(read_object(chat)).model, read_completion(text).model))
threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(parsed == [("m", "n")] * 16)
"""


def test_no_type_is_built_at_first_use() -> None:
    sites = sorted({site for path in sources() for site in _decoded(path)})
    assert len(sites) > 40
    assert ("updraft.protocol.requests", "ChatRequest") in sites
    assert json.loads(_run(_BUILT_LATE, json.dumps(sites))) == ["__main__.Late"]


def test_threads_can_parse_the_first_requests_concurrently() -> None:
    assert _run(_FIRST_REQUESTS, "") == "True"


def _decoded(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (module, expression) for each type that a file decodes; the expression is evaluated in the module."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    module = ".".join(["updraft", *(part for part in parts if part != "__init__")])
    tree = ast.parse(path.read_text(encoding="utf-8"))
    local = {name.rpartition(".")[2]: name.rpartition(".")[0] for name in (each.target for each in imports_of(path))}
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or (kind := _kind_of(call)) is None:
            continue
        expression = ast.unparse(kind)
        if expression != "kind":  # a parameter of a helper: the calls of the helper name the type
            yield (f"updraft.{local[expression]}" if expression in local else module), expression


def _kind_of(call: ast.Call) -> ast.expr | None:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name == "decode" and (named := [each.value for each in call.keywords if each.arg == "type"]):
        return named[0]
    if name not in ("convert", "decode", "read") or len(call.args) != 2:
        return None
    kind = call.args[1]
    is_type = isinstance(kind, ast.Subscript) or (isinstance(kind, ast.Name) and kind.id.lstrip("_")[:1].isupper())
    return kind if is_type else None


def _run(script: str, given: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", script], input=given, capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
    return done.stdout.strip()
