"""What the Triton kernels ask of a GPU: registers, spills, shared memory and kind of product, for each configuration.

Compiles for sm_80 and sm_90 and runs nothing: no GPU is needed. See docs/kernels.md for what the figures mean.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from typing import Any

sys.path.append(os.path.dirname(__file__))  # python -P leaves it out
os.environ["TRITON_INTERPRET"] = "0"  # an interpreted kernel cannot be compiled

from _harness import Goal, Options, Report

if find_spec("triton") is None:
    sys.exit(f"{os.path.basename(__file__)} needs triton: pip install 'radixrt[gpu]'")

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from radixrt.kernels.triton.attention import attend_tiles, merge_partials
from radixrt.kernels.triton.config import Config, configs, pad_dim
from radixrt.kernels.triton.pages import copy_pages, write_pairs

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
VARIANTS = {"plain": ("cap", "window"), "window": ("cap",), "softcap": ("window",), "window and softcap": ()}
SHARED_PER_SM = {80: 164 << 10, 90: 228 << 10}
RESERVED_SHARED = 1024  # of each program, by the driver
PAGE_SIZE, GROUP = 16, 4
INDEX_ARRAYS = (
    "items",
    "page_ids",
    "row_ids",
    "entry_partials",
    "positions",
    "partial_indptr",
    "rows",
    "slots",
    "pairs",
)


@dataclass(frozen=True, slots=True)
class Resources:
    """Of one compiled kernel."""

    registers: int  # of a thread
    spilled: int  # bytes of a thread's stack and local memory
    shared: int  # bytes of a program
    mma: str  # how products are computed
    programs: int  # that fit on a multiprocessor at once, by registers and shared memory

    def __str__(self) -> str:
        return f"{self.registers} r {-(-self.shared // 1024)} K {self.programs}/SM"


def compile_for(capability: int, kernel: Any, dtype: str, constants: dict[str, Any], **runtime: str) -> Resources:
    """`runtime` types the arguments that are neither constants nor arrays; pointers and strides are multiples of 16."""
    options = {name: constants[name] for name in ("num_warps", "num_stages") if name in constants}
    types = {}
    for name in kernel.arg_names:
        if name in constants:
            types[name] = "constexpr"
        elif name in INDEX_ARRAYS:
            types[name] = "*i32"
        else:
            types[name] = runtime.get(name) or ("i32" if "stride" in name else f"*{dtype}")
    aligned = [i for i, (name, kind) in enumerate(types.items()) if kind.startswith("*") or "stride" in name]
    source = ASTSource(
        kernel,
        types,
        constexprs={name: value for name, value in constants.items() if name not in options},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        dump = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", dump)}
    ptx = compiled.asm["ptx"]
    shared = compiled.metadata.shared
    threads = 32 * compiled.metadata.num_warps
    by_registers = 65536 // (-(-usage["REG"] // 8) * 8 * threads)
    return Resources(
        registers=usage["REG"],
        spilled=usage["STACK"] + usage["LOCAL"],
        shared=shared,
        mma="wgmma" if "wgmma.mma_async" in ptx else "mma.sync" if "mma.sync" in ptx else "fma",
        programs=min(by_registers, SHARED_PER_SM[capability] // (shared + RESERVED_SHARED), 2048 // threads),
    )


def attention(capability: int, dtype: str, head_dim: int, kind: Config, absent: tuple[str, ...]) -> Resources:
    """`absent`: the arguments that are None, and compile to nothing."""
    constants = kind.constants(group=GROUP, key_dim=head_dim, value_dim=head_dim, page_size=PAGE_SIZE)
    constants |= {"UPCAST": False} | dict.fromkeys(absent)
    runtime = {"partials": "*fp32", "stats": "*fp32", "scale": "fp32", "cap": "fp32", "window": "i32"}
    return compile_for(capability, attend_tiles, dtype, constants, **runtime)


def others(capability: int, dtype: str, head_dim: int) -> dict[str, Resources]:
    """The kernels that have one configuration each, as backend.py launches them."""
    dims = {
        "KEY_DIM": head_dim,
        "VALUE_DIM": head_dim,
        "BLOCK_KEY": pad_dim(head_dim),
        "BLOCK_VALUE": pad_dim(head_dim),
    }
    merge = {"VALUE_DIM": head_dim, "BLOCK_VALUE": pad_dim(head_dim), "BLOCK_PARTIALS": 16}
    floats = {"partials": "*fp32", "stats": "*fp32"}
    return {
        "merge": compile_for(capability, merge_partials, dtype, merge, **floats),
        "write": compile_for(capability, write_pairs, dtype, dims | {"BLOCK_PAIRS": 16}, num_pairs="i32"),
        "copy": compile_for(capability, copy_pages, dtype, {"WORD": tl.int64, "BLOCK": 1024}, caches="*i64"),
    }


def add(report: Report, name: str, found: Resources) -> None:
    report.add(name, found.spilled, "B spilled", goal=Goal.at_most(0), baseline=str(found))
    report.cells[-1] |= {"registers": found.registers, "shared": found.shared, "mma": found.mma}


def main() -> int:
    options = Options.parse(__doc__, clock="cpu")
    report = Report(options=options)
    head_dims = (64, 128) if options.quick else (32, 64, 128, 256)
    dtypes = ("bf16", "fp32") if options.quick else tuple(DTYPES)
    variants = ("plain", "window and softcap") if options.quick else tuple(VARIANTS)
    for capability, variant in product(SHARED_PER_SM, variants):
        report.section(f"sm_{capability}, {variant}", "needs")
        for dtype, head_dim in product(dtypes, head_dims):
            for kind in configs(DTYPES[dtype], head_dim, divmod(capability, 10)):
                found = attention(capability, dtype, head_dim, kind, VARIANTS[variant])
                add(report, f"{dtype} {head_dim}, {kind.block_rows} rows, {found.mma}", found)
    for capability in SHARED_PER_SM:
        report.section(f"sm_{capability}, moves and merge", "needs")
        for name, found in others(capability, "bf16", 128).items():
            add(report, f"{name}, bf16 128", found)
    report.note("needs: registers of a thread, KiB of shared memory of a program, programs on a multiprocessor at once")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
