"""Default classes of frameworks for Ollama, against the daemon's `/api` endpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from interop_cloud import MODEL, TEXT

HELLO: Any = [{"role": "user", "content": "Hello"}]
MODELS = pytest.mark.parametrize("model", ["auto", "cloud", MODEL])


@pytest.fixture
def ollama_url(daemon: str) -> str:
    return daemon.removesuffix("/v1")


def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


@MODELS
def test_llama_index(ollama_url: str, model: str) -> None:
    pytest.importorskip("llama_index.llms.ollama")
    from llama_index.core.tools import FunctionTool
    from llama_index.embeddings.ollama import OllamaEmbedding
    from llama_index.llms.ollama import Ollama

    llm = Ollama(model=model, base_url=ollama_url)
    assert llm.complete("Hello").text == TEXT
    assert "".join(part.delta or "" for part in llm.stream_complete("Hello")) == TEXT
    answer = llm.chat_with_tools([FunctionTool.from_defaults(weather)], user_msg="How is 'Oslo'?")
    [call] = llm.get_tool_calls_from_response(answer)
    assert (call.tool_name, call.tool_kwargs) == ("weather", {"city": "Oslo"})
    for thinking in (True, False, "low"):
        assert Ollama(model=model, base_url=ollama_url, thinking=thinking).complete("Hello").text == TEXT
    embedding = OllamaEmbedding(model_name=model, base_url=ollama_url)
    assert embedding.get_text_embedding_batch(["Hello", "Hi"]) == [[5.0, 1.0], [2.0, 1.0]]


@MODELS
def test_langchain(ollama_url: str, model: str) -> None:
    pytest.importorskip("langchain_ollama")
    from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
    from pydantic import BaseModel

    class City(BaseModel):
        name: str

    chat = ChatOllama(model=model, base_url=ollama_url, validate_model_on_init=True)
    assert chat.invoke("Hello").content == "".join(str(part.content) for part in chat.stream("Hello")) == TEXT
    called = [each for part in chat.bind_tools([weather]).stream("How is 'Oslo'?") for each in part.tool_calls]
    assert [(each["name"], each["args"]) for each in called] == [("weather", {"city": "Oslo"})]
    for method in ("json_schema", "function_calling"):
        assert chat.with_structured_output(City, method=method).invoke("It is 'Oslo'.") == City(name="Oslo")
    many = {"num_ctx": 2048, "mirostat": 0, "repeat_last_n": 3, "num_gpu": 1, "num_thread": 2, "top_k": 4, "tfs_z": 1.0}
    for reasoning in (True, False, "low"):
        told = ChatOllama(model=model, base_url=ollama_url, reasoning=reasoning, keep_alive=5, seed=1, **many)
        assert told.invoke("Hello").content == TEXT
    assert OllamaLLM(model=model, base_url=ollama_url, num_ctx=100).invoke("Hello") == TEXT
    embeddings = OllamaEmbeddings(model=model, base_url=ollama_url, num_ctx=100)
    assert embeddings.embed_documents(["Hello"]) == [[5.0, 1.0]]


@MODELS
@pytest.mark.parametrize("provider", ["ollama", "ollama_chat"])
def test_litellm(ollama_url: str, provider: str, model: str) -> None:
    litellm = pytest.importorskip("litellm")
    named = {"model": f"{provider}/{model}", "api_base": ollama_url}
    assert litellm.completion(messages=HELLO, num_ctx=100, max_tokens=9, **named).choices[0].message.content == TEXT
    parts = litellm.completion(messages=HELLO, stream=True, **named)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == TEXT
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    if provider == "ollama_chat":  # the other describes tools in the prompt
        called = litellm.completion(messages=HELLO, tools=[tool], **named).choices[0].message.tool_calls
        assert [each.function.name for each in called] == ["weather"]
    assert litellm.get_model_info(f"{provider}/{model}", api_base=ollama_url)["supports_function_calling"]
    reply = litellm.embedding(model=f"ollama/{model}", input=["Hello"], api_base=ollama_url, truncate=True, num_ctx=5)
    assert reply.data[0]["embedding"] == [5.0, 1.0]


def test_llm(ollama_url: str, tmp_path: Path) -> None:
    pytest.importorskip("llm_ollama")
    env = {**os.environ, "OLLAMA_HOST": ollama_url, "LLM_USER_PATH": str(tmp_path)}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "llm", *arguments], env=env, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    listed = run("models")
    prefix = "ollama/" if "ollama/auto" in listed else ""  # older releases name models without it
    assert f"{prefix}{MODEL} (aliases: {prefix}cloud)" in listed
    for model in ("auto", "cloud", MODEL):
        assert run("-m", f"{prefix}{model}", "-o", "num_ctx", "100", "-o", "seed", "-1", "Hello") == TEXT
    assert f'"model": "{prefix}{MODEL}"' in run("logs", "-n", "1", "--json")
