"""Tiny random models of every served architecture against `transformers.generate`; the refused ones; bad values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from radixrt.runtime.batch import Batch
from radixrt.runtime.errors import ModelError
from radixrt.runtime.transformer import TransformerModel

from . import tiny

NUM_NEW = 10


class Driver:
    """Sequences over one model, driven without an engine: pages are handed out in shuffled order, never shared."""

    def __init__(self, model: TransformerModel, *, page_size: int = 4, num_pages: int = 128) -> None:
        self.model = model
        self.page_size = page_size
        self.free = (np.random.default_rng(0).permutation(num_pages) + 1).tolist()
        self.tables: list[list[int]] = []
        self.tokens: list[list[int]] = []  # written so far
        model.allocate(num_pages, page_size)
        model.poison_slots(np.arange(page_size, (num_pages + 1) * page_size))

    def add(self) -> int:
        self.tables.append([])
        self.tokens.append([])
        return len(self.tables) - 1

    def batch(self, chunks: dict[int, Sequence[int]]) -> Batch:
        """Rows that append these tokens to these sequences; the logits of each one's last row."""
        positions, slots, pages = [], [], []
        for sequence, chunk in chunks.items():
            table, written = self.tables[sequence], self.tokens[sequence]
            rows = np.arange(len(written), len(written) + len(chunk))
            written.extend(chunk)
            while len(table) * self.page_size < len(written):
                table.append(self.free.pop())
            positions.append(rows)
            slots.append(np.array(table)[rows // self.page_size] * self.page_size + rows % self.page_size)
            pages.append(np.array(table))
        row_indptr = np.cumsum([0, *map(len, positions)])
        return Batch(
            token_ids=np.concatenate([np.array(chunk) for chunk in chunks.values()]),
            positions=np.concatenate(positions),
            write_rows=np.arange(row_indptr[-1]),
            write_slots=np.concatenate(slots),
            row_indptr=row_indptr,
            page_indptr=np.cumsum([0, *map(len, pages)]),
            page_ids=np.concatenate(pages),
            namespaces=("",) * len(chunks),
            logit_rows=row_indptr[1:] - 1,
        )

    def run(self, chunks: dict[int, Sequence[int]]) -> dict[int, int]:
        """One step; the greedy next token of each sequence."""
        forward = self.model.forward(self.batch(chunks))
        assert forward.finite.all()
        assert forward.logits.dtype == torch.float32
        return dict(zip(chunks, forward.logits.argmax(dim=-1).tolist(), strict=True))

    def greedy(self, *chunks: Sequence[int]) -> list[int]:
        """Prefill a new sequence in these chunks, then decode it alone."""
        sequence = self.add()
        for chunk in chunks:
            token = self.run({sequence: chunk})[sequence]
        new = [token]
        while len(new) < NUM_NEW:
            new.append(self.run({sequence: new[-1:]})[sequence])
        return new


@pytest.fixture(scope="module", params=tiny.SERVED)
def served(request: pytest.FixtureRequest) -> tuple[Any, TransformerModel]:
    """An untouched model that never ends by itself, and the same weights behind our attention."""
    config = tiny.SERVED[request.param]
    hf_model = tiny.build(config())
    hf_model.generation_config.eos_token_id = None
    return hf_model, TransformerModel(tiny.build(config()))


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, tiny.VOCAB_SIZE, length)]


def oracle(hf_model: Any, ids: list[int]) -> list[int]:
    tokens = torch.tensor([ids])
    out = hf_model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=NUM_NEW)
    generated: list[int] = out[0, len(ids) :].tolist()
    return generated


def test_alone_equals_generate(served: tuple[Any, TransformerModel]) -> None:
    hf_model, model = served
    expected = oracle(hf_model, prompt(19))
    assert len(set(expected)) > 2, "a model that repeats itself shows nothing"
    assert Driver(model).greedy(prompt(19)) == expected


def test_prefill_split_at_every_token_equals_generate(served: tuple[Any, TransformerModel]) -> None:
    hf_model, model = served
    ids = prompt(19)
    expected = oracle(hf_model, ids)
    for split in range(1, len(ids)):
        driver = Driver(model)
        sequence = driver.add()
        driver.run({sequence: ids[:split]})
        assert driver.run({sequence: ids[split:]})[sequence] == expected[0], split
    assert Driver(model).greedy(*([token] for token in ids)) == expected


