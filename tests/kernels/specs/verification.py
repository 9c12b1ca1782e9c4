"""Verification of up to 7 and up to 31 drafts, with and without the draft's probabilities."""

from kernel_compiler import Spec
from updraft.kernels import verification_triton as kernels
from updraft.kernels.vocabulary_launch import TILE

_OUTPUTS = {"accepted": "*i32", "tokens": "*i64"}


def _coupled(block: int) -> Spec:
    pointers = {"token_ids": "*i64", "starts": "*i32", "sampled": "*i64", **_OUTPUTS}
    return Spec(
        f"coupled-{block}",
        kernels.coupled_kernel,
        {**pointers, "width": "i32"},
        {"BLOCK": block},
        tuple(pointers),
        num_warps=1,
        max_registers=64,
    )


def _rejection(kernel: str, *, has_draft: bool, block: int = 8) -> Spec:
    pointers = {"token_ids": "*i64", "starts": "*i32", "target": "*fp32", "seeds": "*i64", "positions": "*i64"}
    pointers |= {"draft": "*fp32"} if has_draft else {}
    integers = {"target_stride": "i32", "draft_stride": "i32"}
    if kernel == "accept":
        pointers |= _OUTPUTS
        integers["width"] = "i32"
    else:
        pointers |= {"accepted": "*i32", "scores": "*fp64", "chosen": "*i32"}
        integers |= {"vocabulary": "i32", "num_tiles": "i32"}
    return Spec(
        f"{kernel}-{has_draft=}-{block}",
        getattr(kernels, f"{kernel}_kernel"),
        {**pointers, **integers},
        {
            "HAS_DRAFT": has_draft,
            **({"BLOCK": block} if kernel == "accept" else {"TILE": TILE}),
            **({} if has_draft else {"draft": None}),
        },
        (*pointers, *(name for name in ("target_stride", "draft_stride", "vocabulary") if name in integers)),
        num_warps=1 if kernel == "accept" else 4,
        max_registers=96,
    )


SPECS = [
    _coupled(8),
    _coupled(32),
    _rejection("accept", has_draft=True),
    _rejection("accept", has_draft=False, block=32),
    _rejection("recover", has_draft=True),
    _rejection("recover", has_draft=False),
]
