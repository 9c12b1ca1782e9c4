"""Streaming text: the same characters as decoding everything at once, and never a stop string."""

from hypothesis import given
from hypothesis import strategies as st
from updraft.text.detokenize import IncrementalDetokenizer, StopMatcher

byte_tokens = st.lists(
    st.one_of(st.binary(max_size=4), st.sampled_from(["é", "日本", "👩‍👩‍👧", "\U0001f1e9"]).map(str.encode))
)


@given(tokens=byte_tokens)
def test_stream_equals_whole(tokens):
    detokenizer = IncrementalDetokenizer(lambda token_id: tokens[token_id])
    streamed = [detokenizer.push(token_id) for token_id in range(len(tokens))]
    assert "".join(streamed) + detokenizer.flush() == b"".join(tokens).decode("utf-8", "replace")


@given(text=st.text(), data=st.data())
def test_valid_text_is_never_disturbed(text, data):
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)))))
    parts = [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    detokenizer = IncrementalDetokenizer(lambda token_id: parts[token_id])
    assert "".join(detokenizer.push(i) for i in range(len(parts))) == text
    assert detokenizer.flush() == ""


def stream(text: str, cuts: list[int], stop: tuple[str, ...]) -> tuple[str, bool]:
    matcher = StopMatcher(stop)
    emitted, stopped = "", False
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        safe, stopped = matcher.push(text[start:end])
        emitted += safe
        assert text.startswith(emitted)
    return emitted + matcher.flush(), stopped


small = st.text("abc", max_size=40)


@given(text=small, stop=st.text("abc", min_size=1, max_size=4), data=st.data())
def test_one_stop_string_equals_find(text, stop, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    at = text.find(stop)
    assert stream(text, cuts, (stop,)) == ((text[:at], True) if at >= 0 else (text, False))


@given(text=small, stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=4).map(tuple), data=st.data())
def test_several_stop_strings_do_not_depend_on_the_cuts(text, stop, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    by_character = stream(text, list(range(1, len(text))), stop)
    assert stream(text, cuts, stop) == by_character
    assert not any(string in by_character[0] for string in stop)
    ends = [text.find(string) + len(string) for string in stop if string in text]
    assert by_character[1] == bool(ends)
    if ends:
        assert len(by_character[0]) < min(ends)


@given(early=small, late=small, stop=st.text("abc", min_size=1, max_size=4))
def test_a_match_may_begin_too_early_but_ends_later(early, late, stop):
    matcher = StopMatcher((stop,))
    begun, stopped = matcher.push(early, too_early=True)
    assert not stopped
    rest, stopped = matcher.push(late)
    text = early + late
    at = text.find(stop, max(0, len(early) + 1 - len(stop)))
    assert (begun + rest + matcher.flush(), stopped) == ((text[:at], True) if at >= 0 else (text, False))


def test_nothing_after_a_stop():
    matcher = StopMatcher(("END",))
    assert matcher.push("xEND and more") == ("x", True)
    assert matcher.push("again") == ("", True)
    assert matcher.flush() == ""
