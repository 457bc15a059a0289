"""Makes a loaded transformers model lean in place, and says what of it is not exact.

Knows nothing of attention, and of a model's architecture only the names of classes it recognises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from radixrt.kernels.cpu.product import NativeProduct, Weight, pack

from .attention import ATTENTION_NAME
from .errors import ModelError
from .linear import Linear, Workshop, weights_in_place
from .memory import Memory
from .modules import MLP, Attention, ByRows, Embedding, Experts, RMSNorm, Rotary, Router, SoftCapped, straight

_Make = Callable[[Any, Workshop], nn.Module]
_KINDS: dict[str, _Make] = {
    "Attention": Attention,
    "MLP": MLP,
    "RMSNorm": RMSNorm,
    "Experts": Experts,
    "TopKRouter": Router,
}
_FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
}
# By full name, so that a subclass, which may compute anything, is not taken for its base.
_RECOGNISED: dict[str, _Make] = {
    f"transformers.models.{folder}.modeling_{folder}.{prefix}{kind}": make
    for folder, prefix in _FAMILIES.items()
    for kind, make in _KINDS.items()
}
_LAYERS = {
    f"transformers.models.{folder}.modeling_{folder}.{prefix}DecoderLayer" for folder, prefix in _FAMILIES.items()
}
_ELEMENTWISE = ("transformers.activations", "torch.nn.modules.activation")
_NOT_ELEMENTWISE = (nn.Softmax, nn.Softmax2d, nn.Softmin, nn.LogSoftmax, nn.GLU, nn.MultiheadAttention)
# A module is kept as it was where its replacement differs by more than this, relative to the norm of a row.
_BOUNDS = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_TRIM = 2**25  # bytes
_CHANGING = ("dynamic", "longrope")  # kinds of RoPE whose angles depend on more than the position


@dataclass(frozen=True, slots=True, kw_only=True)
class Slimmed:
    """What became of a model. `flaws` says why rows may differ in bits; empty where `exact` was asked for and holds."""

    replaced: dict[str, int]  # class name: how many
    kept: dict[str, str]  # class name: why a recognised one stayed
    flaws: tuple[str, ...]
    num_parameters: int
    weight_bytes: int

    def __str__(self) -> str:
        lean = ", ".join(f"{count} {name}" for name, count in self.replaced.items()) or "none"
        return f"lean for {lean}" + "".join(f"; {name} as loaded: {why}" for name, why in self.kept.items())


def slim(
    hf_model: Any, *, exact: bool, max_rows: int, owned: bool = False, native: NativeProduct | None = None
) -> Slimmed:
    """Replace modules of `hf_model` in place and free the originals, one by one; the model's results stay the same.

    Only modules that are nothing but what their class says are replaced: no adapter in the place of a layer, no hook.
    `owned`: nobody else holds the model's tensors, so memory of replaced weights is given back at once, mapped or not.

    Every linear layer is packed for what multiplies: `native` where it serves, else oneDNN, which then takes `max_rows`
    rows at a time. With `exact`, rows of products, activations and rotary angles get the same bits whatever stands
    beside them, on any number of threads.
    """
    parameters = list(hf_model.parameters())
    num_parameters = sum(parameter.numel() for parameter in parameters)
    weight_bytes = sum(parameter.numel() * parameter.itemsize for parameter in parameters)
    del parameters
    hf_model.requires_grad_(False)  # noqa: FBT003
    shop = Workshop(exact=exact, max_rows=max_rows, native=native)
    tied = _tied(hf_model) if shop.multiplies_natively(next(hf_model.parameters()).dtype) else frozenset()
    slimming = _Slimming(shop, _shared(hf_model), tied, Memory() if owned else None)
    with torch.no_grad():
        slimming.children_of(hf_model)
        if slimming.memory is not None:
            slimming.memory.trim(from_bytes=0)
        if exact:
            _move_softcap(hf_model)
    flaws = slimming.shop.flaws() + _own_products(hf_model) if exact else []
    return Slimmed(
        replaced=dict(slimming.replaced),
        kept=slimming.kept,
        flaws=tuple(flaws),
        num_parameters=num_parameters,
        weight_bytes=weight_bytes,
    )


@dataclass(slots=True)
class _Slimming:
    shop: Workshop
    shared: frozenset[int]  # ids of parameters that several modules hold
    tied: frozenset[int]  # of these, those of an embedding and a head that can both read the panels of one packed copy
    memory: Memory | None
    packed: dict[int, Weight] = field(default_factory=dict)  # the copies made of them
    replaced: Counter[str] = field(default_factory=Counter)
    kept: dict[str, str] = field(default_factory=dict)

    def children_of(self, parent: nn.Module) -> None:
        """Replace what can be below `parent`; the memory of what goes is given back at once."""
        for name, child in list(parent.named_children()):
            lean = self._lean(child)
            if lean is None:
                self.children_of(child)
                if _kind(child) in _LAYERS and isinstance(child.self_attn, Attention) and _is_plain(child):
                    child.forward = straight(
                        child, self.shop
                    )  # the layer itself stays: the library collects its outputs by class
                if self.memory is not None:
                    self.memory.trim(from_bytes=_TRIM)
                continue
            kept = {parameter.data_ptr() for parameter in lean.parameters()} | weights_in_place(lean)
            parent._modules[name] = lean
            self.replaced[type(child).__name__] += 1
            for parameter in child.parameters():
                if self.memory and id(parameter) not in self.shared and parameter.data_ptr() not in kept:
                    self.memory.let_go(parameter)

    def _lean(self, module: Any) -> nn.Module | None:
        """What takes the place of `module`, or None if it stays and its parts may be replaced."""
        kind = _kind(module)
        if not all(map(_is_plain, module.modules())):
            return None
        projections = [child for name, child in module.named_children() if name.endswith("_proj")]
        recognised = kind in _RECOGNISED and all(type(child) is nn.Linear for child in projections)
        if recognised and self.shared.isdisjoint(map(id, module.parameters())):
            lean = _agreeing(module, _RECOGNISED[kind], self)
            if lean is not None:
                return lean
        if type(module) is nn.Embedding and id(module.weight) in self.tied:
            return Embedding(module, self._packed(module.weight))
        if type(module) is nn.Linear and id(module.weight) in self.tied:
            return self.shop.linear(module.weight, module.bias, packed=self._packed(module.weight))
        if type(module) is nn.Linear:
            return self.shop.linear(module.weight, module.bias, shared=id(module.weight) in self.shared)
        if kind == "transformers.pytorch_utils.Conv1D" and id(module.weight) not in self.shared:
            return self.shop.linear(module.weight.detach().T.contiguous(), module.bias)
        if type(module).__name__.endswith("RotaryEmbedding") and hasattr(module, "rope_type"):
            kinds = module.rope_type.values() if isinstance(module.rope_type, dict) else [module.rope_type]
            return Rotary(module, static=not any(kind.startswith(_CHANGING) for kind in kinds))
        if self.shop.exact and type(module).__module__ in _ELEMENTWISE and not isinstance(module, _NOT_ELEMENTWISE):
            return ByRows(module)
        return None

    def _packed(self, weight: torch.Tensor) -> Weight:
        """Made once, in pieces whose originals go at once: a vocabulary may be a fifth of a model."""
        if id(weight) not in self.packed:
            release = None if self.memory is None else self.memory.let_go
            self.packed[id(weight)] = pack(weight.detach(), release=release)
        return self.packed[id(weight)]


def _is_plain(module: nn.Module) -> bool:
    """Whether it is called as its class says, and is no layer of somebody's own in the place of a linear one."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    # The library's own hooks collect outputs and change nothing.
    hooked = any(not str(getattr(hook, "__module__", "")).startswith("transformers.") for hook in hooks)
    own = isinstance(module, nn.Linear) and type(module) is not nn.Linear
    return not hooked and not own and not hasattr(module, "parametrizations") and "forward" not in vars(module)


