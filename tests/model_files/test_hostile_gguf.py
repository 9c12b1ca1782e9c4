"""Hostile model files: refused by their header where it shows, and by a load on trial where only llama.cpp knows."""

from __future__ import annotations

import struct
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import psutil
import pytest
from gguf_fuzz import ARRAY, STRING, File, Value, corpus, text
from gguf_trials import try_all
from homes import home_in
from updraft.embedded.pocket import pocket_small_gguf
from updraft.local_engine import trial_load as trial
from updraft.local_engine.engine import LocalEngine, LocalOptions, LoraAdapter
from updraft.local_engine.machine.child_process import ChildOutcome
from updraft.local_engine.machine.memory_fit import estimate
from updraft.local_engine.opening import EngineCandidate, plan_of
from updraft.local_engine.trial_load import ensure_loadable
from updraft.model_files.gguf_reader import read_header, read_model_header
from updraft.protocol.errors import ModelLoadError
from updraft.protocol.sampling import SamplingParams


@pytest.fixture
def file() -> File:
    return File.parse(pocket_small_gguf().read_bytes())


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    home = home_in(tmp_path)
    monkeypatch.setenv("UPDRAFT_HOME", str(home))
    return home


def number(value: int) -> Value:
    return Value(4, struct.pack("<I", value % 2**32))


def needed(path: Path) -> int:
    """Bytes of memory, as an app asks for them before anything is tried."""
    header = read_model_header(path)
    return estimate(header, plan_of(header, LocalOptions())).total


def written(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return path


def test_the_corpus_starts_from_a_sound_file(tmp_path, file) -> None:
    path = written(tmp_path, file.build())
    assert len(read_header(path).tensors) == len(file.tensors)
    assert try_all([path]) == [""]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("block_count", number(2**31), "block_count is 2,147,483,648"),
        ("block_count", number(0), "block_count is 0"),
        ("block_count", Value(5, struct.pack("<i", -1)), "block_count is -1"),
        ("block_count", Value(STRING, text(b"two")), "block_count is 'two'"),
        ("block_count", Value(7, b"\1"), "block_count is"),
        ("embedding_length", number(65), "embedding_length of 65 is not divisible"),
        ("attention.head_count", number(0), "head_count is 0"),
        ("attention.head_count", Value(ARRAY, item_kind=4, items=[b"\2\0\0\0"] * 5), "5 values for 2 layers"),
        ("attention.head_count_kv", number(3), "not divisible"),
        ("rope.dimension_count", number(64), "more than the 32 values of a head"),
        ("rope.freq_base", Value(6, struct.pack("<f", float("nan"))), "freq_base is nan"),
        ("attention.layer_norm_rms_epsilon", Value(6, struct.pack("<f", -1.0)), "epsilon is -1.0"),
        ("context_length", number(2**32 - 1), "context_length is"),
    ],
)
def test_absurd_hyperparameters(tmp_path, file, name, value, says) -> None:
    file.put(b"llama." + name.encode(), value)
    with pytest.raises(ModelLoadError, match=says):
        read_header(written(tmp_path, file.build()))


@pytest.mark.parametrize(
    "value",
    [Value(STRING, text(b"warm")), *(Value(6, struct.pack("<f", x)) for x in (-1.0, float("nan"), float("inf")))],
)
def test_an_absurd_temperature(tmp_path, file, value) -> None:
    file.put(b"general.sampling.temp", value)
    with pytest.raises(ModelLoadError, match=r"sampling\.temp is"):
        read_header(written(tmp_path, file.build()))


@pytest.mark.parametrize(("experts", "used"), [(8, 0), (0, 2), (8, 9), (600, 2)])
def test_absurd_experts(tmp_path, file, experts, used) -> None:
    file.values += [(b"llama.expert_count", number(experts)), (b"llama.expert_used_count", number(used))]
    with pytest.raises(ModelLoadError, match="expert"):
        read_header(written(tmp_path, file.build()))


