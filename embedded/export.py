"""Export of a trained model in two formats: a Hugging Face style folder and a GGUF file.

The GGUF file holds the same weights as the folder (Q8_0, F16 or F32), with tokenizer and chat template. The rotary
embedding pairs neighbouring rows of a head in llama.cpp, but the two halves of a head in Hugging Face models. Query and
key rows are therefore interleaved in the conversion.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .tokenizer import CHAT_TEMPLATE, IM_END, IM_START, PAD

if TYPE_CHECKING:
    import numpy as np
    import torch
    from tokenizers import Tokenizer

FileType = Literal["Q8_0", "F16", "F32"]


def write_hf_folder(folder: Path, config: dict[str, Any], state: dict[str, torch.Tensor], tokenizer: Tokenizer) -> None:
    """Write config.json, model.safetensors (bf16), tokenizer.json, tokenizer_config.json and generation_config.json."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in state.items()}
    partial = folder / "model.safetensors.partial"  # renamed at the end: a process may have mapped the old file
    save_file(weights, partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # safetensors creates files that only their owner can read
    partial.replace(folder / "model.safetensors")
    tokenizer.save(str(folder / "tokenizer.json"))
    stop = tokenizer.token_to_id(IM_END)
    pad = tokenizer.token_to_id(PAD)
    _write_json(folder / "config.json", {**config, "eos_token_id": stop, "pad_token_id": pad, "bos_token_id": None})
    _write_json(folder / "generation_config.json", {"do_sample": False, "eos_token_id": stop, "pad_token_id": pad})
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": CHAT_TEMPLATE,
            "eos_token": IM_END,
            "pad_token": PAD,
            "extra_special_tokens": [IM_START, IM_END],
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
        },
    )


def write_gguf(folder: Path, out: Path, file_type: FileType = "Q8_0") -> None:
    """Convert the Hugging Face style `folder` to the GGUF file `out`.

    Matrices get `file_type` (F16 instead of Q8_0 if the row length is not a multiple of 32); norms stay F32.
    """
    import gguf
    import torch
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    partial = out.with_name(f"{out.name}.partial")  # renamed at the end: a process may have mapped the old file
    writer = gguf.GGUFWriter(partial, "llama")
    _write_metadata(writer, config, folder.name, file_type)
    _write_vocabulary(writer, json.loads((folder / "tokenizer.json").read_text()))
    for hf_name, tensor in sorted(load_file(folder / "model.safetensors").items()):
        array = tensor.to(torch.float32).numpy()
        if hf_name.endswith("q_proj.weight"):
            array = _interleave(array, config["num_attention_heads"])
        elif hf_name.endswith("k_proj.weight"):
            array = _interleave(array, config["num_key_value_heads"])
        data, kind = _quantize(array, file_type)
        writer.add_tensor(_gguf_name(hf_name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(out)


def _write_metadata(writer: Any, config: dict[str, Any], name: str, file_type: FileType) -> None:
    import gguf

    rope = config.get("rope_parameters") or {}
    writer.add_name(name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(float(rope.get("rope_theta", config.get("rope_theta", 10000.0))))
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{file_type}" if file_type != "F32" else "ALL_F32"])
    writer.add_float32("general.sampling.temp", 0.0)
    writer.add_chat_template(CHAT_TEMPLATE)


def _write_vocabulary(writer: Any, tokenizer: dict[str, Any]) -> None:
    import gguf

    model = tokenizer["model"]
    special = {entry["id"]: entry["content"] for entry in tokenizer["added_tokens"] if entry["special"]}
    by_id = {index: token for token, index in model["vocab"].items()} | special
    tokens = [by_id[index] for index in range(len(by_id))]
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    ids = {content: index for index, content in special.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(len(tokens))]
    )
    writer.add_token_merges(merges)
    writer.add_eos_token_id(ids[IM_END])
    writer.add_pad_token_id(ids[PAD])
    writer.add_add_bos_token(False)


def _interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows (out, in) of each head from two rotary halves to neighbouring pairs."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _quantize(array: np.ndarray, file_type: FileType) -> tuple[np.ndarray, Any]:
    import gguf
    import numpy as np

    if array.ndim == 1 or file_type == "F32":
        return array.astype(np.float32), gguf.GGMLQuantizationType.F32
    if file_type == "Q8_0" and array.shape[-1] % 32 == 0:
        kind = gguf.GGMLQuantizationType.Q8_0
        return gguf.quants.quantize(array.astype(np.float32), kind), kind
    return array.astype(np.float16), gguf.GGMLQuantizationType.F16


_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def _gguf_name(hf_name: str) -> str:
    if hf_name in _TOP_NAMES:
        return _TOP_NAMES[hf_name]
    _, _, block, part = hf_name.split(".", 3)
    return f"blk.{block}.{_NAMES[part.removesuffix('.weight')]}.weight"


def _write_json(path: Path, payload: dict[str, Any]) -> None:
    path.write_text(json.dumps(payload, indent=2) + "\n")
