"""`python -m updraft.bench.engine.first_token FOLDER DTYPE DEVICE`: time to the first token in a fresh process."""

from __future__ import annotations

import sys
from pathlib import Path


def main(folder: Path, dtype: str, device: str) -> None:
    from ...cloud_engine.engine.config import EngineConfig
    from ...cloud_engine.engine.engine import Engine
    from ...cloud_engine.engine.types.request import GenerationRequest
    from ...cloud_engine.engine.worker.served_model import ServedModel
    from ...cloud_engine.models.loading.loader import load_model
    from ...kernels.runtime.host_memory import keep_freed_memory
    from ...protocol.sampling import SamplingParams
    from .measure import DTYPES

    keep_freed_memory()
    engine = Engine(ServedModel(load_model(folder, dtype=DTYPES[dtype], device=device)), EngineConfig())
    engine.add_request(GenerationRequest("first", list(range(1, 17)), SamplingParams(max_tokens=1, ignore_eos=True)))
    assert next(iter(engine.step())).token_ids
    sys.stdout.write("first token\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