@pytest.mark.parametrize("name", ["rope.dimension_count", "expert_count", "expert_used_count"])
def test_numbers_of_each_layer(tmp_path, file, name) -> None:
    """llama.cpp may take them or not: what is computed from them before is no error of Python's."""
    file.values += [(b"llama.expert_count", number(8)), (b"llama.expert_used_count", number(2))]
    file.put(b"llama." + name.encode(), Value(ARRAY, item_kind=4, items=[struct.pack("<I", 16)] * 2))
    assert needed(written(tmp_path, file.build())) > 0


def test_files_without_a_vocabulary_are_refused(tmp_path, file) -> None:
    """Image encoders have no vocabulary, and some adapters the model's."""
    bare = [(key, value) for key, value in file.values if b"tokenizer" not in key and b"vocab" not in key]
    path = written(tmp_path, File(bare, file.tensors, file.data).build())
    assert len(read_header(path).tensors) == len(file.tensors)
    with pytest.raises(ModelLoadError, match=r"the file has no vocabulary\. Use the model that this file belongs to"):
        EngineCandidate.of(path, None, sound=pocket_small_gguf())
    with pytest.raises(ModelLoadError, match="no vocabulary"):
        ensure_loadable(path)
    file.values.append((b"general.type", Value(STRING, text(b"adapter"))))
    with pytest.raises(ModelLoadError, match="the file is an adapter"):
        LocalEngine.load(written(tmp_path, file.build()))


def test_bad_tokenizers(tmp_path, file) -> None:
    tokens = dict(file.values)[b"tokenizer.ggml.tokens"]
    cases = {
        b"tokenizer.ggml.tokens": [
            (Value(ARRAY, item_kind=4, items=[b"\0\0\0\0"] * 1024), "not a list of texts"),
            (Value(STRING, text(b"a b c")), "not a list of texts"),
            (Value(ARRAY, item_kind=STRING), "empty"),
            (Value(ARRAY, item_kind=STRING, items=tokens.items[:-1]), "1,024 items for 1,023 tokens"),
        ],
        b"tokenizer.ggml.token_type": [
            (Value(ARRAY, item_kind=5, items=[b"\1\0\0\0"] * 10), "10 items for 1,024 tokens"),
            (Value(ARRAY, item_kind=6, items=[b"\1\0\0\0"] * 1024), "wrong type"),
            (number(1), "wrong type"),
        ],
        b"tokenizer.ggml.model": [(Value(STRING, text(b"none")), "no vocabulary")],
    }
    for key, values in cases.items():
        for value, says in values:
            changed = File(list(file.values), file.tensors, file.data)
            changed.put(key, value)
            with pytest.raises(ModelLoadError, match=says):
                read_header(written(tmp_path, changed.build()))


def test_scores_shorter_than_the_vocabulary(tmp_path, file) -> None:
    """llama.cpp would read past their end."""
    file.values.append((b"tokenizer.ggml.scores", Value(ARRAY, item_kind=6, items=[b"\0\0\0\0"] * 3)))
    with pytest.raises(ModelLoadError, match="3 items for 1,024 tokens"):
        read_header(written(tmp_path, file.build()))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shape": [64, 2**63]}, "shape"),
        ({"shape": [0, 64]}, "shape"),
        ({"shape": []}, "0 dimensions"),
        ({"shape": [1] * 9}, "9 dimensions"),
        ({"shape": [33, 64]}, "not a multiple of 32"),
        ({"start": 2**64 - 32}, "starts at"),
        ({"start": 2**40}, "truncated"),
        ({"start": 1}, "not at a valid multiple"),
        ({"name": b"x" * 64}, "64 bytes"),
        ({"name": b"\xff"}, "not UTF-8"),
        ({"name": b"token_embd.weight"}, "twice"),
        ({"kind": 31}, "no longer reads"),
    ],
)
def test_impossible_tensors(tmp_path, file, changes, says) -> None:
    tensor = next(tensor for tensor in file.tensors if tensor.name == b"blk.1.attn_q.weight")
    for name, value in changes.items():
        setattr(tensor, name, value)
    with pytest.raises(ModelLoadError, match=says):
        read_header(written(tmp_path, file.build()))


