"""Which attention backend, products and draws serve a model here, and why. Knows nothing of what they compute."""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch

from radixrt.kernels import draws
from radixrt.kernels.backend import AttentionBackend, LayerShape
from radixrt.kernels.cpu import native, product
from radixrt.kernels.cpu.draw import NativeDraw
from radixrt.kernels.cpu.native import NativeAttention
from radixrt.kernels.cpu.product import NativeProduct
from radixrt.kernels.cpu.torch_attention import TorchAttention
from radixrt.kernels.draws import Drawer

from .errors import ModelError

CPU_KERNEL = "RADIXRT_CPU_KERNEL"  # environment variable: what a machine is made to run, for tests and comparisons


@dataclass(frozen=True, slots=True)
class Chosen:
    """A backend, and why it is this one."""

    backend: AttentionBackend
    reason: str

    def __str__(self) -> str:
        return f"{self.backend.name} ({self.reason}); shared runs of pages are read once"


def probe_backend(device: torch.device) -> AttentionBackend:
    """The backend that serves any shape on this device, and the probe's small pages. ModelError where it is missing."""
    if device.type == "cuda":
        try:
            from radixrt.kernels.triton.backend import TritonAttention
        except ImportError as error:
            raise ModelError(f"device {device}: attention needs triton, {error}; install radixrt[gpu]") from error

        backend: AttentionBackend = TritonAttention(device)
        return backend
    return TorchAttention()


def choose_backend(
    device: torch.device,
    dtype: torch.dtype,
    page_size: int,
    shapes: Iterable[LayerShape],
    *,
    asked: str | None = None,
) -> Chosen:
    """The backend for these layers. `asked`: "native" or "torch" on the CPU, by default what RADIXRT_CPU_KERNEL says.

    The native kernel runs where it serves every layer and can be built, plain torch elsewhere, with one warning where
    only the build failed. Raises ModelError where native was asked for and cannot serve.
    """
    if device.type != "cpu":
        return Chosen(probe_backend(device), f"the device is {device}")
    asked = _resolve(asked)
    if asked == "torch":
        return Chosen(TorchAttention(), "it was asked for")
    unserved = next(filter(None, (native.unserved(dtype, page_size, shape) for shape in shapes)), None)
    built = None if unserved else native.build()
    if built is not None and built.library is not None:
        return Chosen(NativeAttention(built.library), f"compiled for this machine: {built.reason}")
    reason = unserved if built is None else built.reason
    if asked == "native":
        raise ModelError(f"the native attention kernel was asked for and cannot serve: {reason}")
    if built is not None:
        _warn_unbuilt(built.reason)
    return Chosen(TorchAttention(), f"native cannot serve: {reason}")


@dataclass(frozen=True, slots=True)
class ChosenProduct:
    """The native product for a model's weights, or None where oneDNN and torch multiply, and why."""

    native: NativeProduct | None
    reason: str

    def __str__(self) -> str:
        return f"{'oneDNN or torch' if self.native is None else 'native'} ({self.reason})"


def choose_product(dtype: torch.dtype, *, asked: str | None = None) -> ChosenProduct:
    """What multiplies by weights of this dtype on the CPU; `asked` as for `choose_backend`.

    Nothing is refused here: to ask for the native kernels is to ask for the attention, and for products that pay.
    """
    library, missing = _library(asked, product.unserved(dtype))
    if library is None:
        return ChosenProduct(None, missing)
    return ChosenProduct(NativeProduct(library), "the same bits in any company by construction")


@dataclass(frozen=True, slots=True)
class ChosenDraw:
    """What draws tokens, and why it is this."""

    draw: Drawer
    reason: str

    def __str__(self) -> str:
        return f"{'native' if isinstance(self.draw, NativeDraw) else 'numpy'} ({self.reason})"


def choose_draw(*, asked: str | None = None) -> ChosenDraw:
    """What draws from rows of logits in the host's memory; `asked` as for `choose_product`."""
    library, missing = _library(asked)
    if library is None:
        return ChosenDraw(draws.draw, missing)
    return ChosenDraw(NativeDraw(library), "all rows of a step at once")


def _library(asked: str | None, unserved: str | None = None) -> tuple[ctypes.CDLL | None, str]:
    """The native library, or None and why it is not to be used. It is not built where it would not serve."""
    if _resolve(asked) == "torch":
        return None, "torch was asked for"
    if unserved is not None:
        return None, unserved
    return native.build().library, "the native library has no build"


def _resolve(asked: str | None) -> str | None:
    asked = asked or os.environ.get(CPU_KERNEL) or None
    if asked not in (None, "native", "torch"):
        raise ModelError(
            f"{CPU_KERNEL} is {asked!r}; it must be native or torch, or unset for the faster one that serves"
        )
    return asked


@cache
def _warn_unbuilt(reason: str) -> None:
    """Once in a process: what a compiler would make faster still runs."""
    warnings.warn(f"attention runs in plain torch, slower: the native kernel has no build, {reason}", stacklevel=2)