def test_batched_equals_generate(served: tuple[Any, TransformerModel]) -> None:
    """Short beside long, and prefill beside decode: each gives what it gives alone."""
    hf_model, model = served
    prompts = [prompt(3, 1), prompt(70, 2), prompt(19, 0)]
    driver = Driver(model)
    for _ in prompts:
        driver.add()
    new: dict[int, list[int]] = {0: [], 1: [], 2: []}
    chunks: dict[int, Sequence[int]] = {0: prompts[0], 1: prompts[1][:40]}
    upcoming: list[dict[int, Sequence[int]]] = [{1: prompts[1][40:], 2: prompts[2][:5]}, {2: prompts[2][5:]}]
    while chunks:
        tokens = driver.run(chunks)
        for sequence, token in tokens.items():
            if len(driver.tokens[sequence]) >= len(prompts[sequence]):
                new[sequence].append(token)
        chunks = {sequence: out[-1:] for sequence, out in new.items() if 0 < len(out) < NUM_NEW}
        chunks |= upcoming.pop(0) if upcoming else {}
    assert [new[i] for i in range(3)] == [oracle(hf_model, ids) for ids in prompts]


def test_one_write_reaches_several_slots(served: tuple[Any, TransformerModel]) -> None:
    """A row written into two sequences' pages: each then continues on its own."""
    hf_model, model = served
    ids, other = prompt(10), prompt(10)[:-1] + prompt(1, 9)
    driver = Driver(model)
    first, second = driver.add(), driver.add()
    batch = driver.batch({first: ids[:-1]})
    twin = driver.batch({second: ids[:-1]})
    rows, slots = np.arange(9), np.concatenate([batch.write_slots, twin.write_slots])
    fields = {name: getattr(batch, name) for name in batch.__slots__}
    model.forward(Batch(**fields | {"write_rows": np.concatenate([rows, rows]), "write_slots": slots}))
    tokens = driver.run({first: ids[-1:], second: other[-1:]})
    assert list(tokens.values()) == [oracle(hf_model, ids)[0], oracle(hf_model, other)[0]]


def test_page_copies_carry_every_layer(served: tuple[Any, TransformerModel]) -> None:
    hf_model, model = served
    ids = prompt(10)
    driver = Driver(model)
    sequence = driver.add()
    driver.run({sequence: ids[:-1]})
    source = driver.tables[sequence]
    copies = [driver.free.pop() for _ in source]
    model.copy_pages(np.array(source), np.array(copies))
    slots = np.array(source)[:, None] * driver.page_size + np.arange(driver.page_size)
    model.poison_slots(slots.ravel())
    driver.tables[sequence] = copies
    assert driver.run({sequence: ids[-1:]})[sequence] == oracle(hf_model, ids)[0]


@pytest.mark.parametrize("name", tiny.REFUSED)
def test_unfaithful_architectures_are_refused(name: str) -> None:
    config, reason = tiny.REFUSED[name]
    model = tiny.build(config())
    with pytest.raises(ModelError, match=reason) as refused:
        TransformerModel(model)
    assert type(model).__name__ in str(refused.value)
    assert "\n" not in str(refused.value)


def test_finite_has_an_entry_for_each_token(served: tuple[Any, TransformerModel]) -> None:
    _, model = served
    driver = Driver(model)
    first, second = driver.add(), driver.add()
    steps: list[dict[int, Sequence[int]]] = [{first: prompt(7), second: prompt(3)}, {first: [5], second: prompt(6)}]
    for chunks in steps:
        forward = model.forward(driver.batch(chunks))
        assert forward.finite.shape == (sum(map(len, chunks.values())),)
        assert forward.logits.shape == (len(chunks), model.vocab_size)


@pytest.mark.parametrize("name", tiny.SERVED)
def test_a_row_that_is_not_finite_is_told_in_every_architecture(name: str) -> None:
    """Among rows whose logits nobody asked for, as a head that shares the broken embedding would break them all."""
    hf_model = tiny.build(tiny.SERVED[name]())
    model = TransformerModel(hf_model)
    hf_model.get_input_embeddings().weight.data[7] = torch.nan
    driver = Driver(model)
    finite = model.forward(driver.batch({driver.add(): [5, 7, 6], driver.add(): [8, 9, 10]})).finite
    assert finite[[1, 3, 4]].tolist() == [False, True, True]


def test_models_that_give_logits_of_rows_not_asked_for_are_refused() -> None:
    model = tiny.build(tiny.SERVED["llama"]())
    forward = model.forward
    model.forward = lambda logits_to_keep=0, **options: forward(**options)
    with pytest.raises(ModelError, match="LlamaForCausalLM cannot be served: it does not serve logits_to_keep"):
        TransformerModel(model)


def test_models_that_show_no_row_per_token_are_refused() -> None:
    model = tiny.build(tiny.SERVED["llama"]())
    model.modules = lambda: iter([layer.self_attn for layer in model.model.layers])
    with pytest.raises(ModelError, match="LlamaForCausalLM cannot be served: no part of it"):
        TransformerModel(model)


