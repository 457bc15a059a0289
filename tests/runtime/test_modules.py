"""Lean modules give what the originals give, row for row the same bits, and what is not recognised stays."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn
from transformers import AttentionInterface
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from radixrt.kernels.cpu.layer import NativeLayer
from radixrt.runtime import modules
from radixrt.runtime.backends import choose_product
from radixrt.runtime.batch import Batch
from radixrt.runtime.errors import ModelError
from radixrt.runtime.linear import Linear
from radixrt.runtime.modules import MLP, Attention, Embedding, Experts, RMSNorm, Rotary, by_rows
from radixrt.runtime.slimming import Slimmed, slim
from radixrt.runtime.threads import threads
from radixrt.runtime.transformer import TransformerModel

from . import tiny

ROWS = 64
NUMS_ROWS = (1, 2, 3, 4, 5, 8, 17, 33, ROWS)
DTYPES = [torch.float32, torch.bfloat16]
# How far logits may be from the untouched model's, relative to their norm.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 3e-2}


class OwnRow:
    """A step in which a row attends to nothing but itself: what is left of a model works row by row."""

    is_native = False

    @staticmethod
    def attend(_layer: int, q: torch.Tensor, _k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        return (q[..., : v.shape[2]] / 2 + v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)).contiguous()


def attend_own_row(_module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Any:
    return OwnRow.attend(0, *(x[0].transpose(0, 1) for x in (q, k, v)))[None], None


AttentionInterface.register("own_row", attend_own_row)


def built(name: str, dtype: torch.dtype, **changes: Any) -> Any:
    config = tiny.SERVED[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    model = tiny.build(config, dtype=dtype)
    model.set_attn_implementation("own_row")
    return model


def slimmed(model: Any, *, exact: bool = True, kernel: str = "native") -> Slimmed:
    """Slims it and binds its lean attention to `OwnRow`."""
    native = choose_product(next(model.parameters()).dtype, asked=kernel).native
    with threads(2):
        summary = slim(model, exact=exact, max_rows=ROWS, native=native)
    for module in model.modules():
        if isinstance(module, Attention):
            module.radixrt_binding = SimpleNamespace(step=OwnRow)
    return summary


@torch.inference_mode()
def logits(model: Any, start: int = 0, stop: int = ROWS) -> torch.Tensor:
    """Of the rows [start, stop) of 64 random tokens at random positions."""
    generator = torch.Generator().manual_seed(3)
    token_ids, positions = (torch.randint(1, high, (ROWS,), generator=generator) for high in (tiny.VOCAB_SIZE, 250))
    out: torch.Tensor = model(
        input_ids=token_ids[None, start:stop], position_ids=positions[None, start:stop], use_cache=False
    ).logits[0]
    return out


def differing(rows: Callable[[int, int], torch.Tensor], *, thread_counts: tuple[int, ...] = (1, 2, 3)) -> list[Any]:
    """(threads, rows) where `rows(start, stop)` are not what each alone is on one thread."""
    with threads(1):
        alone = torch.cat([rows(i, i + 1) for i in range(ROWS)])
    found = []
    for num_threads in thread_counts:
        with threads(num_threads):
            found += [
                (num_threads, m)
                for m in NUMS_ROWS
                for start in {0, ROWS - m}
                if not torch.equal(rows(start, start + m), alone[start : start + m])
            ]
    return found


@pytest.mark.parametrize("name", tiny.SERVED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", ["native", "torch"])
def test_a_whole_model_without_attention(name: str, dtype: torch.dtype, kernel: str) -> None:
    """The logits it gave before, and the same bits for each row in any company, unless the summary says why not."""
    model = built(name, dtype)
    expected = logits(model)
    summary = slimmed(model, kernel=kernel)
    assert not summary.kept
    worst = (logits(model) - expected).double().norm(dim=-1) / expected.double().norm(dim=-1)
    assert float(worst.max()) < TOLERANCES[dtype]
    if name == "llama4":
        assert set(summary.flaws) == {f"Llama4{x} multiplies by weights of its own" for x in ("Router", "TextExperts")}
    elif not summary.flaws:
        assert differing(partial(logits, model), thread_counts=(1, 2)) == []


def test_rows_differ_where_exactness_is_off() -> None:
    """The test above has power: here are models that fail it. Which ones do depends on the machine."""
    found = [
        name
        for name in ("llama", "gpt2", "gemma2")
        if not slimmed(model := built(name, torch.float32), exact=False, kernel="torch").flaws
        and differing(partial(logits, model), thread_counts=(1, 2))
    ]
    if not found:
        pytest.skip("on this machine unpadded products and activations give the same bits in every number of rows")


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "mixtral"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_recognised_modules_are_replaced(name: str, dtype: torch.dtype) -> None:
    model = built(name, dtype)
    summary = slimmed(model)
    layer = model.model.layers[0]
    assert type(layer.self_attn) is Attention
    assert type(layer.mlp.experts if name == "mixtral" else layer.mlp) is (Experts if name == "mixtral" else MLP)
    assert type(layer.input_layernorm) is type(model.model.norm) is RMSNorm
    assert type(model.model.rotary_emb) is Rotary
    assert type(model.lm_head) is Linear
    assert (layer.self_attn.layer_idx, model.model.layers[1].self_attn.layer_idx) == (0, 1)
    assert layer.self_attn.window == (tiny.WINDOW if name == "mistral" else None)
    assert sum(count for kind, count in summary.replaced.items() if kind.endswith("Attention")) == 2
    assert "2 " in str(summary)
    with pytest.raises(ModelError, match="engine"):
        layer.self_attn(torch.zeros(1, 1, 32), (torch.ones(1, 1, 8), torch.ones(1, 1, 8)), torch.zeros(1, 1, 1, 1))


@pytest.mark.parametrize("name", [*tiny.WIDE, "gelu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_run_whole_where_the_library_has_all_their_parts(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one call each, with the bits of their parts; a part that the library lacks keeps a layer in parts."""
    if choose_product(dtype, asked="native").native is None:
        pytest.skip(choose_product(dtype, asked="native").reason)
    config = tiny.wide("llama" if name == "gelu" else name)
    if name == "gelu":
        config.hidden_act = "gelu"
    call, calls, found = NativeLayer.__call__, list[NativeLayer](), list[torch.Tensor]()

    def counted(self: NativeLayer, *given: Any) -> torch.Tensor:
        calls.append(self)
        return call(self, *given)

    monkeypatch.setattr(NativeLayer, "__call__", counted)
    token_ids = np.random.default_rng(0).integers(1, tiny.VOCAB_SIZE, (3, 20))
    tables = 1 + np.arange(6).reshape(3, 2)
    for whole in (modules._whole, lambda *_: None):
        monkeypatch.setattr(modules, "_whole", whole)
        model = TransformerModel(tiny.build(config, dtype=dtype), cpu_kernel="native")
        model.allocate(num_pages=6, page_size=16)
        for start, stop in ((0, 17), (17, 20)):
            batch = Batch.side_by_side(token_ids[:, start:stop], start=start, tables=tables, page_size=16)
            found.append(model.forward(batch).logits)
    assert all(map(torch.equal, found[:2], found[2:]))
    assert len(calls) == (2 * config.num_hidden_layers if name in ("llama", "llama3-rope", "mistral", "qwen2") else 0)


