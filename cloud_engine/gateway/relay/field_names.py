"""Validation of a request's field names: no duplicates and no variant spellings, so that gateway and node agree.

Servers differ on whether the first or last duplicate counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

from ....accounting.token_estimate import LENGTH_FIELDS, NESTED, TEMPLATE_VARIABLES, THINKING, THINKING_BUDGETS
from ....protocol.errors import InvalidRequestError, UnsupportedFeatureError
from ....protocol.requests import ChatRequest, CompletionRequest
from ....protocol.safety.names import check_models, check_spelling
from .usage import UsageOptions

_NAME = re.compile(rb'\s*("(?:[^"\\]|\\.)*+")\s*:\s*', re.DOTALL)
_END = re.compile(rb"\s*([,}])")
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MAX_SHOWN = 100  # maximum characters of a field name in an error message
_TOP = frozenset((*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__))
#: Nested objects whose fields change the cost or the content of an answer, with names that have only one spelling.
_NESTED = {
    "stream_options": frozenset(UsageOptions.__struct_fields__),
    **dict.fromkeys(NESTED, _TOP.union(LENGTH_FIELDS, ("num_ctx", "num_keep"))),  # the latter are Ollama's
    **dict.fromkeys((*THINKING, TEMPLATE_VARIABLES), frozenset((*THINKING.values(), *THINKING_BUDGETS))),
}
_MAX_NESTED = 3  # maximum depth of `NESTED` objects in each other
#: Fields that the gateway itself reads or sets, so they must not be hidden in a `NESTED` object.
_TOP_ONLY = frozenset(("model", "stream", "stream_options", "background", "priority", "cache_salt"))
#: Fields for trusted proxies only: they make vLLM, SGLang or llama.cpp load code, connect to hosts, or share state.
_TRUSTED = re.compile(
    r"(kv|ec)_transfer_params|vllm_xargs|logits_processors|custom_logit_processor|bootstrap_(host|port|room)|rid|id_slot"
    r"|routed_dp_rank|disagg_prefill_dp_rank|data_parallel_rank|lora_(path|request)|session_params|ngram_corpus_id",
    re.IGNORECASE,  # some servers read names in any case
)
OFFICIAL = _TOP.union(_NESTED)


def checked_names(body: bytes, known: frozenset[str]) -> Iterable[str]:
    """Return the field names of a JSON object that msgspec has validated. `known`: names with only one valid spelling.

    Raises InvalidRequestError for a duplicate or misspelled name, UnsupportedFeatureError for a trusted proxy's field.
    """
    fields = _checked(body, known, "")
    _check_fields(fields, "", _MAX_NESTED)
    return fields


def _check_fields(fields: Mapping[str, msgspec.Raw], prefix: str, depth: int) -> None:
    """Check an object's names, and the objects in it that some servers read like the request's own fields."""
    if name := next(filter(_TRUSTED.fullmatch, fields), None):
        raise UnsupportedFeatureError(f"The field {name!r} is for a node's operator only: leave it out.", param=name)
    check_models(fields)
    for name in _NESTED.keys() & fields.keys():
        if not (value := bytes(fields[name])).startswith(b"{"):
            continue
        path = f"{prefix}{name}."
        nested = _checked(value, _NESTED[name], path)
        if name not in NESTED:
            continue
        if depth == 0:
            raise _refused(path[:-1], "send its fields at the top level of the request")
        if hidden := next(filter(_TOP_ONLY.__contains__, nested), None):
            raise _refused(path + hidden, "send the field at the top level of the request")
        _check_fields(nested, path, depth - 1)


def _checked(value: bytes, known: frozenset[str], prefix: str) -> dict[str, msgspec.Raw]:
    fields = _FIELDS.decode(value)
    check_spelling(fields, known, prefix)
    if len(msgspec.json.encode(fields)) != len(value) and _python_json(fields) != value:
        _check_once(value, fields, known, prefix)  # if the length is equal, re-encoding dropped no duplicate
    return fields


def _python_json(fields: dict[str, msgspec.Raw]) -> bytes:
    """Return the object in the formatting of Python's `json.dumps`."""
    return b"{%b}" % b", ".join([msgspec.json.encode(name) + b": " + bytes(raw) for name, raw in fields.items()])


def _check_once(value: bytes, fields: dict[str, msgspec.Raw], known: frozenset[str], prefix: str) -> None:
    """Refuse duplicate names in the JSON object `value`. `fields`: the decoded object."""
    at, seen = value.index(b"{") + 1, set[str]()
    while (written := _NAME.match(value, at)) is not None:
        name: str = msgspec.json.decode(written[1])
        if name in known and b"\\" in written[1]:
            raise _refused(prefix + name, "write the name without escapes")
        given = bytes(fields[name])
        end = _END.match(value, written.end() + len(given))
        if name in seen or not value.startswith(given, written.end()) or end is None:
            raise _refused(prefix + name, "send the field only once")
        seen.add(name)
        at = end.end()


def _refused(name: str, fault: str) -> InvalidRequestError:
    shown = name[:_MAX_SHOWN]
    return InvalidRequestError(f"The field {shown!r} is refused: {fault}.", param=shown, code="invalid_value")
