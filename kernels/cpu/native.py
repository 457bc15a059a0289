"""The native CPU backend: builds native.cpp on first use, and serves it as an attention backend through ctypes.

Knows nothing of models or of how plans are made. What the kernel does is written in native.cpp and native/*.h.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import platform
import shlex
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..backend import LayerKV, LayerShape
from ..plan import GROUP_LEN, AttentionPlan, IntArray
from .huge import zeros

_SOURCES = Path(__file__).parent
_MAIN = _SOURCES / "native.cpp"
# Bits must not depend on what a compiler may contract or reorder: never -ffast-math, and every fma is spelled out.
_FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-fPIC", "-shared", "-fopenmp", "-fvisibility=hidden", "-Wno-psabi", f"-DRADIXRT_GROUP_LEN={GROUP_LEN}"),
)
PAIRS = {torch.float32: 1, torch.bfloat16: 2}  # how many neighbours lie side by side in the cache and in packed weights
DTYPES = tuple(PAIRS)
_PAGE_SIZES = (8, 16, 32, 64, 128)
_DIGEST_LEN = hashlib.sha256().digest_size
NO_WINDOW = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Build:
    """The compiled kernel, or why there is none."""

    library: ctypes.CDLL | None
    reason: str  # one line: where the library is, or what failed


@cache
def build() -> Build:
    """Compile the kernel for this machine, or load it from `$RADIXRT_CACHE/native` where an earlier process has.

    The compiler is `$CXX`, or c++. Takes about 6 s the first time. Two processes may build side by side: each renames
    its own complete file into place. A file ends with its digest, so one that was cut off is built again.
    """
    compiler = os.environ.get("CXX") or "c++"
    try:
        command = shlex.split(compiler)
        version = subprocess.run([*command, "--version"], capture_output=True, check=True).stdout
        sources = [_MAIN, *sorted((_SOURCES / "native").glob("*.h"))]
        flags = (*_FLAGS, *_bfloat16_flags(cpu := cpu_facts()))
        key = hashlib.sha256(version + "\0".join([cpu, *flags, *(path.read_text() for path in sources)]).encode())
        folder = Path(os.path.expanduser(os.environ.get("RADIXRT_CACHE") or "~/.cache/radixrt")) / "native"
        target = folder / f"{key.hexdigest()[:24]}.so"
        if not _is_whole(target):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                built = Path(scratch) / target.name
                command += [*flags, str(_MAIN), "-o", str(built)]
                subprocess.run(command, capture_output=True, text=True, errors="replace", check=True)
                with built.open("r+b") as file:
                    digest = hashlib.sha256(file.read()).digest()
                    file.write(digest)  # a loader does not look behind the last section
                    file.flush()
                    os.fsync(file.fileno())
                built.replace(target)
        return Build(_declare(ctypes.CDLL(str(target))), str(target))
    except subprocess.CalledProcessError as error:
        said = [line for line in str(error.stderr).splitlines() if line.strip()] or [f"exit status {error.returncode}"]
        first = next((line for line in said if "error" in line), said[0])
        return Build(None, f"{compiler} cannot compile it: {first.strip()}")
    except (OSError, ValueError, AttributeError) as error:  # no compiler, no writable cache, no library of ours
        return Build(None, f"it cannot be built with {compiler}: {error}")


def _is_whole(path: Path) -> bool:
    """Whether a library is there and ends with the digest of the rest."""
    if not path.exists():
        return False
    content = path.read_bytes()
    return hashlib.sha256(content[:-_DIGEST_LEN]).digest() == content[-_DIGEST_LEN:]


def unserved(dtype: torch.dtype, page_size: int, shape: LayerShape) -> str | None:
    """Why the kernel does not serve this configuration, or None where it does."""
    if dtype not in PAIRS:
        return f"{dtype} is neither float32 nor bfloat16"
    if page_size not in _PAGE_SIZES:
        return f"page size {page_size} is none of {', '.join(map(str, _PAGE_SIZES))}"
    if shape.key_dim != shape.value_dim:
        return f"keys have {shape.key_dim} elements and values {shape.value_dim}"
    if shape.key_dim % 16 or not 32 <= shape.key_dim <= 256:
        return f"head dimension {shape.key_dim} is no multiple of 16 from 32 to 256"
    return None


@cache
def cpu_facts() -> str:
    """The CPU's vendor and features, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return "\n".join(line for line in lines if line.startswith(("vendor_id", "model name", "flags", "Features")))


