"""Names that a person may type, the file that each means, and that none leads out of the store."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.local_engine.store.library import Library
from updraft.model_files.download.file_selection import HubFile, choose, tag_of
from updraft.model_files.download.naming import FileRef, HubRef, UrlRef, is_name, name_for, parse, printable
from updraft.protocol.errors import InvalidRequestError, ModelNotFoundError, UpdraftError

HUB = "https://huggingface.co"


@pytest.mark.parametrize(
    ("wanted", "place"),
    [
        ("hf:owner/repo", HubRef("owner/repo")),
        ("hf:owner/repo:Q4_K_M", HubRef("owner/repo", "Q4_K_M")),
        ("hf:owner/repo:sub/x.gguf", HubRef("owner/repo", "sub/x.gguf")),
        ("hf:owner/repo/x.gguf", HubRef("owner/repo", "x.gguf")),
        ("https://example.org/x.gguf", UrlRef("https://example.org/x.gguf")),
        (f"{HUB}/owner/repo/resolve/main/x.gguf?download=true", HubRef("owner/repo", "x.gguf", "main")),
        (f"{HUB}/owner/repo/blob/v1/sub/x%20y.gguf", HubRef("owner/repo", "sub/x y.gguf", "v1")),
        ("http://127.0.0.1:8/x.gguf", UrlRef("http://127.0.0.1:8/x.gguf")),
        ("http://[::1]:8/x.gguf", UrlRef("http://[::1]:8/x.gguf")),
    ],
)
def test_places(wanted: str, place: object) -> None:
    assert parse(wanted, HUB) == place


def test_a_path(tmp_path: Path) -> None:
    file = tmp_path / "a model.gguf"
    file.touch()
    assert parse(str(file), HUB) == FileRef(file)
    assert name_for(file.name) == "a-model"
    for absent in (str(tmp_path), "nowhere.gguf", "owner/repo", ""):
        with pytest.raises(ModelNotFoundError, match="There is no file"):
            parse(absent, HUB)


@pytest.mark.parametrize("wanted", ["hf:", "hf:repo", "hf:a/b:", "hf:../../etc", "hf:a/b c", "hf:-/"])
def test_malformed_names(wanted: str) -> None:
    with pytest.raises(InvalidRequestError):
        parse(wanted, HUB)


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "", ".", "..", ".hidden", "-rf", "a\\b", "a\0b", "pocket", "none", "x" * 121]
)
def test_names_that_lead_elsewhere(name: str, tmp_path: Path) -> None:
    library = Library(tmp_path)
    assert not is_name(name)
    for use in (library.path, library.find, library.remove):
        with pytest.raises(InvalidRequestError, match="cannot be called"):
            use(name)


@given(st.text(max_size=300))
def test_a_made_up_name_is_a_name(path: str) -> None:
    try:
        name = name_for(path)
    except UpdraftError:
        return
    assert is_name(name)
    assert Path(name).name == name


@given(st.text())
def test_nothing_printable_moves_the_cursor(text: str) -> None:
    assert printable(text).isprintable()


def files(*names: str) -> list[HubFile]:
    return [HubFile(name, 1000 * number) for number, name in enumerate(names, 1)]


REPO = files(
    "README.md",
    "m-Q4_K_M.gguf",
    "m-UD-Q4_K_M.gguf",
    "m-Q4_K_S.gguf",
    "m-IQ4_XS.gguf",
    "m.q8_0.gguf",
    "BF16/m-BF16.gguf",
    "m-F16-00001-of-00002.gguf",
    "m-F16-00002-of-00002.gguf",
    "mmproj-m-F16.gguf",
)


@pytest.mark.parametrize(
    ("choice", "path"),
    [
        ("Q4_K_M", "m-Q4_K_M.gguf"),
        ("q4_k_m", "m-Q4_K_M.gguf"),
        ("UD-Q4_K_M", "m-UD-Q4_K_M.gguf"),
        ("IQ4_XS", "m-IQ4_XS.gguf"),
        ("Q8_0", "m.q8_0.gguf"),
        ("BF16", "BF16/m-BF16.gguf"),
        ("m-BF16.gguf", "BF16/m-BF16.gguf"),
        ("BF16/m-BF16.gguf", "BF16/m-BF16.gguf"),
        ("mmproj-m-F16.gguf", "mmproj-m-F16.gguf"),
    ],
)
def test_one_file_is_meant(choice: str, path: str) -> None:
    assert choose("o/r", REPO, choice).path == path


def test_several_are_listed_and_none_is_guessed() -> None:
    with pytest.raises(InvalidRequestError, match="could be any of 8 files") as caught:
        choose("o/r", REPO, None)
    assert caught.value.code == "several_files"
    assert all(name in str(caught.value) for name in ("m-Q4_K_M.gguf", "BF16/m-BF16.gguf"))
    assert "mmproj" not in str(caught.value)
    with pytest.raises(InvalidRequestError, match="any of 2"):
        choose("o/r", files("a/m-Q8_0.gguf", "b/m-Q8_0.gguf"), "Q8_0")


@pytest.mark.parametrize("choice", ["Q4_K", "Q4", "K_M", "m", "m-Q4_K_M", "../x.gguf", "README.md", "Q3_K_M"])
def test_missing_models_are_reported_with_known_ones(choice: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"It has:\n.*README|It has:\n.*gguf"):
        choose("o/r", REPO, choice)


def test_no_model_and_split_models() -> None:
    assert choose("o/r", files("x.gguf", "mmproj-x.gguf", "notes.txt"), None).path == "x.gguf"
    with pytest.raises(ModelNotFoundError, match="holds no GGUF"):
        choose("o/r", files("model.safetensors"), None)
    for choice in ("F16", "m-F16-00001-of-00002.gguf"):
        with pytest.raises(InvalidRequestError, match="is split into"):
            choose("o/r", REPO, choice)


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("Qwen3-0.6B-Q8_0.gguf", "Q8_0"),
        ("llama-2-7b.Q4_K_M.gguf", "Q4_K_M"),
        ("qwen2.5-0.5b-instruct-q4_0.gguf", "Q4_0"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("x-IQ2_XXS.GGUF", "IQ2_XXS"),
        ("model.gguf", None),
        ("QWQ.gguf", None),
    ],
)
def test_tags(name: str, tag: str | None) -> None:
    assert tag_of(HubFile(name)) == tag