def test_biases_are_fused() -> None:
    expected = logits(model := built("llama", torch.float32, attention_bias=True, mlp_bias=True))
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    expected = logits(model)
    assert not slimmed(model).kept
    assert model.model.layers[0].self_attn.qkv.bias.shape == (64,)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


def test_a_window_that_the_lean_attention_does_not_know_stays() -> None:
    """What each asks the step for is compared too: on five rows a window of seven changes no number."""
    model = built("mistral", torch.float32)
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    assert "attends with" in slimmed(model).kept["MistralAttention"]


class OtherAttention(LlamaAttention):
    pass


class OtherLinear(nn.Linear):
    pass


def test_unknown_subclasses_stay() -> None:
    model = built("llama", torch.float32)
    layer = model.model.layers[0]
    layer.self_attn.__class__ = OtherAttention
    layer.mlp.up_proj.__class__ = OtherLinear
    expected = logits(model)
    summary = slimmed(model)
    assert type(layer.self_attn) is OtherAttention
    assert isinstance(layer.self_attn.q_proj, Linear), "its parts are known"
    assert type(model.model.layers[1].self_attn) is Attention
    assert summary.kept == {}
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


def test_a_linear_layer_of_unknown_class_is_a_flaw() -> None:
    model = built("gpt-neox", torch.float32)
    dense = model.gpt_neox.layers[0].attention.dense
    dense.__class__ = OtherLinear
    assert slimmed(model).flaws == ("OtherLinear multiplies by weights of its own",)
    assert model.gpt_neox.layers[0].attention.dense is dense


