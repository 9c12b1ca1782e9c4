"""Compiles Triton kernels for GPUs that this machine lacks, and reports the registers and memory that they need.

`python kernel_compiler.py` is a separate process, because Triton's interpreter and compiler cannot share one. It reads
lines of JSON, `[FILE, NAME]`, compiles the list of `Spec` objects called NAME in FILE for `ARCHITECTURES`, and prints
a line of JSON for each list.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ARCHITECTURES = (80, 90, 100)  # A100, H100 and B200
#: PTX instruction of each generation of tensor cores. Products of small tiles use the oldest one on every architecture.
TENSOR_CORES = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}


@dataclass(frozen=True)
class Spec:
    """One specialisation of a kernel. `signature`: type (`*bf16`, `i32`, `fp32`) of each argument but the constexprs.

    `aligned`: arguments known to be divisible by 16; at launch, Triton detects this for most pointers and strides.
    `least`: oldest architecture to compile for. `programs`: number of programs that must fit in the shared memory of a
    Hopper multiprocessor at once.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    aligned: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 2
    least: int = 80
    max_registers: int = 255
    programs: int = 1
    max_shared: Mapping[int, int] = field(default_factory=lambda: {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024})
    max_spilled: Mapping[int, int] = field(default_factory=dict[int, int])


@dataclass(frozen=True)
class Resources:
    """Resources of a compiled kernel: registers per thread, bytes spilled (stack and local), bytes of shared memory.

    `tensor_cores`: the instructions of `TENSOR_CORES` that it uses. `copies_ahead`: whether it copies to shared memory
    asynchronously.
    """

    spec: str
    architecture: int
    registers: int
    spilled: int
    shared: int
    tensor_cores: list[str]
    copies_ahead: bool


Compile = Callable[[Path, str], list[Resources]]


@contextmanager
def compiler() -> Iterator[Compile]:
    """Run the compiler process, and yield a function that compiles the list of specifications `name` in a file.

    One process serves all files, because importing the compiler takes seconds. The function raises AssertionError for a
    specification that does not compile.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, __file__]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        send, receive = child.stdin, child.stdout

        def compile_list(path: Path, name: str) -> list[Resources]:
            send.write(json.dumps([str(path), name]) + "\n")
            send.flush()
            reply = json.loads(receive.readline())
            if isinstance(reply, str):
                raise AssertionError(reply[-4000:])
            return [Resources(**row) for row in reply]

        try:
            yield compile_list
        except BaseException:
            child.kill()
            raise


def specs_in(path: Path, name: str = "SPECS") -> list[Spec]:
    """Return the list called `name` in the Python file `path`; empty if the file has no such list."""
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return list(getattr(module, name, []))


def compile_spec(spec: Spec, architecture: int) -> Resources:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = spec.kernel.arg_names
    signature = {name: spec.signature.get(name, "constexpr") for name in names}
    constexprs = {(names.index(name),): value for name, value in spec.constexprs.items()}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in spec.aligned}
    source = ASTSource(fn=spec.kernel, signature=signature, constexprs=constexprs, attrs=aligned)
    target = GPUTarget("cuda", architecture, 32)
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages}
    try:
        compiled = triton.compile(source, target=target, options=options)
    except Exception as error:
        error.add_note(f"{spec.name} for sm_{architecture}")
        raise
    used, ptx = _usage(compiled.asm["cubin"]), compiled.asm["ptx"]
    return Resources(
        spec.name,
        architecture,
        used["REG"],
        used["STACK"] + used["LOCAL"],
        compiled.metadata.shared,
        tensor_cores=[instruction for instruction in TENSOR_CORES.values() if instruction in ptx],
        copies_ahead="cp.async" in ptx,
    )


def _usage(cubin: bytes) -> dict[str, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    line = next(line for line in text.splitlines() if "REG:" in line)
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", line)}


def main() -> None:
    replies, sys.stdout = sys.stdout, sys.stderr  # keeps the compilers' output out of the replies
    for line in sys.stdin:
        path, name = json.loads(line)
        try:
            reply: Any = [
                asdict(compile_spec(spec, architecture))
                for spec in specs_in(Path(path), name)
                for architecture in ARCHITECTURES
                if architecture >= spec.least
            ]
        except Exception:  # noqa: BLE001 - the test reports every failure of a compiler
            reply = traceback.format_exc()
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    sys.modules["kernel_compiler"] = sys.modules["__main__"]  # specification files import this module by name
    main()
