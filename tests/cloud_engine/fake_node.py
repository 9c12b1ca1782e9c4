"""A node process with a scripted engine instead of a model: the real HTTP server, starting in a second.

It answers with the prompt's last user words, or what is missing of them, a token per `--delay` seconds; its embedding
of a text is the number of tokens in it. Words in the prompt make it misbehave:
`die-first` and `die-middle` kill the process before and after the first token, `break-middle` fails the engine,
`fail-first` and `fail-middle` fail the request alone. `read-slowly` delays the first token by two seconds.
While the file of `--hold` exists, every answer stops after three tokens: a test kills or stops its node there.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path

import tokenizers
from updraft.cloud_engine.engine.stats import EngineStats
from updraft.cloud_engine.engine.types.outputs import RequestStats, TokenLogprob, TokenOutput
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.cloud_engine.node.api import app as app_module
from updraft.cloud_engine.node.api.app import NodeEngine, create_node_app
from updraft.cloud_engine.node.registration import Registration, RegistrationOptions
from updraft.protocol.errors import ContextLengthError, EngineDownError, EngineError, RequestFailedError
from updraft.protocol.http.server import bind_socket, exit_with_parent, serve, url_of
from updraft.text.chat import ChatTemplate
from updraft.text.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 2000
HELD_AFTER = 3  # tokens


def byte_tokenizer() -> Tokenizer:
    """One token per byte, and ChatML's two."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[])
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    eos = library.token_to_id("<|im_end|>")
    return Tokenizer(library.to_str(), eos_ids=[eos], chat_template=ChatTemplate(CHATML, eos_token="<|im_end|>"))


class FakeEngine:
    """Echoes the last turn of the prompt."""

    def __init__(self, tokenizer: Tokenizer, delay: float, hold: Path | None) -> None:
        self.error: str | None = None
        self._tokenizer = tokenizer
        self._delay = delay
        self._hold = hold
        self._stats = EngineStats()

    @property
    def failure(self) -> EngineDownError | None:
        return EngineDownError(self.error) if self.error else None

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def stop_answer(self, request_id: str, index: int) -> None: ...

    def stats(self) -> EngineStats:
        return self._stats

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenOutput]:
        if self.failure:
            raise self.failure
        if request.embed:
            stats = RequestStats(len(request.prompt_ids), 0, 0, 0, 0, 0, 0)
            yield TokenOutput(
                request.request_id, [], finish_reason="stop", stats=stats, embedding=[float(len(request.prompt_ids))]
            )
            return
        if len(request.prompt_ids) > CONTEXT:
            raise ContextLengthError(f"The prompt has {len(request.prompt_ids)} tokens.", param="messages")
        prompt = self._tokenizer.decode(request.prompt_ids)
        asked, _, given = prompt.rpartition("user\n")[2].partition("\nassistant\n")
        begun = len(self._tokenizer.encode(given))
        answer_ids = self._tokenizer.encode(asked.strip())[begun:]
        limit = request.params.max_tokens or len(answer_ids)
        finish = "stop" if limit >= len(answer_ids) else "length"
        answer_ids = answer_ids[:limit]
        pairs = zip(answer_ids, request.draft_ids, strict=False)
        accepted = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        stats = RequestStats(
            len(request.prompt_ids), 0, len(answer_ids), accepted, len(request.draft_ids) - accepted, 0, 0
        )
        if not answer_ids:  # all that is said was given
            yield TokenOutput(request.request_id, [], finish_reason=finish, stats=stats)
            return
        self._stats.running += 1
        finished = False
        try:
            await asyncio.sleep(2 if "read-slowly" in prompt else 0)
            for position, token in enumerate(answer_ids):
                await asyncio.sleep(self._delay)
                while begun + position == HELD_AFTER and self._is_held():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                self._misbehave(prompt, begun + position)
                finished = position == len(answer_ids) - 1
                logprobs = [TokenLogprob(-0.5, ((token, -0.5), (65, -1.5)))] * (request.params.logprobs is not None)
                ending = (finish, stats) if finished else (None, None)
                yield TokenOutput(request.request_id, [token], logprobs, *ending)
        finally:
            self._stats.running -= 1
            self._stats.aborted_requests += not finished

    def _is_held(self) -> bool:
        return self._hold is not None and self._hold.exists()

    def _misbehave(self, prompt: str, position: int) -> None:
        if "die-first" in prompt or ("die-middle" in prompt and position == 5):
            os.kill(os.getpid(), signal.SIGKILL)
        if "fail-first" in prompt or ("fail-middle" in prompt and position == 5):
            raise RequestFailedError("the engine failed on this request")
        if "break-middle" in prompt and position == 5:
            self.error = "the cache caught fire"
            raise EngineError(self.error)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--heartbeat", type=float, default=app_module.HEARTBEAT_S)
    parser.add_argument("--hold", type=Path)
    parser.add_argument("--tool-call-parser", default="auto")
    parser.add_argument("--ready-file", type=Path)
    parser.add_argument("--register")
    parser.add_argument("--register-key", default="")
    options = parser.parse_args()
    exit_with_parent()
    app_module.HEARTBEAT_S = options.heartbeat
    tokenizer = byte_tokenizer()
    engine = NodeEngine(
        FakeEngine(tokenizer, options.delay, options.hold), tokenizer, "echo", CONTEXT, options.tool_call_parser
    )
    with bind_socket("127.0.0.1", options.port) as sock:
        registration = None
        if options.register:
            gateway = RegistrationOptions(options.register, options.register_key)
            registration = Registration(gateway, url_of(sock, "http"), 8)
        app = create_node_app(engine, registration=registration)
        serve(app, sock=sock, ready_file=options.ready_file)
