"""A field that gateway and node may read differently is refused: in another case, given twice, or escaped."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

HI = '"messages": [{"role": "user", "content": "hi"}]'


def post(gateway: Any, body: str, path: str = "chat/completions") -> httpx.Response:
    headers = {**gateway.headers, "content-type": "application/json"}
    return httpx.post(f"{gateway.url}/v1/{path}", content=body.encode(), headers=headers, timeout=60)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ('"Model": "other"', "Model"),
        ('"MODEL": "echo"', "MODEL"),
        ('"Stream": true', "Stream"),
        ('"MAX_TOKENS": 1000000', "MAX_TOKENS"),
        ('"Max_Completion_Tokens": 5', "Max_Completion_Tokens"),
        ('"N": 100', "N"),
        ('"Messages": []', "Messages"),
        ('"\u017ftream": true', "\u017ftream"),  # the long s, which Go takes for an s
        ('"max_to\u212aens": 5', "max_to\u212aens"),  # the Kelvin sign
        ('"model": "echo"', "model"),
        ('"max_tokens": 1, "max_tokens": 12', "max_tokens"),
        ('"max_tokens": 12, "max_tokens": 1', "max_tokens"),
        ('"seed": 1,"top_p": 1 ,"seed": 1', "seed"),
        ('"unheard_of": 1, "unheard_of": 2', "unheard_of"),
        ('"\\u006dodel": "other"', "model"),
        ('"max\\u005ftokens": 5', "max_tokens"),
        ('"stream": true, "stream_options": {"Include_Usage": false}', "stream_options.Include_Usage"),
        ('"stream": true, "stream_options": {"include_usage": true, "include_usage": false}', "stream_options."),
        ('"Options": {"num_predict": 9}', "Options"),
        ('"options": {"num_predict": 9, "num_predict": 90000}', "options.num_predict"),
        ('"options": {"Num_Predict": 90000}', "options.Num_Predict"),
        ('"extra_body": {"model": "other"}', "extra_body.model"),
        ('"parameters": {"priority": -9}', "parameters.priority"),
        ('"sampling_params": {"max_new_tokens": 5, "max_new_tokens": 3000}', "sampling_params.max_new_tokens"),
        ('"extra_body": {"Max_Tokens": 3000}', "extra_body.Max_Tokens"),
        ('"extra_body": {"options": {"model": "other"}}', "extra_body.options.model"),
        ('"extra_body": {' * 9 + '"n": 5' + "}" * 9, "extra_body.extra_body"),
        ('"thinking": {"budget_tokens": 5, "budget_tokens": 3000}', "thinking.budget_tokens"),
    ],
)
@pytest.mark.parametrize("compact", [True, False])
def test_ambiguous_field_names_are_refused_by_name(gateway: Any, fields: str, param: str, compact: bool) -> None:
    for body in (f'{{"model": "echo", {HI}, {fields}}}', f'{{{fields}, "model": "echo", {HI}}}'):
        sent = body.replace(": ", ":").replace(", ", ",") if compact else body
        refused = post(gateway, sent)
        assert refused.status_code == 400, (sent, refused.text)
        error = refused.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"].startswith(param)
        assert param.rstrip(".") in error["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_transfer_params", {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 1}),
        ("vllm_xargs", {"a": 1}),
        ("bootstrap_host", "10.0.0.1"),
        ("custom_logit_processor", "code"),
        ("rid", "request-of-another"),
        ("lora_path", "/etc"),
        ("id_slot", 0),
        ("KV_transfer_params", {"do_remote_prefill": True}),
        ("\u212av_tran\u017ffer_params", {}),
        ("Bootstrap_Host", "10.0.0.1"),
    ],
)
def test_fields_for_trusted_callers_are_refused_by_name(gateway: Any, name: str, value: Any) -> None:
    field = f'"{name}": {json.dumps(value)}'
    for fields in (field, f'"extra_body": {{{field}}}', f'"sampling_params": {{{field}}}'):
        refused = post(gateway, f'{{"model": "echo", {HI}, {fields}}}')
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
        assert "operator only" in refused.json()["error"]["message"]


MODELS = ["echo", "expensive"]


@pytest.mark.parametrize(
    "name",
    [
        "models",
        "Models",
        "route",
        "fallbacks",
        "context_window_fallbacks",
        "model_list",
        "preset",
        "draft_model",
        "speculative_model",
        "speculative_config",
        "adapters",
        "adapter_id",
        "lora",
        "lora_name",
        "loras",
    ],
)
def test_fields_that_name_further_models_are_refused(gateway: Any, name: str) -> None:
    """A key may be limited to models, and a model has a price: a node must not answer with another model."""
    for fields in (f'"{name}": {json.dumps(MODELS)}', f'"extra_body": {{"{name}": {json.dumps(MODELS)}}}'):
        refused = post(gateway, f'{{"model": "echo", {HI}, {fields}}}')
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
        assert "further models" in refused.json()["error"]["message"]


def test_forms_that_name_further_models_are_refused(gateway: Any) -> None:
    form = {"model": "echo", "fallbacks": "expensive"}
    refused = httpx.post(
        f"{gateway.url}/v1/audio/transcriptions", data=form, files={"file": b"x"}, headers=gateway.headers, timeout=60
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "fallbacks")


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ('{"name": "a", "tenant": "free", "tenant": "paying"}', "tenant"),
        ('{"name": "a", "limits": {"usd_per_day": 1, "usd_per_day": 1000}}', "usd_per_day"),
        ('{"name": "a", "models": ["echo"], "models": []}', "models"),
    ],
)
def test_fields_of_a_new_key_are_given_once(gateway: Any, body: str, name: str) -> None:
    refused = httpx.post(f"{gateway.url}/admin/keys", content=body, headers=gateway.admin, timeout=60)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, name), refused.text
    assert "twice" in refused.json()["error"]["message"]


def test_a_new_key_without_any_model_is_refused(gateway: Any) -> None:
    """It could mean none or all."""
    body = {"name": "without-models", "models": []}
    refused = httpx.post(f"{gateway.url}/admin/keys", json=body, headers=gateway.admin, timeout=60)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "models"), refused.text


def test_half_of_a_surrogate_pair_is_named(gateway: Any) -> None:
    refused = post(gateway, f'{{"model": "echo\\ud83d", {HI}}}')
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    assert "surrogate pair" in refused.json()["error"]["message"]
    for fields in ('"\\ud83d": 1', '"metadata": {"a": "\\ud83d"}'):
        assert post(gateway, f'{{"model": "echo", {HI}, {fields}}}').status_code in (200, 400), fields


@pytest.mark.parametrize("indent", [None, 2])
def test_names_within_texts_and_tools_are_allowed(gateway: Any, indent: int | None) -> None:
    text = 'Say {"model": 1, "model": 2, "Stream": true} and \\ "'
    body = {
        "model": "echo",
        "messages": [{"role": "user", "content": text}],
        "Own-Field": {"Model": 1},
        "metadata": {"Model": "x", "model": "y"},
    }
    for sent in (json.dumps(body, indent=indent), f" \n{json.dumps(body, indent=indent)}\t"):
        answer = post(gateway, sent)
        assert answer.status_code != 400 or answer.json()["error"]["param"] not in ("model", "Model", "Stream")
        plain = {name: body[name] for name in ("model", "messages")}
        assert post(gateway, json.dumps(plain, indent=indent)).json()["choices"][0]["message"]["content"] == text


@pytest.mark.parametrize("names", [("Model",), ("model", "model"), ("model", "MODEL"), ("model", "Stream")])
def test_a_form_has_its_fields_once_and_in_one_spelling(gateway: Any, names: tuple[str, ...]) -> None:
    parts = "".join(f'--b\r\ncontent-disposition: form-data; name="{name}"\r\n\r\necho\r\n' for name in names)
    headers = {**gateway.headers, "content-type": "multipart/form-data; boundary=b"}
    url = f"{gateway.url}/v1/audio/transcriptions"
    refused = httpx.post(url, content=f"{parts}--b--\r\n".encode(), headers=headers, timeout=60)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] in ("model", "stream")