def _bfloat16_flags(cpu: str) -> tuple[str, ...]:
    """How attention multiplies bfloat16: in tiles, or by an instruction for pairs (native/simd.h), or else widened."""
    if "amx_bf16" in cpu and _has_tiles():
        return ("-DRADIXRT_AMX",)
    return ("-DRADIXRT_BF16_DOT",) if "avx512_bf16" in cpu and "AuthenticAMD" in cpu else ()


@cache
def _has_tiles() -> bool:
    """Ask Linux, which saves a process's tile registers only once it has asked, for all of its threads."""
    arch_prctl, request, tile_data = 158, 0x1023, 18  # of x86-64; ARCH_REQ_XCOMP_PERM; its number in XCR0
    try:
        return bool(ctypes.CDLL(None).syscall(arch_prctl, request, tile_data) == 0)
    except (OSError, AttributeError):
        return False


# The library's arguments, packed as the structures of the same names: ctypes takes ten times as long to fill one.
_ATTENTION = struct.Struct("@" + 4 * "Pqq" + "2P4q2fi")  # native/attention.h
PRODUCT = struct.Struct("@5P5q")  # native/product.h
NORM = struct.Struct("@3P5qf")  # native/norm.h
ROTATION = struct.Struct("@3P5q")  # native/rotation.h
GATE = struct.Struct("@2P5q")  # native/gate.h
LAYER = struct.Struct("@10P6q3f")  # native/layer.h
LAYER_ROWS = struct.Struct("@6P2q")
DRAW = struct.Struct("@2Pq3d2Q")  # native/draw.h


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """`[..., W]` as `[M, W]` whose rows are contiguous, copied where they are not."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def by_dtype(library: ctypes.CDLL, verb: str) -> dict[torch.dtype, Any]:
    """The library's function of this name for each of `DTYPES`."""
    return {dtype: getattr(library, f"radixrt_{verb}_{str(dtype).removeprefix('torch.')}") for dtype in DTYPES}


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, packed, int32, int64 = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, ctypes.c_int64
    library.radixrt_prepare.argtypes = (int64, int32, pointer, pointer)
    library.radixrt_prepare.restype = pointer
    library.radixrt_free.argtypes = (pointer,)
    arguments: dict[str, tuple[Any, ...]] = dict.fromkeys(("multiply", "normalise", "rotate", "gate"), (packed,))
    arguments |= {"attend": (pointer, packed), "run": (pointer, packed, packed)}
    for verb, types in arguments.items():
        for function in by_dtype(library, verb).values():
            function.argtypes, function.restype = types, None
    library.radixrt_draw.argtypes, library.radixrt_draw.restype = (packed, int64, int64, pointer), None
    library.radixrt_copy_pages.argtypes = (pointer, pointer, pointer, int64, pointer, pointer, int64, int32)
    library.radixrt_copy_pages.restype = None
    return library


