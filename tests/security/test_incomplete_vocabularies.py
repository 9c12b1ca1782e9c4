"""No message ends the app, whatever its model's vocabulary lacks: a refusal, an error of that request, or an answer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp", reason="needs the [edge] extra")

from gguf_fuzz import STRING, File, Value, text
from gguf_texts import converse
from homes import home_in
from updraft.embedded.pocket import pocket_small_gguf
from updraft.local_engine.engine import LocalEngine
from updraft.local_engine.llama.library import LlamaModel, _pieces
from updraft.local_engine.llama.plain_text import missing_bytes
from updraft.model_files.gguf_reader import read_header
from updraft.protocol.errors import InvalidRequestError, ModelLoadError
from vocabularies import bpe, put, rwkv, spm, with_holes, without

VOCABULARIES = Path(__file__).resolve().parents[3] / "shared" / "data" / "tokenizers"
SOUND = pocket_small_gguf().read_bytes()
APP = """
import sys
import updraft
try:
    client = updraft.OpenAI(local=sys.argv[1])
    client.chat.completions.create(model="local", messages=[{"role": "user", "content": chr(0x41151)}], max_tokens=3)
except updraft.OpenAIError as error:
    print(type(error).__name__, error)
print("the app lives")
"""


def written(folder: Path, content: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(content)
    return path


def pre_tokenizer(name: str) -> bytes:
    file = bpe(SOUND)
    put(file, "pre", Value(STRING, text(name.encode())))
    return file.build()


def test_an_app_outlives_a_file_without_one_byte_token(tmp_path: Path) -> None:
    path = written(tmp_path, spm(SOUND, without(b"<0xF1>")).build())
    home = str(home_in(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", APP.replace("updraft.OpenAIError", "Exception"), str(path)],
        env={"UPDRAFT_HOME": home, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "has no token for the byte 0xF1, and its tokenizer needs all 256" in done.stdout
    assert "the app lives" in done.stdout


@pytest.mark.parametrize("byte", range(256))
def test_each_byte_token_is_needed(tmp_path: Path, byte: int) -> None:
    path = written(tmp_path, spm(SOUND, without(b"<0x%02X>" % byte)).build())
    if 32 < byte < 127:  # the character itself is a token
        assert missing_bytes(path, read_header(path)) == frozenset()
        return
    with pytest.raises(ModelLoadError, match=f"no token for the byte 0x{byte:02X}"):
        LocalEngine.load(path)


@pytest.mark.parametrize("name", [b"\\x00", b"\\n", b"\\\\", b"\\xf1", b"t"])
def test_rwkv_never_returns_without_a_byte(tmp_path: Path, name: bytes) -> None:
    whole = written(tmp_path, rwkv(SOUND).build())
    assert missing_bytes(whole, read_header(whole)) == frozenset()
    path = written(tmp_path, rwkv(SOUND, without(name)).build())
    with pytest.raises(ModelLoadError, match="its tokenizer needs all 256"):
        LocalEngine.load(path)


@pytest.mark.parametrize("model", ["bert", "t5"])
def test_tokenizers_of_encoders(tmp_path: Path, model: str) -> None:
    file = spm(SOUND)
    put(file, "model", Value(STRING, text(model.encode())))
    with pytest.raises(ModelLoadError, match="has the tokenizer of an encoder"):
        LocalEngine.load(written(tmp_path, file.build()))


def test_a_character_that_would_be_lost_is_an_error_of_the_request(tmp_path: Path) -> None:
    """A byte-level vocabulary drops the bytes that it lacks, and the model would answer another question."""
    path = written(tmp_path, bpe(SOUND, without("Ń".encode(), "Ê".encode(), "Ċ".encode())).build())  # 0xAD 0xCA "\n"
    assert missing_bytes(path, read_header(path)) == {0x0A, 0xAD, 0xCA}
    with LocalEngine.load(path) as engine:
        assert engine.encode("a")
        for lost in ("ʁ", "\n"):
            with pytest.raises(InvalidRequestError, match=f"no token for U\\+{ord(lost):04X}"):
                engine.encode(f"a{lost}")
        assert engine.encode("a\x03", allow_special=False)


def test_unassigned_characters_are_dropped_as_by_the_models_own_tokenizer(tmp_path: Path) -> None:
    path = written(tmp_path, bpe(SOUND, without("ñ".encode(), "Ą".encode())).build())  # 0xF1, 0x04 as in SmolLM2
    with LocalEngine.load(path) as engine:
        assert engine.encode("a\x04") == engine.encode("a")
        assert engine.encode(chr(0x41151))


def test_long_words_do_not_overflow_the_stack(tmp_path: Path) -> None:
    """Each pre-tokenizer of llama.cpp that splits with std::regex crashed at some 30,000 characters of a kind."""
    paths = [tmp_path / f"{name}.gguf" for name in ("deepseek-coder", "falcon", "gpt-4o", "exaone-moe")]
    for path in paths:
        path.write_bytes(pre_tokenizer(path.stem))
    assert converse(paths, examples=1, longest=40_000) == [""] * len(paths)


def test_pieces_of_long_texts_have_the_tokens_of_the_whole() -> None:
    model = LlamaModel(pocket_small_gguf())
    try:
        text = "".join(f"What is {n} * {n + 7}? It's 'fine', she said:\n  naïve café, 中文字符。 " for n in range(400))
        pieces = list(_pieces(text))
        assert len(pieces) > 4 and max(map(len, pieces)) <= 4096 and "".join(pieces) == text
        assert model.tokenize(text, allow_special=False) == model._tokenize(text.encode(), False)
        for unit in ("a", " ", "中", "a ", ".a"):
            assert "".join(_pieces(unit * 9_999)) == unit * 9_999
    finally:
        model.close()


@pytest.mark.parametrize("path", sorted(VOCABULARIES.glob("*.gguf")), ids=lambda path: path.stem)
def test_vocabularies_of_real_models_lack_nothing(tmp_path: Path, path: Path) -> None:
    """With some weights: without any they are no models."""
    sound, real = File.parse(SOUND), File.parse(path.read_bytes())
    tensors = [tensor for tensor in sound.tensors if tensor.name != b"token_embd.weight"]
    model = written(tmp_path, File(real.values, tensors, sound.data).build())
    assert missing_bytes(model, read_header(model)) == frozenset()


def ends(folder: Path, names: tuple[str, ...], examples: int, longest: int) -> dict[str, str]:
    files = {name: content for name, content in with_holes(SOUND) if not names or name in names}
    paths = [folder / f"{number}.gguf" for number in range(len(files))]
    for path, content in zip(paths, files.values(), strict=True):
        path.write_bytes(content)
    return dict(zip(files, converse(paths, examples=examples, longest=longest), strict=True))


def faults(outcomes: dict[str, str]) -> dict[str, str]:
    return {name: end for name, end in outcomes.items() if end.startswith(("crash", "untyped", "refused: untyped"))}


def test_texts_for_vocabularies_with_holes(tmp_path: Path) -> None:
    names = ("spm", "bpe", "rwkv", "spm without 41", "bpe without C2", "spm without blanks", "spm, every type 6")
    outcomes = ends(tmp_path, names, examples=10, longest=5_000)
    assert not faults(outcomes)
    assert {name for name, end in outcomes.items() if not end} >= {"spm", "bpe", "rwkv", "bpe without C2"}


@pytest.mark.soak
def test_many_texts_for_every_vocabulary_with_holes(tmp_path: Path) -> None:
    outcomes = ends(tmp_path, (), examples=200, longest=60_000)
    assert not faults(outcomes)
    assert not faults({name: end.removeprefix("refused: ") for name, end in outcomes.items() if "untyped" in end})