def test_an_embedding_of_other_width(tmp_path, file) -> None:
    file.tensors[0].shape = [32, 2048]
    with pytest.raises(ModelLoadError, match=r"\(32, 2048\), expected \(64, 1024\)"):
        read_header(written(tmp_path, file.build()))


def test_a_key_twice_and_an_array_of_arrays(tmp_path, file) -> None:
    key = file.values[3][0]
    twice = File([*file.values, file.values[3]], file.tensors, file.data)
    with pytest.raises(ModelLoadError, match=f"'{key.decode()}' occurs twice"):
        read_header(written(tmp_path, twice.build()))
    file.values.append((b"deep", Value(ARRAY, item_kind=ARRAY, items=[struct.pack("<IQ", ARRAY, 1)] * 1000)))
    with pytest.raises(ModelLoadError, match="array of type 9"):
        read_header(written(tmp_path, file.build()))


@pytest.mark.parametrize("claims", [2**16 + 1, 2**31, 2**48, 2**64 - 1])
def test_huge_counts_cost_nothing(tmp_path, file, claims) -> None:
    """Also in a file large enough that the claim could be true."""
    strings = Value(ARRAY, item_kind=STRING, count=claims)
    numbers = Value(ARRAY, item_kind=10, count=claims)
    files = [file.build(tensor_count=claims), file.build(value_count=claims)]
    files += [File([(b"many", value), *file.values], file.tensors, file.data).build() for value in (strings, numbers)]
    files.append(
        File([(text(b"")[:1] * claims.bit_length(), Value(STRING, struct.pack("<Q", claims)))], [], file.data).build()
    )
    for content in files:
        path = written(tmp_path, content)
        with path.open("r+b") as grown:
            grown.truncate(2**36)  # 64 GiB of nothing: a hole
        started = time.process_time()
        with pytest.raises(ModelLoadError):
            read_header(path)
        assert time.process_time() - started < 3


def test_a_file_that_crashes_llama_cpp_is_an_error_and_remembered(tmp_path, file, home, monkeypatch) -> None:
    """Two tokens of one text: llama.cpp's own check of that aborts the process."""
    tokens = dict(file.values)[b"tokenizer.ggml.tokens"]
    tokens.items[500] = tokens.items[501]
    path = written(tmp_path, file.build())
    read_header(path)
    with pytest.raises(ModelLoadError, match=r"crashes on the file \(SIGABRT, GGML_ASSERT.*Download"):
        ensure_loadable(path)
    assert len(list((home / "tried-models").iterdir())) == 1
    monkeypatch.setattr(trial, "run_child", None)
    with pytest.raises(ModelLoadError, match="crashes on the file"):
        ensure_loadable(path)


def test_a_sound_file_is_tried_once_and_again_when_it_changes(tmp_path, file, monkeypatch) -> None:
    path, runs = written(tmp_path, file.build()), []
    real = trial.run_child

    def counted(*arguments, **options):
        runs.append(arguments)
        return real(*arguments, **options)

    monkeypatch.setattr(trial, "run_child", counted)
    for _ in range(3):
        ensure_loadable(path)
    assert len(runs) == 1
    file.put(b"general.architecture", Value(STRING, text(b"nonsense")))
    written(tmp_path, file.build())
    for times in (2, 3):  # a plain refusal is nobody's crash: it is not remembered
        with pytest.raises(ModelLoadError, match="nonsense"):
            ensure_loadable(path)
        assert len(runs) == times


def test_a_known_file_costs_less_than_ten_milliseconds() -> None:
    """Of processor time, which other processes do not change."""
    path = pocket_small_gguf()
    ensure_loadable(path)
    seconds = []
    for _ in range(5):
        started = time.thread_time()
        ensure_loadable(path)
        seconds.append(time.thread_time() - started)
    assert min(seconds) < 0.01


