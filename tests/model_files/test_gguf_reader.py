"""Damaged model files end in a typed error, never in a dead process."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.local_engine.engine import LocalEngine
from updraft.model_files.gguf_reader import read_header
from updraft.protocol.errors import ModelLoadError


def test_header_of_a_good_file(tiny):
    header = read_header(tiny.gguf)
    assert header.architecture == "llama"
    assert header.metadata["general.sampling.temp"] == 0.0
    assert header.metadata["llama.context_length"] == 256
    assert len(header.tensors) == len(tiny.weights)
    assert header.data_end <= tiny.gguf.stat().st_size < header.data_end + 32


@given(data=st.data())
def test_cut_at_any_byte(tiny, tmp_path_factory, data):
    header = read_header(tiny.gguf)
    cut = data.draw(st.one_of(st.integers(0, header.data_end - 1), st.integers(0, 20_000)))
    path = tmp_path_factory.getbasetemp() / "cut.gguf"
    path.write_bytes(tiny.gguf.read_bytes()[:cut])
    with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
        LocalEngine.load(path)


@given(body=st.binary(max_size=400), magic=st.booleans(), version=st.sampled_from([1, 2, 3, 2**31]))
def test_garbage(tmp_path_factory, body, magic, version):
    path = tmp_path_factory.getbasetemp() / "garbage.gguf"
    path.write_bytes((b"GGUF" + struct.pack("<I", version) if magic else b"") + body)
    with pytest.raises(ModelLoadError, match=r"garbage\.gguf"):
        LocalEngine.load(path)


@given(data=st.data())
def test_header_reader_survives_any_change(tiny, tmp_path_factory, data):
    """A flipped byte gives a header or a ModelLoadError; nothing else, and no endless loop over huge counts."""
    content = bytearray(tiny.gguf.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 3000))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    path.write_bytes(content)
    try:
        assert len(read_header(path).tensors) > 0
    except ModelLoadError as error:
        assert "changed.gguf" in error.message


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(ModelLoadError, match="Cannot open"):
        LocalEngine.load(tmp_path / "none.gguf")
    with pytest.raises(ModelLoadError, match="folder"):
        LocalEngine.load(tmp_path)


def test_llama_cpp_refusals_are_explained(tiny, tmp_path):
    """A well-formed file with an architecture llama.cpp does not know."""
    path = tmp_path / "foreign.gguf"
    path.write_bytes(tiny.gguf.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0lhama", 1))
    with pytest.raises(ModelLoadError, match="lhama"):
        LocalEngine.load(path)