def test_what_disagrees_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version of a class that computes something else, or lacks what is looked for."""
    forward: Any = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: 1.01 * forward(self, x))
    monkeypatch.setattr(Attention, "__init__", lambda _self, original, _shop: original.missing)
    model = built("llama", torch.float32)
    expected = logits(model)
    summary = slimmed(model)
    assert set(summary.kept) == {"LlamaMLP", "LlamaAttention"}
    assert "differs by" in summary.kept["LlamaMLP"]
    assert "missing" in summary.kept["LlamaAttention"]
    assert type(model.model.layers[1].mlp) is LlamaMLP
    assert summary.replaced["Linear"] == 1 + 2 * 7
    assert differing(partial(logits, model), thread_counts=(1, 2)) == []
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", ["native", "torch"])
def test_tied_embeddings_stay_tied(name: str, dtype: torch.dtype, kernel: str) -> None:
    """One copy of the weight serves both: the head's panels, or the embedding's rows where they lie."""
    model = built(name, dtype, tie_word_embeddings=True)
    model.tie_weights()
    weight, token_ids, expected = model.get_input_embeddings().weight, torch.arange(20)[None], logits(model)
    assert model.get_output_embeddings().weight is weight
    embedded = model.get_input_embeddings()(token_ids).detach()
    slimmed(model, kernel=kernel)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert torch.equal(embedding(token_ids), embedded)
    worst = (logits(model) - expected).double().norm(dim=-1) / expected.double().norm(dim=-1)
    assert float(worst.max()) < TOLERANCES[dtype]
    if isinstance(embedding, Embedding):
        assert choose_product(dtype, asked=kernel).native is not None
        assert head.packed is embedding.packed
        alive = weakref.ref(weight)
        del weight
        gc.collect()
        assert alive() is None
    else:
        assert embedding.weight is weight
        head = getattr(head, "head", head)  # of one that bounds its logits
        assert head.in_place.data_ptr() == weight.data_ptr()


def test_originals_are_freed_and_the_model_is_counted() -> None:
    model = built("llama", torch.float32)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    gone = [
        weakref.ref(parameter)
        for layer in model.model.layers
        for parameter in layer.parameters()
        if parameter.dim() > 1
    ]
    summary = slimmed(model)
    gc.collect()
    assert [alive for alive in gone if alive() is not None] == []
    assert (summary.num_parameters, summary.weight_bytes) == (num_parameters, 4 * num_parameters)


MEASURE = """
import json, re, sys, torch
from radixrt.runtime.conversion import quiet_transformers
from radixrt.runtime.loading import _read, resolve
from radixrt.kernels.cpu.layer import NativeLayer
from radixrt.runtime import modules
from radixrt.runtime.backends import choose_product
from radixrt.runtime.batch import Batch
from radixrt.runtime.slimming import slim

def memory():
    status = open("/proc/self/status").read()
    return [int(re.search(name + r":\\s+(\\d+) kB", status)[1]) * 1024 for name in ("VmRSS", "VmHWM")]

with quiet_transformers():
    hf_model, _, _ = _read(resolve("smollm2-135m"), torch.float32, local=True)
before, _ = memory()  # the file is mapped, its pages not touched
with torch.inference_mode():
    hf_model(input_ids=torch.arange(24)[None], use_cache=False)