def test_a_hang_is_an_error(tmp_path, file, monkeypatch) -> None:
    """A trial without an end: RWKV's reader has none for a vocabulary of another family, which is refused by name."""
    file.put(b"tokenizer.ggml.model", Value(STRING, text(b"rwkv")))
    with pytest.raises(ModelLoadError, match="no token for the byte"):
        ensure_loadable(written(tmp_path, file.build()))
    with pytest.raises(ModelLoadError, match="took more than 0 s"):
        ensure_loadable(written(tmp_path, File.parse(pocket_small_gguf().read_bytes()).build()), timeout_s=0.01)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (b"{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than 1 s"),
        (b"{% for m in messages %}", "not valid Jinja"),
    ],
)
def test_a_chat_template_that_never_ends_or_begins(tmp_path, file, source: bytes, complaint: str) -> None:
    file.put(b"tokenizer.chat_template", Value(STRING, text(source)))
    with pytest.raises(ModelLoadError, match=complaint):
        ensure_loadable(written(tmp_path, file.build()))


@pytest.mark.skipif(sys.platform != "linux", reason="no other system limits a process's memory")
def test_a_chat_template_that_wants_all_memory(tmp_path, file) -> None:
    """One text fits, and one exceeds the memory: filling all memory could take longer than a template's one second."""
    many = b"{% set n = namespace(x=[]) %}{% for i in (20, 30) %}{% set n.x = n.x + ['a' * 2**i] %}{% endfor %}"
    file.put(b"tokenizer.chat_template", Value(STRING, text(many)))
    with pytest.raises(ModelLoadError, match="the template takes more memory than 512 MB"):
        ensure_loadable(written(tmp_path, file.build()))
    file.put(b"tokenizer.chat_template", Value(STRING, text(b"{{ raise_exception('not so') }}")))
    ensure_loadable(written(tmp_path, file.build()))


def ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(("seconds", "how"), [(60, psutil.Process.kill), (8, psutil.Process.suspend)])
def test_a_trial_ends_with_its_parent(tmp_path, file, seconds, how) -> None:
    """Also with one that lives but does nothing any more, a little after its time."""
    file.put(b"tokenizer.ggml.model", Value(STRING, text(b"rwkv")))
    path = written(tmp_path, file.build())
    code = "import sys\nfrom updraft.local_engine.machine import child_process as child\n"
    code += "child.run_child('updraft.local_engine.trial_load', [sys.argv[1]], timeout_s=float(sys.argv[2]))"
    with subprocess.Popen([sys.executable, "-c", code, str(path), str(seconds)]) as parent:
        try:
            process, end = psutil.Process(parent.pid), time.monotonic() + 120
            while not (children := process.children()):
                assert time.monotonic() < end
            with suppress(psutil.NoSuchProcess):  # its time is over before it has had as much of a busy processor
                while children[0].cpu_times().user < 0.6:  # past its imports
                    assert time.monotonic() < end
                    time.sleep(0.01)
            how(process)
            while not ended(children[0]):
                assert time.monotonic() < end, "it goes on"
                time.sleep(0.05)
        finally:
            parent.kill()


def adapter(path: Path, down: np.ndarray, up: np.ndarray, name: str = "blk.0.attn_q.weight", alpha=8.0) -> LoraAdapter:
    writer = gguf.GGUFWriter(path, read_header(pocket_small_gguf()).architecture)
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    writer.add_tensor(f"{name}.lora_a", down)
    writer.add_tensor(f"{name}.lora_b", up)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return LoraAdapter(path)


