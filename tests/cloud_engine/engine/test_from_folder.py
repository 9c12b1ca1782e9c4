"""From two model folders on disk to text: what a node does at start-up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.cloud_engine.engine.worker.served_model import DraftWeights, ServedModel
from updraft.embedded import pocket
from updraft.protocol.errors import ConfigurationError, ModelLoadError
from updraft.protocol.requests import Message
from updraft.protocol.sampling import SamplingParams


def write_folder(folder: Path, *, layers: int, vocabulary: int = 258) -> Path:
    """A random Llama with a byte-level tokenizer whose token 257 ends an answer."""
    torch.manual_seed(layers)
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=2,
            max_position_embeddings=64,
        )
    ).save_pretrained(folder)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False, "eos_token_id": 257}))
    return folder


def test_target_draft_tokenizer_and_defaults_come_from_the_folders(tmp_path: Path) -> None:
    large, small = write_folder(tmp_path / "large", layers=2), write_folder(tmp_path / "small", layers=1)
    texts: list[list[int]] = []
    for draft in (None, small):
        engine = Engine.from_folder(large, draft=draft, config=EngineConfig(draft_length="fixed"))
        assert (engine.model_id, engine.context_length, engine.sampling.temperature) == ("large", 64, 0.0)
        assert engine.tokenizer.eos_ids == {257}
        prompt = engine.tokenizer.encode("hello")
        engine.add_request(GenerationRequest("a", prompt, SamplingParams(max_tokens=20)))
        tokens: list[int] = []
        while engine.has_work:
            for output in engine.step():
                tokens += output.token_ids
        assert (engine.stats().draft_proposed > 0) == (draft is not None)
        texts.append(tokens)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("dtype", ["auto", "float16", "bfloat16"])
def test_weights_are_converted_and_a_draft_follows_its_target(tmp_path: Path, dtype: Any) -> None:
    large, small = write_folder(tmp_path / "large", layers=2), write_folder(tmp_path / "small", layers=1)
    config = EngineConfig(dtype=dtype, draft_length="fixed")
    target = ServedModel.from_folder(large, config).weights
    draft = DraftWeights.from_path(small, target).weights
    used = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    assert target.embed_tokens.weight.dtype == draft.embed_tokens.weight.dtype == used
    engine = Engine.from_folder(large, draft=small, config=config)
    engine.add_request(GenerationRequest("a", engine.tokenizer.encode("hello"), SamplingParams(max_tokens=20)))
    tokens: list[int] = []
    while engine.has_work:
        for output in engine.step():
            tokens += output.token_ids
    assert tokens and engine.stats().draft_proposed > 0


def test_a_draft_may_be_padded_differently_but_not_speak_another_language(tmp_path: Path) -> None:
    large, small = (
        write_folder(tmp_path / "large", layers=2),
        write_folder(tmp_path / "small", layers=1, vocabulary=320),
    )
    assert Engine.from_folder(large, draft=small, config=EngineConfig())
    definition = json.loads((small / "tokenizer.json").read_text())
    words = definition["model"]["vocab"]
    words["A"], words["B"] = words["B"], words["A"]
    (small / "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises(ConfigurationError, match=r"2 of 258 tokens differ.*with the target's tokenizer"):
        Engine.from_folder(large, draft=small, config=EngineConfig())
    (small / "tokenizer.json").unlink()
    with pytest.raises(ConfigurationError, match="draft model has 320 tokens, the target model 258"):
        Engine.from_folder(large, draft=small, config=EngineConfig())


def test_a_prediction_of_a_foreign_model_is_text_and_verified_all_the_same(tmp_path: Path) -> None:
    """Its own tokens do not matter: the text is tokenized anew."""
    engine = Engine.from_folder(write_folder(tmp_path / "large", layers=2), config=EngineConfig(threads=1))
    params = SamplingParams(max_tokens=12, logit_bias=tuple((token, -100.0) for token in range(94, 258)))

    def answer(predicted: list[int]) -> tuple[list[int], int]:
        engine.add_request(GenerationRequest("a", engine.tokenizer.encode("hello"), params, predicted))
        tokens: list[int] = []
        while True:
            (output,) = engine.step()
            tokens += output.token_ids
            if output.stats is not None:
                return tokens, output.stats.accepted_prediction_tokens

    tokens, _ = answer([])
    text = engine.tokenizer.decode(tokens)
    assert answer(engine.tokenizer.encode(text)) == (tokens, 12)


def test_a_gguf_file_drafts_for_a_folder_of_the_same_tokenizer() -> None:
    config = EngineConfig(draft_length="fixed")
    engine = Engine.from_folder(pocket.pocket_large_folder(), draft=pocket.pocket_small_gguf(), config=config)
    prompt = engine.tokenizer.encode_chat([Message(role="user", content="What is 347 + 586?")])
    engine.add_request(GenerationRequest("a", prompt, SamplingParams(max_tokens=40)))
    while engine.has_work:
        engine.step()
    assert engine.stats().draft_accepted > 0


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="the tokenizer that belongs to the model"):
        Engine.from_folder(write_folder(tmp_path / "m", layers=1, vocabulary=100), config=EngineConfig())


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", layers=1)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        Engine.from_folder(folder, config=EngineConfig())


def test_an_engine_without_a_tokenizer_says_so(make_engine) -> None:
    with pytest.raises(ConfigurationError, match="no tokenizer"):
        _ = make_engine().tokenizer