def _kind(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _agreeing(module: Any, make: _Make, slimming: _Slimming) -> nn.Module | None:
    """The lean module, if it gives what `module` gives on random input."""
    name = type(module).__name__
    if name in slimming.kept:
        return None
    try:
        lean = make(module, slimming.shop)
        differ = _difference(module, lean)
    except Exception as error:  # a version of the class that is made otherwise
        slimming.kept[name] = f"it is not made as expected ({error!r:.100})"
        return None
    dtype = next(module.parameters()).dtype
    if not differ <= _BOUNDS[dtype]:
        slimming.kept[name] = f"its replacement differs by {differ:.0e} ({_BOUNDS[dtype]:.0e} is allowed)"
        return None
    return lean.eval()


def _difference(module: Any, lean: nn.Module) -> float:
    """Between what the two give for a few random rows, relative to the norm of a row."""
    weight = next(module.parameters())
    generator = torch.Generator().manual_seed(0)

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(weight)

    config, step = getattr(module, "config", None), _Dense()
    if isinstance(lean, Attention):
        angles = rows(1, _ROWS, lean.head_dim // 2).repeat(1, 1, 2)
        inputs: tuple[Any, ...] = (rows(1, _ROWS, lean.qkv.in_features), (angles.cos(), angles.sin()), None)
        module.radixrt_binding = lean.radixrt_binding = SimpleNamespace(step=step)
    elif isinstance(lean, Experts):
        chosen = torch.arange(2 * _ROWS).view(_ROWS, 2) % module.num_experts
        inputs = (rows(_ROWS, module.hidden_dim), chosen, rows(_ROWS, 2))
    else:
        inputs = (rows(1, _ROWS, lean.gate_up.in_features if isinstance(lean, MLP) else weight.shape[-1]),)
    with _set(config, _attn_implementation=ATTENTION_NAME, _experts_implementation="eager"):
        expected, ours = (_tensors(run(*inputs)) for run in (module, lean))
    lean.__dict__.pop("radixrt_binding", None)
    if step.asked[:1] != step.asked[1:]:
        raise ModelError(f"attends with {step.asked[0]}, not {step.asked[1]}")
    pairs = [(a.double(), b.double()) for a, b in zip(expected, ours, strict=True) if a.is_floating_point()]
    return max(float(((a - b).norm(dim=-1) / a.norm(dim=-1).clamp_min(1e-30)).max()) for a, b in pairs)


_ROWS = 5


class _Dense:
    """A step that holds only the rows it is given: plain causal attention. `asked`: what else each call asked for."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def attend(
        self, _layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, **asked: Any
    ) -> torch.Tensor:
        self.asked.append({"scale": scale} | asked)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1).contiguous()


@contextmanager
def _set(config: Any, **settings: str) -> Iterator[None]:
    """The settings that `config` has are these inside, and as they were after."""
    before = {name: getattr(config, name) for name in settings if hasattr(config, name)}
    try:
        for name in before:
            setattr(config, name, settings[name])
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def _tensors(output: Any) -> list[torch.Tensor]:
    """The tensors that both versions of a module give; attention weights are an extra of the original."""
    if isinstance(output, tuple) and len(output) == 2:
        output = output[0]
    return list(output) if isinstance(output, tuple) else [output]


def _shared(hf_model: nn.Module) -> frozenset[int]:
    """Ids of the parameters that are in two modules: a head tied to the embedding."""
    counts = Counter(id(p) for module in hf_model.modules() for p in module._parameters.values() if p is not None)
    return frozenset(parameter for parameter, count in counts.items() if count > 1)


def _tied(hf_model: nn.Module) -> frozenset[int]:
    """Ids of the parameters that an embedding and a linear layer have in common, both plain, and no other module."""
    holders: dict[int, list[nn.Module]] = {}
    for module in hf_model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append(module)
    return frozenset(
        parameter
        for parameter, modules in holders.items()
        if {type(module) for module in modules} == {nn.Embedding, nn.Linear}
        and len(modules) == 2
        and all(map(_is_plain, modules))
        and all(getattr(module, "max_norm", None) is None for module in modules)
    )


def _move_softcap(hf_model: Any) -> None:
    """Let the head bound its logits, by rows; the model's own code then leaves them alone."""
    cap, head = vars(hf_model.config).get("final_logit_softcapping"), hf_model.get_output_embeddings()
    if cap is not None and isinstance(head, Linear):
        hf_model.set_output_embeddings(SoftCapped(head, cap))
        hf_model.config = copy(hf_model.config)  # another model may have the same
        vars(hf_model.config)["final_logit_softcapping"] = None  # past the setter: some configs refuse None


def _own_products(hf_model: nn.Module) -> list[str]:
    """What multiplies by weights that are no linear layer known here, by class."""
    found = {
        type(module).__name__
        for module in hf_model.modules()
        if any(p is not None and p.dim() > 1 for p in module._parameters.values())
        and not isinstance(module, nn.Embedding)
    }
    return [f"{name} multiplies by weights of its own" for name in sorted(found)]