@pytest.mark.parametrize("output", [None, (), object(), (torch.zeros(1, 3),)])
def test_whatever_a_model_gives_is_refused_in_one_line(output: Any) -> None:
    model = tiny.build(tiny.SERVED["llama"]())
    model.forward = lambda **_: output
    with pytest.raises(ModelError, match=r"^LlamaForCausalLM cannot be served: .*$"):
        TransformerModel(model)


def test_encoder_decoders_are_refused() -> None:
    config = hf.T5Config(vocab_size=96, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4)
    with pytest.raises(ModelError, match=r"T5ForConditionalGeneration .* encoder-decoder"):
        TransformerModel(hf.T5ForConditionalGeneration(config))


def test_bidirectional_models_are_refused_by_what_they_compute() -> None:
    config = hf.BertConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    with pytest.raises(ModelError, match=r"BertLMHeadModel cannot be served: .*layer 0"):
        TransformerModel(tiny.build(config))


def test_the_first_layer_that_differs_is_named() -> None:
    """A layer whose attention adds to its result only when the registered function runs."""
    model = tiny.build(tiny.SERVED["llama"]())

    def meddle(module: Any, _inputs: Any, output: Any) -> Any:
        return (output[0] + (module.config._attn_implementation != "eager"), *output[1:])

    model.model.layers[1].self_attn.register_forward_hook(meddle)
    with pytest.raises(ModelError, match="LlamaForCausalLM cannot be served: layer 1 is the first to differ"):
        TransformerModel(model)


def test_layers_that_do_not_attend_through_us_are_refused() -> None:
    model = tiny.build(tiny.SERVED["llama"]())
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (torch.zeros_like(hidden_states), None)
    with pytest.raises(ModelError, match="1 of its 2 layers call"):
        TransformerModel(model)


def test_windows_given_only_as_masks_are_refused() -> None:
    model = tiny.build(tiny.SERVED["gemma3"]())
    model.model.layers[1].self_attn.sliding_window = None
    with pytest.raises(ModelError, match="layer 1 has a sliding window"):
        TransformerModel(model)


@pytest.mark.parametrize("width", [tiny.CONTEXT_LEN - 1, tiny.CONTEXT_LEN])
@pytest.mark.parametrize("name", ["gemma3", "llama"])
def test_windows_no_smaller_than_the_context_need_no_mask(name: str, width: int) -> None:
    model = tiny.build(tiny.SERVED[name]())
    model.config.sliding_window = width
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    if width < tiny.CONTEXT_LEN:
        with pytest.raises(ModelError, match="only as a mask"):
            TransformerModel(model)
    else:
        assert TransformerModel(model).context_len == width


def test_chunked_attention_is_refused() -> None:
    model = tiny.build(tiny.SERVED["llama"]())
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(ModelError, match="chunked_attention"):
        TransformerModel(model)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_rope_that_depends_on_length_is_capped_and_said(kind: str) -> None:
    """A long neighbour in the packed row must not change a short sequence's angles."""
    config = tiny.SERVED["phi3"]()
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    config.rope_parameters = tiny.longrope() if kind == "longrope" else dynamic
    config.original_max_position_embeddings = 64
    model = TransformerModel(tiny.build(config))
    expected_len = 64 if kind == "longrope" else tiny.CONTEXT_LEN
    assert model.context_len == expected_len
    capped = [f"context capped at 64 tokens: beyond, {kind} RoPE depends on the longest row"]
    assert list(model.notes) == (capped if expected_len < tiny.CONTEXT_LEN else [])
    driver = Driver(model)
    short, long = driver.add(), driver.add()
    ids = prompt(12)
    beside = driver.run({short: ids, long: prompt(expected_len, 5)})[short]
    assert beside == oracle(tiny.build(config), ids)[0]


def test_bfloat16_models_are_served() -> None:
    model = TransformerModel(tiny.build(tiny.SERVED["llama"](), dtype=torch.bfloat16))
    assert len(Driver(model).greedy(prompt(19))) == NUM_NEW


def test_what_overflows_in_float16_is_refused_with_the_way_out() -> None:
    model = tiny.build(tiny.SERVED["llama"](), dtype=torch.float16)
    model.model.layers[0].mlp.up_proj.weight.data *= 1e4
    with pytest.raises(ModelError, match=r"layer 0 .* infinite values .* load it in bfloat16 or float32"):
        TransformerModel(model)


