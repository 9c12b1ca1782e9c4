"""Copies a GGUF file with changed metadata."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np


def edited(source: Path, target: Path, changes: Mapping[str, Any], drop: Collection[str] = ()) -> Path:
    """Copy `source` to `target` with the metadata `changes`, and without the keys in `drop`.

    A changed value keeps its type. A new value must be a string or a bool.
    """
    reader = gguf.GGUFReader(source)
    architecture = "general.architecture"
    writer = gguf.GGUFWriter(target, reader.fields[architecture].contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == architecture or key in drop:
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, changes.get(key, field.contents()), field.types[0], sub_type=inner)
    for key, value in changes.items():
        if key not in reader.fields:
            is_switch = isinstance(value, bool)
            writer.add_key_value(key, value, gguf.GGUFValueType.BOOL if is_switch else gguf.GGUFValueType.STRING)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