native = choose_product(torch.float32, asked=sys.argv[1]).native
summary = slim(hf_model.eval(), exact=True, max_rows=512, owned=True, native=native)
after, peak = memory()
print(json.dumps([summary.weight_bytes, after - before, peak - before]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("kernel", ["native", "torch"])
def test_memory_is_that_of_the_weights(kernel: str) -> None:
    """At the end and at its peak, within 10 %: a replaced weight's mapped pages go before the next one is packed."""
    from radixrt.runtime.conversion import default_model

    default_model()
    run = subprocess.run([sys.executable, "-c", MEASURE, kernel], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    weights, after, peak = json.loads(run.stdout.splitlines()[-1])
    assert after < 1.1 * weights
    assert peak < 1.1 * weights + 2**24


@contextmanager
def counting(module: Any) -> Iterator[list[int]]:
    """The number of positions of each call of `module`."""
    seen: list[int] = []
    hook = module.register_forward_pre_hook(lambda _module, given: seen.append(given[1].shape[1]))
    yield seen
    hook.remove()


@pytest.mark.parametrize("rope", ["default", "llama3", "yarn"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary_tables(rope: str, dtype: torch.dtype) -> None:
    """What the original gives, to the bit or its last one; computed once, and again only for later positions."""
    parameters: dict[str, Any] = {
        "default": {"rope_type": "default", "rope_theta": 10000.0},
        "llama3": tiny._LLAMA3_ROPE,
        "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
    }[rope]
    original = tiny.build(hf.LlamaConfig(**tiny._COMMON, rope_parameters=parameters)).model.rotary_emb
    rotary = Rotary(original, static=True)
    x = torch.zeros(1, 1, 1, dtype=dtype)
    positions = torch.tensor([[200, 0, 3, 3, 77, 199]])
    for ours, its in zip(rotary(x, positions), original(x, positions), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, its, rtol=2e-7 if dtype == torch.float32 else 0, atol=2e-7)
    early = rotary(x, positions)
    with counting(original) as seen:
        rotary(x, positions[:, 1:3])
        assert seen == []
        rotary(x, torch.tensor([[500]]))
        assert set(seen) == {64}
    assert all(torch.equal(a, b) for a, b in zip(early, rotary(x, positions), strict=True))
    assert rotary(x, torch.empty(1, 0, dtype=torch.int64))[0].shape == (1, 0, 8)


def test_angles_that_change_with_the_length_are_not_kept() -> None:
    model = tiny.build(
        hf.Phi3Config(**tiny._COMMON | {"max_position_embeddings": 128}, rope_parameters=tiny.longrope())
    )
    expected = model.model.rotary_emb(torch.zeros(1, 1, 1), torch.tensor([[60, 5, 9]]))
    slimmed(model.to(torch.float32))
    assert not model.model.rotary_emb.static
    for _ in range(2):
        ours = model.model.rotary_emb(torch.zeros(1, 1, 1), torch.tensor([[60, 5, 9]]))
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, expected, strict=True))


def applied(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return function(x[start:stop])


@pytest.mark.parametrize("width", [8, 48, 96, 1000, 1536])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_activations_by_rows(dtype: torch.dtype, width: int) -> None:
    x = torch.randn(ROWS, 2 * width, generator=torch.Generator().manual_seed(0)).to(dtype)
    for name in ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "tanh", "sigmoid"):
        function = ACT2FN[name]
        for half in (x[:, :width], x[:, :width].contiguous()):  # gates are strided views of a fused product
            assert differing(partial(applied, partial(by_rows, function), half)) == [], name
            torch.testing.assert_close(by_rows(function, half), function(half))
    assert by_rows(torch.tanh, x[None, :0]).shape == (1, 0, 2 * width)


def test_plain_activations_differ() -> None:
    """Why activations go by rows; which do depends on the machine."""
    x = torch.randn(ROWS, 1000, generator=torch.Generator().manual_seed(0))
    functions = [ACT2FN[name] for name in ("silu", "gelu_pytorch_tanh", "sigmoid")]
    if not any(differing(partial(applied, function, x)) for function in functions):
        pytest.skip("on this machine torch's scalar and vector code agree to the bit")


class Scaled(nn.Linear):
    """What an adapter looks like: a linear layer that computes something more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 1.05


def adapted(kind: str) -> Any:
    """A model one of whose projections is somebody's own."""
    model = tiny.build(tiny.wide("llama"), dtype=torch.bfloat16)
    mlp = model.model.layers[1].mlp
    if kind == "subclass":
        own = Scaled(mlp.down_proj.in_features, mlp.down_proj.out_features, bias=False).to(torch.bfloat16)
        own.load_state_dict(mlp.down_proj.state_dict())
        mlp.down_proj = own
    elif kind == "hook":
        mlp.down_proj.register_forward_hook(lambda _module, _given, output: output * 1.05)
    else:
        forward = mlp.forward
        mlp.forward = lambda x: forward(x) * 1.05
    return model


@pytest.mark.parametrize("kind", ["subclass", "hook", "forward"])
def test_what_somebody_added_to_a_module_stays(kind: str) -> None:
    """A small change, which a comparison in bfloat16 would let pass."""
    model, token_ids = adapted(kind), torch.arange(20)[None]
    with torch.no_grad():
        expected = model(input_ids=token_ids, use_cache=False).logits
        plain = tiny.build(tiny.wide("llama"), dtype=torch.bfloat16)(input_ids=token_ids, use_cache=False).logits
    mlp = model.model.layers[1].mlp
    slim(model, exact=True, max_rows=64)
    assert model.model.layers[1].mlp is mlp
    with torch.no_grad():
        x = torch.randn(1, 5, mlp.gate_proj.in_features, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        assert torch.allclose(mlp(x), adapted(kind).model.layers[1].mlp(x), rtol=0.05, atol=0.05)
    assert not torch.equal(expected, plain)


def test_a_config_that_two_models_share_stays_as_it_is() -> None:
    config = tiny.SERVED["gemma2"]()
    first, second = (tiny.build(config, dtype=torch.float32) for _ in range(2))
    second.config = first.config
    slim(first, exact=True, max_rows=64)
    assert first.config.final_logit_softcapping is None
    assert second.config.final_logit_softcapping == 3.0