@pytest.mark.parametrize("where", ["config", "generation_config"])
def test_ends_outside_the_vocabulary_are_dropped_and_said(where: str) -> None:
    hf_model = tiny.build(tiny.SERVED["llama"]())
    hf_model.generation_config.eos_token_id = None
    getattr(hf_model, where).eos_token_id = [5, tiny.VOCAB_SIZE, -1, tiny.VOCAB_SIZE - 1]
    model = TransformerModel(hf_model)
    assert model.eos_token_ids == {5, tiny.VOCAB_SIZE - 1}
    assert model.notes == ("end-of-text ids -1, 96 are ignored: the vocabulary has 96 ids",)


def test_facts_about_the_model() -> None:
    model = TransformerModel(tiny.build(tiny.SERVED["llama"]()))
    assert model.vocab_size == tiny.VOCAB_SIZE
    assert model.context_len == tiny.CONTEXT_LEN
    assert model.eos_token_ids == {2}
    assert model.notes == ()
    assert model.page_bytes(16) == 16 * 2 * 2 * (8 + 8) * 8  # slots, layers, KV heads, key and value, bytes


def test_rows_that_are_not_finite_are_told_apart() -> None:
    hf_model = tiny.build(tiny.SERVED["llama"]())
    model = TransformerModel(hf_model)
    hf_model.model.embed_tokens.weight.data[7] = torch.nan
    driver = Driver(model)
    sick, well = driver.add(), driver.add()
    forward = model.forward(driver.batch({sick: [5, 6, 7], well: [8, 9, 10]}))
    assert not forward.finite[2]
    assert forward.finite[3:].all()
    assert driver.run({well: [11]})


def test_logits_that_are_not_finite_are_told_too() -> None:
    hf_model = tiny.build(tiny.SERVED["llama"]())
    model = TransformerModel(hf_model)
    hf_model.lm_head.bias = torch.full((tiny.VOCAB_SIZE,), torch.inf, dtype=torch.float64)
    driver = Driver(model)
    assert model.forward(driver.batch({driver.add(): [5, 6, 7]})).finite.tolist() == [True, True, False]


def test_a_step_that_fails_leaves_the_model_usable() -> None:
    model = TransformerModel(tiny.build(tiny.SERVED["llama"]()))
    expected = Driver(model).greedy(prompt(9))
    driver = Driver(model)
    sequence = driver.add()
    with pytest.raises(IndexError):
        model.forward(driver.batch({sequence: [tiny.VOCAB_SIZE]}))
    assert driver.greedy(prompt(9)) == expected


def test_the_model_outside_a_step_says_so() -> None:
    hf_model = tiny.build(tiny.SERVED["llama"]())
    model = TransformerModel(hf_model)
    with pytest.raises(ModelError, match="outside a radixrt step"):
        hf_model(torch.tensor([[1, 2]]))
    with pytest.raises(ModelError, match="no KV pool"):
        model.copy_pages(np.array([1]), np.array([2]))


def test_two_models_share_nothing() -> None:
    """Interleaved steps of two models in one process: the binding belongs to each model."""
    models = [TransformerModel(tiny.build(tiny.SERVED["llama"](), seed=seed)) for seed in (0, 1)]
    alone = [Driver(model).greedy(prompt(9)) for model in models]
    drivers = [Driver(model) for model in models]
    last = [driver.run({driver.add(): prompt(9)})[0] for driver in drivers]
    new = [[token] for token in last]
    while len(new[0]) < NUM_NEW:
        for driver, out in zip(drivers, new, strict=True):
            out.append(driver.run({0: out[-1:]})[0])
    assert new == alone


@pytest.mark.parametrize("name", ["llama", "mistral", "mixtral", "qwen2", "qwen3"])
def test_recognised_modules_are_lean(name: str) -> None:
    """Also after the probe, for which the library hangs hooks of its own on attentions and layers."""
    model = TransformerModel(tiny.build(tiny.SERVED[name](), dtype=torch.float32))
    layers = model._hf.model.layers
    assert all(type(layer.self_attn).__module__ == "radixrt.runtime.modules" for layer in layers)
    assert all("forward" in vars(layer) for layer in layers), "the layers call their parts directly"
    assert (
        f"{len(layers)} {type(layers[0]).__name__.removesuffix('DecoderLayer')}Attention" in model.describe()["modules"]
    )
    assert model.exact


def test_a_model_that_is_not_exact_says_so() -> None:
    model = TransformerModel(tiny.build(tiny.SERVED["llama4"](), dtype=torch.float32))
    assert not model.exact
    assert "answers may differ in their last bits with what else runs" in model.notes[0]
    with pytest.raises(ModelError, match="cannot be served with exact=True: Llama4Router"):
        TransformerModel(tiny.build(tiny.SERVED["llama4"](), dtype=torch.float32), exact=True)
