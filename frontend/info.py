"""What `radixrt info` says: versions, machine, model, KV geometry, and which attention runs.

Knows nothing of the terminal it is shown on.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from radixrt.runtime import Engine


def facts(engine: Engine) -> list[tuple[str, str]]:
    """(name, value) lines in reading order; an empty pair parts two groups."""
    model, page_size, num_pages = engine.model, engine.config.page_size, engine.config.num_pages
    assert num_pages is not None, "an engine resolves its pool"
    page_bytes = model.page_bytes(page_size)
    return [
        ("python", platform.python_version()),
        *((name, _version_of(name)) for name in ("radixrt", "torch", "transformers", "numpy")),
        ("", ""),
        ("threads", f"{torch.get_num_threads()} for torch, on {os.cpu_count()} CPUs"),
        ("OMP_WAIT_POLICY", os.environ.get("OMP_WAIT_POLICY", "unset")),
        ("", ""),
        *model.describe().items(),
        ("context", f"{model.context_len:,} tokens"),
        ("vocabulary", f"{model.vocab_size:,} logits"),
        ("", ""),
        ("KV of a token", f"{page_bytes // page_size:,} bytes"),
        ("KV of a page", f"{page_bytes:,} bytes, {page_size} tokens"),
        ("pages that fit", f"{num_pages:,} in {engine.config.kv_memory}: {num_pages * page_size:,} tokens"),
    ]


def _version_of(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