class Prepared:
    """A step inside the library, which keeps its own copy of the plan; freed with this object."""

    def __init__(self, library: ctypes.CDLL, plan: AttentionPlan, write_rows: IntArray, write_slots: IntArray) -> None:
        given = (plan.positions, plan.starts, plan.page_indptr, plan.page_ids, plan.row_indptr, plan.row_ids)
        arrays = [np.ascontiguousarray(array, dtype=np.int64) for array in (*given, write_rows, write_slots)]
        pointers = (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
        sizes = (ctypes.c_int64 * len(arrays))(*map(len, arrays))
        self._free = library.radixrt_free
        self.num_rows = plan.num_rows
        self.page_size = plan.page_size
        self.handle: int | None = library.radixrt_prepare(plan.page_size, plan.exact, pointers, sizes)

    def __del__(self) -> None:
        if getattr(self, "handle", None) is not None:
            self._free(self.handle)


class NativeAttention:
    """An AttentionBackend over K `[num_pages + 1, Hkv, D / P, page_size, P]` and V `[.., Hkv, page_size / P, D, P]`.

    P is 1 for float32, 2 for bfloat16. K lies transposed within a page, so that a vector holds one element of 16
    positions and scores need no sum across lanes. Serves what `unserved` passes; uses as many threads as torch does.
    """

    name = "native"
    # Two readers of one group: tree / by sequence 0.91 to 0.97 (benchmarks/attention.py --sweep; SmolLM2 and Llama-8B,
    # both dtypes), 0.5 to 0.9 with more of either. Shorter runs, which only inexact plans share, cost 0.9 to 1.2.
    sharing_cost = GROUP_LEN

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._attend = by_dtype(library, "attend")

    def inexact(self, dtype: torch.dtype, page_size: int, shape: LayerShape, group: int) -> str | None:
        return None  # a row's numbers depend on that row alone: native/block.h, native/tiled_attention.h

    def allocate(
        self, num_pages: int, page_size: int, shape: LayerShape, dtype: torch.dtype, device: torch.device
    ) -> LayerKV:
        """A layer's cache of zeros; ValueError for a configuration or device that is not served."""
        reason = unserved(dtype, page_size, shape)
        if reason is None and device.type != "cpu":
            reason = f"{device} is not the CPU"
        if reason is not None:
            raise ValueError(f"the native kernel cannot serve this cache: {reason}")
        pair, dim = PAIRS[dtype], shape.key_dim
        pages = (num_pages + 1, shape.num_heads)
        return LayerKV(
            k=zeros(*pages, dim // pair, page_size, pair, dtype=dtype),
            v=zeros(*pages, page_size // pair, dim, pair, dtype=dtype),
        )

    def prepare(self, plan: AttentionPlan, write_rows: IntArray, write_slots: IntArray) -> Prepared:
        return Prepared(self._library, plan, write_rows, write_slots)

    def attend(
        self,
        q: torch.Tensor,  # [T, H, D]
        k: torch.Tensor,  # [T, Hkv, D]
        v: torch.Tensor,  # [T, Hkv, D]
        kv: LayerKV,
        step: Prepared,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        num_rows, num_heads, dim = q.shape
        _, num_kv_heads, pairs, page_size, pair = kv.k.shape
        expected = (num_rows, num_kv_heads, pairs * pair)
        if (
            (k.shape, v.shape, dim, num_rows, page_size)
            != (expected, expected, expected[2], step.num_rows, step.page_size)
            or num_heads % num_kv_heads
            or not q.dtype == k.dtype == v.dtype == kv.k.dtype
        ):
            raise ValueError(
                f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} do not fit {step.num_rows} rows over a cache "
                f"{list(kv.k.shape)} of pages of {step.page_size}"
            )
        if not scale > 0 or (window is not None and window < 1) or (softcap is not None and not softcap > 0):
            raise ValueError(f"scale {scale}, window {window} and softcap {softcap} must be positive")
        q, k, v = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (q, k, v))
        out = q.new_empty(num_rows, num_heads, dim)
        call = _ATTENTION.pack(
            *(q.data_ptr(), *q.stride()[:2]),
            *(k.data_ptr(), *k.stride()[:2]),
            *(v.data_ptr(), *v.stride()[:2]),
            *(out.data_ptr(), num_heads * dim, dim),
            *(kv.k.data_ptr(), kv.v.data_ptr()),
            *(num_heads, num_kv_heads, dim, NO_WINDOW if window is None else window),
            *(scale, softcap or 0.0, torch.get_num_threads()),
        )
        self._attend[q.dtype](step.handle, call)
        return out

    def copy_pages(self, source: Sequence[LayerKV], target: Sequence[LayerKV], src: IntArray, dst: IntArray) -> None:
        caches = [cache for kv in source for cache in (kv.k, kv.v)]
        others = [cache for kv in target for cache in (kv.k, kv.v)]
        pointers, to = ((ctypes.c_void_p * len(many))(*(c.data_ptr() for c in many)) for many in (caches, others))
        sizes = (ctypes.c_int64 * len(caches))(*(math.prod(cache.shape[1:]) * cache.itemsize for cache in caches))
        src, dst = (np.ascontiguousarray(pages, dtype=np.int64) for pages in (src, dst))
        self._library.radixrt_copy_pages(
            pointers, to, sizes, len(caches), src.ctypes.data, dst.ctypes.data, len(src), torch.get_num_threads()
        )

    def fill_slots(self, layers: Sequence[LayerKV], slots: IntArray, value: float) -> None:
        slot = torch.as_tensor(slots)
        for kv in layers:
            page_size, pair = kv.k.shape[3], kv.k.shape[4]
            page, offset = slot // page_size, slot % page_size
            kv.k[page, :, :, offset, :] = value
            kv.v[page, :, offset // pair, :, offset % pair] = value

    def unpack(self, kv: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
        num_pages, num_heads, _, page_size, _ = kv.k.shape
        k = kv.k.permute(0, 3, 1, 2, 4).reshape(num_pages, page_size, num_heads, -1)
        v = kv.v.permute(0, 2, 4, 1, 3).reshape(num_pages, page_size, num_heads, -1)
        return k.clone(), v.clone()
