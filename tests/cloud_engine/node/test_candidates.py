"""best_of, log-probabilities of the prompt and echo, by the real client from the real engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
import transformers
from updraft.embedded import pocket
from updraft.text.tokenizer import Tokenizer

torch.set_num_threads(1)
MODEL = "pocket-large"
PROMPT = "What is 34 + 57? Grüße"
QUESTION: list[Any] = [{"role": "user", "content": "How many days has March?"}]


@pytest.fixture(scope="module")
def client(spawned: Any) -> Iterator[openai.OpenAI]:
    folder = str(pocket.pocket_large_folder())
    start = ("-m", "updraft", "node", "--port", "0", "--model", folder, "--threads", "1", "--exit-with-parent")
    with spawned(*start) as node, openai.OpenAI(base_url=f"{node.url}/v1", api_key="-", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(pocket.pocket_large_folder())


@pytest.fixture(scope="module")
def prompt_ids(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode_prompt(PROMPT)


@pytest.fixture(scope="module")
def expected(prompt_ids: list[int]) -> torch.Tensor:
    """(tokens, vocabulary): log-probabilities of what follows each token of `PROMPT`, by transformers."""
    folder = pocket.pocket_large_folder()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([prompt_ids])).logits[0].log_softmax(-1)


def complete(client: openai.OpenAI, **options: Any) -> Any:
    """The model would end its answer at once; `ignore_eos` lets it go on."""
    more = {"prompt": PROMPT, "max_tokens": 8, "extra_body": {"ignore_eos": True}, **options}
    return client.completions.create(model=MODEL, **more)


def test_the_best_of_many_answers_are_those_with_the_highest_logprob_per_token(client: openai.OpenAI) -> None:
    def merit(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    for seed in range(4, 20):
        sampling: dict[str, Any] = {"temperature": 1.5, "seed": seed}
        everything = complete(client, n=6, logprobs=0, **sampling)
        best = sorted(everything.choices, key=merit, reverse=True)
        if best[0].index != 0:
            break
    else:
        pytest.fail("the first was the best with every seed: the test could not fail")
    chosen = complete(client, n=2, best_of=6, **sampling)
    assert [choice.text for choice in chosen.choices] == [choice.text for choice in best[:2]]
    assert [choice.index for choice in chosen.choices] == [0, 1]
    assert [choice.logprobs for choice in chosen.choices] == [None, None]
    assert chosen.usage.completion_tokens == everything.usage.completion_tokens > 16
    assert chosen.usage.prompt_tokens == everything.usage.prompt_tokens


def test_best_of_in_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=6, temperature=1.5, seed=1, extra_body={"best_of": 4}
    )
    assert len(answer.choices) == 1
    assert answer.usage and answer.usage.completion_tokens > 6


def test_prompt_logprobs(client, tokenizer, prompt_ids, expected) -> None:
    answer = complete(client, n=2, extra_body={"prompt_logprobs": 2})
    first, *rest = answer.choices[0].prompt_logprobs
    assert first is None
    assert answer.choices[1].prompt_logprobs == answer.choices[0].prompt_logprobs
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    for row, token, entry in zip(expected, prompt_ids[1:], rest, strict=False):
        own = entry[str(token)]
        assert own["logprob"] == pytest.approx(float(row[token]), abs=1e-4)
        assert own["rank"] == int((row > row[token]).sum()) + 1
        assert own["decoded_token"].encode() == tokenizer.token_bytes(token).decode("utf-8", "replace").encode()
        assert {int(token_id) for token_id in entry} == {token, *row.topk(2).indices.tolist()}
    assert len(rest) == len(prompt_ids) - 1


def test_prompt_logprobs_in_chat(client: openai.OpenAI) -> None:
    answer: Any = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=2, extra_body={"prompt_logprobs": 0}
    )
    assert answer.prompt_logprobs[0] is None
    assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens
    assert all(len(entry) == 1 for entry in answer.prompt_logprobs[1:])
    plain: Any = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=2)
    assert not hasattr(plain, "prompt_logprobs")


@pytest.mark.parametrize("n", [1, 3])
def test_echo_with_logprobs_covers_prompt_and_answer(client, prompt_ids, expected, n) -> None:
    plain = complete(client, temperature=0, logprobs=3)
    echoed = complete(client, temperature=0, logprobs=3, echo=True, n=n)
    for choice in echoed.choices:
        scores = choice.logprobs
        assert choice.text == PROMPT + plain.choices[0].text
        assert scores.token_logprobs[0] is None
        assert scores.top_logprobs[0] is None
        wanted = [float(row[token]) for row, token in zip(expected, prompt_ids[1:], strict=False)]
        assert scores.token_logprobs[1 : len(prompt_ids)] == pytest.approx(wanted, abs=1e-4)
        assert scores.tokens[len(prompt_ids) :] == plain.choices[0].logprobs.tokens
        assert scores.text_offset[0] == 0
        assert scores.text_offset[len(prompt_ids)] == len(PROMPT)
        assert scores.text_offset == sorted(scores.text_offset)
        assert not hasattr(choice, "prompt_logprobs")


def test_echo_of_the_best(client: openai.OpenAI) -> None:
    chosen = complete(client, n=1, best_of=5, echo=True, logprobs=0, temperature=1.5, seed=4)
    assert chosen.choices[0].text.startswith(PROMPT)
    assert chosen.choices[0].logprobs.token_logprobs[0] is None


def test_streamed_echo(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"temperature": 0, "echo": True, "logprobs": 1, "n": 2}
    whole = complete(client, **options)
    texts, tokens = ["", ""], [[], []]
    for chunk in complete(client, stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"best_of": 99}, "n"),
        ({"use_beam_search": True, "n": 2}, "use_beam_search"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
    ids=str,
)
def test_contradictory_options_are_refused(client: openai.OpenAI, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        list(client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4, stream=False, extra_body=options))
    assert caught.value.param == param
