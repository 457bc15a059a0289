"""The shapes that the attention kernel is compiled for: tile sizes, warps and stages by dtype, head dimension and GPU.

Knows nothing of a step. A plain function instead of autotuning: the same call compiles and rounds the same every time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One compilation of `attend_tiles`, for tiles of `block_rows` packed rows."""

    block_rows: int
    block_tokens: int
    num_warps: int
    num_stages: int

    def constants(self, *, group: int, key_dim: int, value_dim: int, page_size: int) -> dict[str, Any]:
        """The kernel's compile-time arguments and options, all but UPCAST."""
        return {
            "GROUP": group,
            "KEY_DIM": key_dim,
            "VALUE_DIM": value_dim,
            "PAGE_SIZE": page_size,
            "BLOCK_ROWS": self.block_rows,
            "BLOCK_TOKENS": self.block_tokens,
            "BLOCK_KEY": pad_dim(key_dim),
            "BLOCK_VALUE": pad_dim(value_dim),
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


def configs(dtype: torch.dtype, head_dim: int, capability: tuple[int, int]) -> tuple[Config, ...]:
    """One for each height of tile, ascending, for heads of at most `head_dim` numbers.

    Chosen so that nothing spills on sm_80 and sm_90 (docs/kernels.md); not yet timed on a GPU. ValueError for what is
    not served.
    """
    if dtype not in DTYPES or not 1 <= head_dim <= MAX_HEAD_DIM or capability < (8, 0):
        served = ", ".join(str(served).removeprefix("torch.") for served in DTYPES)
        raise ValueError(
            f"no Triton kernel for {dtype}, heads of {head_dim} and sm_{capability[0]}{capability[1]}: they serve "
            f"{served}, heads of 1 to {MAX_HEAD_DIM}, and sm_80 or later"
        )
    if dtype == torch.float32:  # products in full precision have no tensor cores, and 64 rows of them spill
        return (Config(block_rows=16, block_tokens=32, num_warps=8, num_stages=3),)
    block_tokens = 64 if head_dim <= 128 else 32
    few_warps = head_dim <= (128 if capability >= (9, 0) else 64)  # wgmma keeps its operands out of registers
    return (
        Config(block_rows=16, block_tokens=block_tokens, num_warps=4, num_stages=3),
        Config(block_rows=64, block_tokens=block_tokens, num_warps=4 if few_warps else 8, num_stages=2),
    )


def pad_dim(dim: int) -> int:
    """The power of two that holds a head; a product takes 16 at least."""
    return max(16, 1 << (dim - 1).bit_length())
