"""Trial load of unknown models in a subprocess, because llama.cpp aborts or crashes on some damaged files.

Header checks cannot detect all such files. The trial loads the file, reads every token of its vocabulary, and generates
one token. The result is saved if the file loads or crashes, and is used until the file or the llama.cpp build changes.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..model_files.gguf_reader import read_model_header
from ..protocol.decoding import prepare_types
from ..protocol.errors import InvalidRequestError, ModelLoadError, UpdraftError
from ..protocol.requests import Message
from ..protocol.safety.redaction import printable
from ..protocol.sampling import SamplingParams
from ..text.templates.renderer import LIMIT_CODE
from .llama.build import build_key
from .llama.context import LoraAdapter
from .machine.child_process import ChildOutcome, expect_crashes, run_child
from .machine.json_store import JsonStore, file_key

_first_use = logging.getLogger("updraft.local.first_use")
_CONTEXT = 64
_NO_TEMPLATE = "--no-template"
_SLOWEST_DISK = 20e6  # bytes/s
_TIMEOUT_S = 30.0
_SURROGATES = range(0xD800, 0xE000)
# Texts that must not crash a tokenizer: all UTF-8 lead bytes and Unicode planes, special tokens, no text, long runs.
_SAMPLES = (
    "".join(chr(code) for code in (*range(0x800), *range(0x800, 0x110000, 0x3F1)) if code not in _SURROGATES),
    "\ufffe\uffff\ufeff\U0001f468\u200d\U0001f469 日本語 🙂 <unk><s></s><|im_end|><|endoftext|> \n",
    "",
    *(unit * 5_000 for unit in ("a", "aA", "a ", "1", ".", " ", "\t", "\r\n", "中", "é", "e\u0301", "🙂")),
)


if TYPE_CHECKING:
    from .engine import LocalEngine


class _Verdict(msgspec.Struct, frozen=True):
    """Result of a trial load. `complaint`: reason to reject the file; empty if the file is usable."""

    complaint: str = ""


prepare_types(_Verdict)


def ensure_loadable(
    path: Path, adapters: Sequence[LoraAdapter] = (), *, own_template: bool = True, timeout_s: float | None = None
) -> None:
    """Load `path` and its adapters on trial, which takes seconds, unless the result of an earlier trial was saved.
    `own_template`: also try the file's chat template.

    `timeout_s` None: half a minute plus the time that a slow disk needs to read the file. Raises ModelLoadError, with
    the reason, if the file crashes llama.cpp, is rejected, or times out.
    """
    files = [path, *(Path(adapter.path) for adapter in adapters)]
    notes, key = (
        JsonStore("tried-models"),
        "".join(map(file_key, files)) + build_key() + ("" if own_template else _NO_TEMPLATE),
    )
    verdict = notes.read(key, _Verdict)
    if verdict is None:
        read_model_header(path)
        longest_s = _TIMEOUT_S + sum(file.stat().st_size for file in files) / _SLOWEST_DISK
        _first_use.info("Testing %s in a separate process; this happens once per machine.", printable(path.name))
        verdict, lasting = _run_trial(files, own_template, timeout_s or longest_s)
        if lasting:
            notes.write(key, verdict)
    if verdict.complaint:
        adapted = f" with {', '.join(str(file) for file in files[1:])}" if adapters else ""
        raise ModelLoadError(f"The model file {path} cannot be used{adapted}: {verdict.complaint}")


def _run_trial(files: Sequence[Path], own_template: bool, timeout_s: float) -> tuple[_Verdict, bool]:
    """Run a trial; return the result and whether to save it. A timeout may be temporary, so it is not saved."""
    options = [] if own_template else [_NO_TEMPLATE]
    end = run_child(__name__, [*map(str, files), *options], timeout_s=timeout_s)
    if end.status == "ok":
        complaint = end.result["complaint"]
        return _Verdict(complaint), not complaint
    if end.status == "timeout":
        return _Verdict(f"the trial load took {end.detail}. Is the machine overloaded?"), False
    if end.detail == "SIGKILL":
        return _Verdict("the trial load was killed, most likely because memory ran out."), False
    if end.status == "failed":
        return _Verdict(f"the trial load failed with {end.detail}: {end.complaints}"), False
    return _Verdict(f"llama.cpp crashes on the file ({_cause(end)}). Download or export it again."), True


def _cause(end: ChildOutcome) -> str:
    """Return the signal that ended the child, and llama.cpp's failed assertion if the child printed one."""
    violated = re.search(r"GGML_ASSERT\(.*?\) failed", end.complaints)
    return f"{end.detail}, {violated[0]}" if violated else end.detail


def attempt(path: Path, adapters: Sequence[str] = (), *, own_template: bool = True) -> str:
    """Load file and adapters, read the whole vocabulary and generate one token; return the error, empty if all is well.

    May crash the process: run only in a subprocess.
    """
    from .engine import LocalEngine, LocalOptions

    try:
        header = read_model_header(path)
        trained = header.hyperparameter("context_length")
        context = min(_CONTEXT, trained) if isinstance(trained, int) else _CONTEXT
        loras = tuple(LoraAdapter(adapter) for adapter in adapters)
        template = None if own_template else "chatml"  # a built-in template, which is valid
        options = LocalOptions(max_model_len=context, threads=1, adapters=loras, chat_template=template)
        with LocalEngine.load(path, options) as engine:
            tokens = header.arrays.get("tokenizer.ggml.tokens")
            for token in range(0 if tokens is None else tokens.length):
                engine.token_bytes(token, skip_special=False)
            for text in _SAMPLES:
                engine.encode(text, allow_special=True)
                with suppress(InvalidRequestError):  # some vocabularies cannot encode every sample
                    engine.encode(text)
            for _ in engine.start_text([0], SamplingParams(max_tokens=1, temperature=0.0)):
                pass
            return _template_complaint(engine)
    except UpdraftError as error:
        return error.message


def _template_complaint(engine: LocalEngine) -> str:
    """Return an error if a short chat exceeds the template limits. Raises ModelLoadError if the template is broken."""
    try:
        engine.chat_template.segments([Message("user", "A")])
    except InvalidRequestError as error:
        if error.code == LIMIT_CODE:
            return error.message
    return ""


if __name__ == "__main__":
    expect_crashes()
    model, *loras = [argument for argument in sys.argv[1:] if argument != _NO_TEMPLATE]
    complaint = attempt(Path(model), loras, own_template=_NO_TEMPLATE not in sys.argv)
    sys.stdout.write(json.dumps({"complaint": complaint}) + "\n")
