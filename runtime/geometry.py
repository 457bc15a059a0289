"""What KV a model needs for a token, read from its config alone.

Knows nothing of weights, pools or requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .checks import integer
from .errors import ModelError
from .loading import dtype_named, load_config

_MAX = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGeometry:
    """Layers that keep keys and values, and the width of both.

    `context_len`: most positions of a sequence, None where that is not known.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    context_len: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            object.__setattr__(self, name, integer(name, getattr(self, name), 1, _MAX))
        if self.context_len is not None:
            object.__setattr__(self, "context_len", integer("context_len", self.context_len, 1, 2**31 - 1))

    def __str__(self) -> str:
        return f"{self.num_layers} layers of {self.num_kv_heads} KV heads of {self.head_dim}"

    def token_bytes(self, dtype: str = "float32") -> int:
        """Bytes of one token's keys and values over all layers. ModelError for a dtype that is not served."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_named(dtype).itemsize

    @classmethod
    def of(cls, name: str | Path) -> KVGeometry:
        """The geometry of a model by name, path or hub id, as an engine would find it; no weights are read.

        ModelError where there is no such model, or where its config does not say the same of all layers.
        """
        config = load_config(name)
        heads = getattr(config, "num_attention_heads", None)
        # A config keeps what it was given under names that its class does not know, and no model reads those.
        kv_heads = (
            getattr(config, "num_key_value_heads", None) if hasattr(type(config), "num_key_value_heads") else heads
        )
        head_dim = getattr(config, "head_dim", None)
        if head_dim is None and isinstance(heads, int) and heads > 0:
            head_dim = getattr(config, "hidden_size", 0) // heads
        found = {
            "num_layers": getattr(config, "num_hidden_layers", None),
            "num_kv_heads": heads if kv_heads is None else kv_heads,
            "head_dim": head_dim,
        }
        unclear = [f"{field} {value!r}" for field, value in found.items() if not isinstance(value, int) or value < 1]
        if unclear:
            raise ModelError(
                f"model {str(name)!r}: its config gives {' and '.join(unclear)}; give the geometry as numbers instead"
            )
        return cls(**found, context_len=getattr(config, "max_position_embeddings", None))  # type: ignore[arg-type]
