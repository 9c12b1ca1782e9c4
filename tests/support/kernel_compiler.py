"""Compiles Triton kernels for a GPU that is not here, and reads what they need of it.

Run as a program in a process of its own, for the interpreter and the compiler cannot share one:
`python kernel_compiler.py PART PARTS SPECS.py` compiles every PARTS-th of the file's `SPECS`, from number PART on, for
sm_80 and sm_90 and prints JSON.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ARCHITECTURES = (80, 90)
_WORTH_A_PROCESS = 16  # specifications, for a process takes seconds to import what it needs


@dataclass(frozen=True)
class Spec:
    """One specialisation of a kernel. `signature`: argument to type (`*bf16`, `i32`, `fp32`), constexprs left out.

    `aligned`: arguments known to be divisible by 16, which is what Triton finds of most pointers and strides at launch.
    `least`: the oldest architecture it is for. `programs`: that a Hopper multiprocessor's memory is to hold at once.
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
    max_shared: Mapping[int, int] = field(default_factory=lambda: {80: 163 * 1024, 90: 227 * 1024})


@dataclass(frozen=True)
class Resources:
    """ptxas's resources of a kernel: registers of a thread, bytes spilled (stack and local), bytes of shared memory."""

    spec: str
    architecture: int
    registers: int
    spilled: int
    shared: int


def compile_in_children(path: Path) -> list[Resources]:
    """Compile what the file specifies, in processes without the interpreter, as many as there are cores and work for.

    Raises AssertionError where a specification does not compile.
    """
    parts = min(os.cpu_count() or 1, 1 + len(specs_in(path)) // _WORTH_A_PROCESS)
    with ThreadPoolExecutor(parts) as pool:
        found = pool.map(lambda part: _compile_in_child(path, part, parts), range(parts))
        return [row for rows in found for row in rows]


def _compile_in_child(path: Path, part: int, parts: int) -> list[Resources]:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, __file__, str(part), str(parts), str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(done.stderr[-4000:])
    return [Resources(**row) for row in json.loads(done.stdout.splitlines()[-1])]


def specs_in(path: Path) -> list[Spec]:
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return list(module.SPECS)


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
    used = _usage(compiled.asm["cubin"])
    return Resources(spec.name, architecture, used["REG"], used["STACK"] + used["LOCAL"], compiled.metadata.shared)


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


def main(part: str, parts: str, path: str) -> None:
    rows = [
        asdict(compile_spec(spec, architecture))
        for spec in specs_in(Path(path))[int(part) :: int(parts)]
        for architecture in ARCHITECTURES
        if architecture >= spec.least
    ]
    print(json.dumps(rows))


if __name__ == "__main__":
    sys.modules["kernel_compiler"] = sys.modules["__main__"]  # what the specs import is this very module
    main(*sys.argv[1:])
