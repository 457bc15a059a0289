"""`radixrt verify`: it runs what it names, finds a model that depends on its batch, and says where."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from radixrt.frontend import verify
from radixrt.runtime import Forward
from radixrt.runtime.batch import Batch
from radixrt.runtime.testing import ByteTokenizer, HashModel

PROMPTS = [list(b"a shared beginning, then one"), list(b"a shared beginning, and another"), list(b"a third")]


def job(model: HashModel) -> verify.Job:
    return verify.Job(model=model, tokenizer=ByteTokenizer(), prompts=PROMPTS, max_tokens=20, page_size=4)


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1], [PROMPTS[0]] * 3])
def test_twelve_ways_give_the_same_bits(prompts: list[list[int]]) -> None:
    given = verify.Job(model=HashModel(vocab=256), tokenizer=None, prompts=prompts, max_tokens=20, page_size=4)
    verdicts = list(verify.verify(given))
    assert [verdict.difference for verdict in verdicts] == [None] * 12
    assert len({verdict.name for verdict in verdicts}) == 12


@dataclass(slots=True, kw_only=True)
class Uneven(HashModel):
    """A model whose logits depend in their last bits on how many rows a step has."""

    def forward(self, batch: Batch) -> Forward:
        given = HashModel.forward(self, batch)
        return Forward(logits=given.logits * (1 + 1e-6 * batch.num_rows), finite=given.finite)


def test_a_model_that_depends_on_its_batch_is_found_out() -> None:
    found = {verdict.name: verdict.difference for verdict in verify.verify(job(Uneven(vocab=256)))}
    assert found.pop("alone, no cache") is None
    assert found["batched, cold"] is not None
    assert "prompt 1, token" in found["batched, cold"]


def test_another_token_is_told_from_another_logprob() -> None:
    expected = verify.alone(job(HashModel(vocab=256)), {})
    answer = expected[1]
    token = {**expected, 1: (*answer[:3], (999, answer[3][1]), *answer[4:])}
    assert verify.difference(expected, token) == f"prompt 2, token 4: id 999 instead of {answer[3][0]}"
    short = {**expected, 1: answer[:3]}
    assert verify.difference(expected, short) == "prompt 2: 3 tokens instead of 20"
