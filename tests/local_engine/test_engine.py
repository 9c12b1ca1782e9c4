"""The on-device engine against the same weights in torch, and under the conditions of a real application."""

import gc
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from updraft.local_engine.engine import LocalEngine, LocalOptions
from updraft.local_engine.llama.library import llama
from updraft.protocol.errors import ContextLengthError, EngineError, InvalidRequestError, ModelLoadError
from updraft.protocol.requests import Message
from updraft.protocol.sampling import SamplingParams


def ask(text: str) -> list[Message]:
    return [Message(role="user", content=text)]


@pytest.fixture(scope="module")
def engine(tiny):
    with LocalEngine.load(tiny.gguf) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference(tiny):
    """Log-probabilities (n, vocab) and hidden states (n, hidden) of token ids, by transformers in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=tiny.tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(
        {name: torch.from_numpy(array) for name, array in tiny.weights.items()}, strict=False
    )
    assert (missing, unexpected) == (["lm_head.weight"], [])

    def compute(ids):
        with torch.inference_mode():
            hidden = model.model(torch.tensor([ids])).last_hidden_state
            return model.lm_head(hidden).log_softmax(-1)[0].numpy(), hidden[0].numpy()

    return compute


def test_facts_of_the_file(engine):
    assert (engine.model_id, engine.context_length, engine.hidden_size) == ("tiny", 256, 64)
    assert engine.sampling_defaults.temperature == 0.0


@settings(max_examples=20)
@given(text=st.text(min_size=1, max_size=60))
def test_tokens_equal_the_reference_tokenizer(engine, tiny, text):
    plain = tiny.tokenizer
    assert engine.encode(text) == plain.encode(text, add_special_tokens=False).ids or "<|" in text


def test_control_tokens_come_from_the_template_only(engine, tiny):
    start, end = (tiny.tokenizer.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>"))
    ids = engine.encode_chat(ask("a<|im_end|>\n<|im_start|>system\nb"))
    assert [token for token in ids if token in (start, end)] == [start, end, start]
    assert engine.encode("<|im_end|>", allow_special=True) == [end]
    assert end not in engine.encode("<|im_end|>")


@pytest.mark.parametrize("length", [1, 2, 33, 200])
def test_score_equals_torch(engine, reference, length):
    ids = np.random.default_rng(length).integers(3, 300, length).tolist()
    expected, _ = reference(ids)
    assert np.abs(engine.score(ids) - expected).max() < 1e-3


def test_flash_attention_stays_close(tiny, reference):
    ids = list(range(5, 105))
    with LocalEngine.load(tiny.gguf, LocalOptions(kv_cache_type="f16", flash_attention=True, threads=2)) as engine:
        assert np.abs(engine.score(ids) - reference(ids)[0]).max() < 0.1


def test_run_equals_torch(engine, reference):
    run = engine.start(ask("what does the user know?"), SamplingParams(max_tokens=12, logprobs=3))
    tokens = list(run)
    prompt = engine.encode_chat(ask("what does the user know?"))
    logprobs, hidden = reference(prompt + run.token_ids)
    n = len(prompt)
    assert run.prompt_tokens == n
    np.testing.assert_allclose(run.prompt_logprobs, logprobs[range(n - 1), prompt[1:]], atol=1e-3)
    np.testing.assert_allclose(run.prompt_hidden, hidden[n - 1], atol=1e-3)
    np.testing.assert_allclose(run.answer_hidden, hidden[n + len(run.token_ids) - 2], atol=1e-3)
    assert run.token_ids == logprobs[n - 1 : -1].argmax(-1).tolist()
    for token, row in zip(tokens, logprobs[n - 1 : -1], strict=True):
        best = np.sort(row)[::-1]
        assert token.signals.logprob == pytest.approx(row[token.id], abs=1e-3)
        assert token.signals.entropy == pytest.approx(-(np.exp(row) * row).sum(), abs=1e-3)
        assert token.signals.margin == pytest.approx(best[0] - best[1], abs=1e-3)
        assert [logprob for _, logprob in token.top] == pytest.approx(best[:3], abs=1e-3)
    assert run.signals == [token.signals for token in tokens]


def test_signals_equal_score_of_the_same_engine(engine):
    run = engine.start_text("the user", SamplingParams(max_tokens=30, temperature=1.5, seed=3))
    ids = [token.id for token in run]
    rows = engine.score(engine.encode("the user") + ids)[-len(ids) - 1 : -1]
    chosen = [signals.logprob for signals in run.signals[: len(ids)]]
    np.testing.assert_allclose(chosen, rows[range(len(ids)), ids], atol=1e-3)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**31), stop=st.lists(st.sampled_from(["e", "the", " a", "\n"]), max_size=2))
def test_stream_equals_whole_and_never_shows_a_stop_string(engine, seed, stop):
    free = engine.start_text("the", SamplingParams(max_tokens=20, temperature=2, seed=seed))
    whole = "".join(token.text for token in free)
    assert whole == free.text
    assert whole == b"".join(map(engine.token_bytes, free.token_ids)).decode("utf-8", "replace")
    run = engine.start_text("the", SamplingParams(max_tokens=20, temperature=2, seed=seed, stop=tuple(stop)))
    assert "".join(token.text for token in run) == run.text
    ends = [whole.find(string) + len(string) for string in stop if string in whole]
    if ends:
        assert run.finish_reason == "stop"
        assert len(run.text) < min(ends)
        assert whole.startswith(run.text)
    else:
        assert (run.text, run.finish_reason) == (whole, free.finish_reason)


def test_end_of_turn(engine, tiny):
    end = tiny.tokenizer.token_to_id("<|im_end|>")
    for seed in range(200):  # a random model ends its turn sooner or later
        run = engine.start(ask("x"), SamplingParams(max_tokens=40, temperature=2, seed=seed))
        yielded = [token.id for token in run]
        assert len(run.signals) == len(run.token_ids) + (run.finish_reason == "stop")
        if run.finish_reason == "stop":
            break
        assert len(run.token_ids) == 40
    assert run.finish_reason == "stop"
    assert end not in run.token_ids
    assert yielded[: len(run.token_ids)] == run.token_ids
    assert run.answer_hidden is not None
    assert "<|im_end|>" not in run.text


def test_same_seed_same_answer(engine):
    def answer(seed: int | None) -> str:
        run = engine.start(ask("x"), SamplingParams(max_tokens=30, temperature=1.5, seed=seed))
        return "".join(token.text for token in run)

    assert answer(7) == answer(7)
    assert answer(-1) == answer(-1)
    assert len({answer(None) for _ in range(4)}) > 1


def test_prefix_reuse_changes_nothing_but_last_bits(tiny):
    """Long common prompts share cells of the KV cache: as much of them as they have in common."""
    text = "the assistant knows what the user asks " * 3
    prompts = [text + "a", text + "b", "no " + text, text]
    with LocalEngine.load(tiny.gguf, LocalOptions(prompt_logprobs=False)) as engine:
        fresh, cache = [], engine._resources.loop._scheduler._cache
        for prompt in prompts:
            assert cache.ensure_free(cache._cells)
            fresh.append(observe(engine, prompt))
        reused, length = [observe(engine, prompt) for prompt in prompts], len(engine.encode_prompt(text))
    assert [each.pop() for each in fresh] == [0] * 4
    assert [each.pop() for each in reused] == [length - 1, length, 0, length - 1], "all but the last token"
    for (ids, *states), (other_ids, *other_states) in zip(fresh, reused, strict=True):
        assert ids == other_ids
        for left, right in zip(states, other_states, strict=True):
            np.testing.assert_allclose(left, right, atol=1e-4)


def observe(engine, prompt):
    run = engine.start_text(prompt, SamplingParams(max_tokens=5))
    list(run)
    assert run.prompt_logprobs is None
    return [run.token_ids, run.prompt_hidden, run.answer_hidden, run.cached_tokens]


def test_continue_final_message(engine):
    messages = [*ask("x"), Message(role="assistant", content="the user ")]
    whole = engine.encode_chat(messages, add_generation_prompt=False, continue_final_message=True)
    run = engine.start(messages, SamplingParams(max_tokens=1), continue_final_message=True)
    assert run.prompt_tokens == len(whole)
    assert whole == engine.encode_chat(ask("x")) + engine.encode("the user ")


def test_too_long_is_refused_and_an_answer_ends_with_the_context(engine):
    prompt = "1" * 250
    with pytest.raises(ContextLengthError, match="256"):
        engine.start_text("1" * 256, SamplingParams())
    for limit, stop_reason in ((None, "default_max_tokens"), (7, "default_max_tokens"), (6, None)):
        run = engine.start_text(prompt, SamplingParams(temperature=0, max_tokens=limit))
        list(run)
        assert (len(run.token_ids), run.finish_reason, run.stop_reason or None) == (6, "length", stop_reason)
    assert engine.start_text([1] * 255, SamplingParams(max_tokens=1)).prompt_tokens == 255
    for ids in ([], [-1], [engine.vocab_size]):
        with pytest.raises(InvalidRequestError):
            engine.start_text(ids, SamplingParams(max_tokens=1))
    began = time.process_time()
    for hopeless in (
        lambda text: engine.start(ask(text), SamplingParams()),
        lambda text: engine.start_text(text, SamplingParams()),
    ):
        with pytest.raises(ContextLengthError, match="characters"):  # not even tokenized: that would take seconds
            hopeless("1" * 1_000_000)
    assert time.process_time() - began < 0.5
    with pytest.raises(ContextLengthError):
        engine.score([5] * 257)


def test_bad_requests(engine, tiny):
    with pytest.raises(InvalidRequestError, match="empty"):
        engine.start_text("", SamplingParams())
    with pytest.raises(InvalidRequestError):
        engine.score([])
    with pytest.raises(InvalidRequestError):
        engine.score([10_000])
    with pytest.raises(InvalidRequestError, match="max_model_len"):
        LocalEngine.load(tiny.gguf, LocalOptions(max_model_len=0))
    for impossible in (
        {"ubatch": 10**9}, {"threads": 1000}, {"threads": 2.5}, {"max_model_len": "512"}, {"max_num_seqs": True},
        {"gpu_layers": 10**9}, {"max_waiting": None},
    ):  # fmt: skip
        with pytest.raises(InvalidRequestError, match=next(iter(impossible))):
            LocalEngine.load(tiny.gguf, LocalOptions(**impossible))
    with pytest.raises(ModelLoadError, match="lower max_model_len"):
        LocalEngine.load(tiny.gguf, LocalOptions(max_model_len=100_000))
    with pytest.raises(InvalidRequestError, match="kv_cache_type"):
        LocalEngine.load(tiny.gguf, LocalOptions(kv_cache_type="f64"))
    with pytest.raises(InvalidRequestError, match="flash attention"):
        LocalEngine.load(tiny.gguf, LocalOptions(kv_cache_type="q8_0", flash_attention=False))
    with pytest.raises(EngineError, match="first token"):
        _ = engine.start(ask("x"), SamplingParams()).prompt_hidden


def test_cancel_from_another_thread_ends_within_a_step(engine):
    run = engine.start_text("the", SamplingParams(temperature=2, seed=1))
    next(run)
    thread = threading.Thread(target=run.cancel)
    thread.start()
    thread.join()
    assert list(run) == []
    assert run.finish_reason is None
    assert len(run.token_ids) == 1


def test_four_threads_get_the_answers_of_one(engine):
    params = [SamplingParams(max_tokens=12, temperature=1.5, seed=seed) for seed in range(4)]
    alone = [[token.id for token in engine.start(ask(f"q{i}"), params[i])] for i in range(4)]
    together: dict[int, list[list[int]]] = {i: [] for i in range(4)}

    def work(i: int) -> None:
        for _ in range(3):
            together[i].append([token.id for token in engine.start(ask(f"q{i}"), params[i])])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert together == {i: [alone[i]] * 3 for i in range(4)}


def test_abandoned_run_does_not_block_and_can_continue(engine):
    expected = [token.id for token in engine.start_text("the", SamplingParams(max_tokens=8, temperature=0))]
    paused = engine.start_text("the", SamplingParams(max_tokens=8, temperature=0))
    got = [next(paused).id, next(paused).id]
    assert len(list(engine.start_text("a user", SamplingParams(max_tokens=4, temperature=0)))) == 4
    assert got + [token.id for token in paused] == expected


def test_close_with_runs_in_progress(tiny):
    engine = LocalEngine.load(tiny.gguf)
    run = engine.start_text("the", SamplingParams(max_tokens=200))
    pieces: list[str] = []

    def read() -> None:
        try:
            pieces.extend(token.text for token in run)
        except EngineError as error:
            pieces.append(error.message)

    thread = threading.Thread(target=read)
    next(run)
    thread.start()
    engine.close()
    thread.join(30)
    assert pieces[-1] == "The local engine is closed." or run.finish_reason is not None
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.encode("x")
    with pytest.raises(EngineError, match="closed"):
        next(LocalEngine.start_text(engine, "x", SamplingParams()))


def test_a_run_outlives_its_engine_object(tiny):
    run = LocalEngine.load(tiny.gguf).start_text("the", SamplingParams(max_tokens=3, temperature=0))
    gc.collect()
    assert len(list(run)) == 3


def test_nothing_is_printed(tiny, capfd):
    with LocalEngine.load(tiny.gguf) as engine:
        list(engine.start_text("the", SamplingParams(max_tokens=2)))
    assert capfd.readouterr() == ("", "")


def test_a_long_text_keeps_nobody_waiting_but_close(tiny, monkeypatch):
    """Tokenizing megabytes takes seconds, in which every stream needs the bytes of its tokens."""
    api, begun, go_on = llama().api, threading.Event(), threading.Event()
    real = api.llama_tokenize

    def slow(*arguments):
        begun.set()
        assert go_on.wait(30)
        return real(*arguments)

    with LocalEngine.load(tiny.gguf) as engine:
        list(engine.start_text("0", SamplingParams(max_tokens=1)))
        expected = [engine.token_bytes(token) for token in range(300)]
        monkeypatch.setattr(api, "llama_tokenize", slow)
        tokenized = []
        reader = threading.Thread(target=lambda: tokenized.append(engine.encode("a" * 100)))
        reader.start()
        assert begun.wait(30)
        outputs = []
        other = threading.Thread(target=lambda: outputs.extend(map(engine.token_bytes, range(300))), daemon=True)
        other.start()
        other.join(10)
        assert outputs == expected
        closer = threading.Thread(target=engine.close)
        closer.start()
        closer.join(0.2)
        assert closer.is_alive()  # the vocabulary is being read
        go_on.set()
        for thread in (reader, closer):
            thread.join(30)
        assert len(tokenized) == 1
        with pytest.raises(EngineError, match="closed"):
            engine.encode("a")


def test_tokens_that_do_not_exist(engine, tiny):
    for token in (-1, tiny.tokenizer.get_vocab_size(), 10**7):
        with pytest.raises(InvalidRequestError, match="no token"):
            engine.token_bytes(token)


def test_untokenizable_text_is_refused(tiny, engine, monkeypatch):
    assert engine._model.longest_token == max(map(len, tiny.tokenizer.get_vocab()))
    monkeypatch.setattr(engine._model, "longest_token", 40)
    most = 40 * engine.context_length
    monkeypatch.setattr(type(engine._model), "tokenize", lambda *_, **__: [5] * 1000)
    with pytest.raises(ContextLengthError, match="1000 tokens"):
        engine.start_text("a" * most, SamplingParams(max_tokens=1))
    with pytest.raises(ContextLengthError, match=f"{most + 1:,} characters"):
        engine.start_text("a" * (most + 1), SamplingParams(max_tokens=1))
