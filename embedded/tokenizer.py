"""Tokenizer of the pocket pair: byte-level BPE with single-digit splitting and ChatML, trained on the task stream.

`python -m updraft.embedded.tokenizer` trains a new tokenizer; both models must then be trained again.

The pre-tokenizer is the one that llama.cpp calls `smollm` (single digits, then the GPT-2 pattern), so that the device
and the cloud split every text into the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from .tasks import stream

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCAB_SIZE = 1024
TOKENIZER_FILE = Path(__file__).parent / "weights" / "tokenizer.json"
PAD, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% if not (loop.last and continue_final_message) %}{{ '<|im_end|>' + '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def load_tokenizer() -> Tokenizer:
    """Load the tokenizer of both models from its file. A newly trained tokenizer would have different token ids."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(TOKENIZER_FILE))


def train_tokenizer(tasks: int = 60_000, seed: int = 0) -> Tokenizer:
    """Train a new tokenizer of `VOCAB_SIZE` entries; special tokens get the ids 0 to 2.

    Each call gives a different tokenizer, because token pairs of equal count are merged in random order.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(tasks, seed), trainer)
    return tokenizer


def _texts(tasks: int, seed: int) -> Iterator[str]:
    yield "system\nuser\nassistant\n"
    for task in islice(stream("train", seed), tasks):
        yield task.prompt
        yield task.answer


def chat_text(prompt: str) -> str:
    """Return a one-turn conversation up to the start of the assistant's answer."""
    return f"{IM_START}user\n{prompt}{IM_END}\n{IM_START}assistant\n"


if __name__ == "__main__":
    train_tokenizer().save(str(TOKENIZER_FILE))