DOWN, UP = np.full((4, 64), 0.01, np.float32), np.full((64, 4), 0.01, np.float32)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"down": np.ones((4, 64), np.int32)}, "type 26"),
        ({"up": np.ones((64, 4), np.int8)}, "type 24"),
        ({"down": DOWN.astype(np.float64)}, "type 28"),
        ({"down": np.ones((3, 4, 64), np.float32)}, r"shape \(64, 4, 3\), but the weights have shape \(64, 64\)"),
        ({"up": np.ones((64, 5), np.float32)}, "factors"),
        ({"down": np.ones((4, 32), np.float32)}, "factors"),
        ({"name": "blk.9.attn_q.weight"}, "no weights for"),
        ({"name": "blk.0.attn_norm.weight"}, "the weights have shape"),
        ({"name": "token_embd.weight"}, "factors"),
        ({"alpha": float("nan")}, "alpha is nan"),
    ],
)
def test_hostile_adapters(tmp_path, changes, says) -> None:
    """Most of these take the process down where llama.cpp multiplies with them."""
    lora = adapter(tmp_path / "lora.gguf", **{"down": DOWN, "up": UP, **changes})
    with pytest.raises(ModelLoadError, match=f"adapter .*lora.gguf cannot be used.*{says}"):
        LocalEngine.load(pocket_small_gguf(), LocalOptions(adapters=(lora,)))


def test_adapters_are_counted_and_tried_with_their_model(tmp_path, monkeypatch) -> None:
    lora, path = adapter(tmp_path / "lora.gguf", DOWN, UP), pocket_small_gguf()
    options = LocalOptions(adapters=(lora,))
    candidate = EngineCandidate.of(path, options, sound=path)
    assert candidate.need - EngineCandidate.of(path, None, sound=path).need == Path(lora.path).stat().st_size
    with candidate.load() as engine:
        assert list(engine.start_text("2 + 2", SamplingParams(max_tokens=2, ignore_eos=True)))
    monkeypatch.setattr(trial, "run_child", lambda *_, **__: ChildOutcome("crashed", "SIGSEGV"))
    candidate.load().close()  # both are known by now
    adapter(tmp_path / "lora.gguf", DOWN, 2 * UP)
    with pytest.raises(ModelLoadError, match=r"with .*lora\.gguf: llama\.cpp crashes on the file \(SIGSEGV\)"):
        candidate.load()


def survivors(folder: Path, count: int, seed: int) -> tuple[list[Path], list[str]]:
    """The files of a corpus that pass the check of their header, and how llama.cpp ended on each."""
    sound = pocket_small_gguf().read_bytes()
    passed: list[Path] = []
    for name, content in corpus(sound, count, seed):
        path = folder / f"{name}.gguf"
        path.write_bytes(content)
        started = time.process_time()
        try:
            needed(path)
        except ModelLoadError as error:
            assert path.name in error.message
            path.unlink()
        else:
            passed.append(path)
        assert time.process_time() - started < 1
    return passed, try_all(passed)


def check_corpus(folder: Path, count: int, seed: int) -> Counter[str]:
    passed, ends = survivors(folder, count, seed)
    kinds = Counter(end.partition(":")[0] if end.startswith(("crash", "untyped")) else bool(end) for end in ends)
    assert not kinds["untyped"], [end for end in ends if end.startswith("untyped")]
    crashing = [path for path, end in zip(passed, ends, strict=True) if end.startswith("crash")]
    for path in crashing[:3]:  # in this process, as an app does it
        with pytest.raises(ModelLoadError):
            ensure_loadable(path, timeout_s=5)
    for path in [path for path, end in zip(passed, ends, strict=True) if not end][:10]:
        ensure_loadable(path)
        with LocalEngine.load(path) as engine:
            params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)  # it may want to end at once
            assert list(engine.start_text("the", params))
    return Counter({str(kind): outcomes for kind, outcomes in kinds.items()})


def test_a_corpus_of_damaged_files(tmp_path) -> None:
    kinds = check_corpus(tmp_path, 80, seed=1)
    assert kinds["False"]
    assert kinds["True"]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10, 20))
def test_a_large_corpus_of_damaged_files(tmp_path, seed) -> None:
    check_corpus(tmp_path, 2000, seed)
