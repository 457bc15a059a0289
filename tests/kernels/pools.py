"""What every backend's page copies must do. Knows nothing of layouts but that a page comes first."""

from __future__ import annotations

import numpy as np
import torch

from radixrt.kernels.backend import AttentionBackend, LayerShape


def pages_go_to_another_pool_and_back(backend: AttentionBackend, *, page_size: int, shape: LayerShape) -> None:
    """Asserts that pages copied out to a smaller pool and back to other places hold what they held."""
    generator, cpu = torch.Generator().manual_seed(0), torch.device("cpu")
    layers, others = (
        [backend.allocate(num_pages, page_size, shape, torch.float32, cpu) for _ in range(3)] for num_pages in (6, 3)
    )
    for kv in layers:
        for cache in (kv.k, kv.v):
            cache.copy_(torch.randn(cache.shape, generator=generator))
    wanted = [(kv.k[[2, 5]].clone(), kv.v[[2, 5]].clone()) for kv in layers]
    backend.copy_pages(layers, others, np.array([2, 5]), np.array([1, 3]))
    backend.copy_pages(others, layers, np.array([1, 3]), np.array([6, 1]))
    for kv, (k, v) in zip(layers, wanted, strict=True):
        assert torch.equal(kv.k[[6, 1]], k)
        assert torch.equal(kv.v[[6, 1]], v)
        assert torch.equal(kv.k[[2, 5]], k)
