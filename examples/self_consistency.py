"""Self-consistency: several ways to reason about one question, from one prompt; the answer that most end in."""

from __future__ import annotations

import re
from collections import Counter

import radixrt as rx

QUESTION = "Tom has 3 boxes with 4 apples each and eats 2 apples. How many apples are left?"


@rx.program
async def self_consistency(s: rx.State, question: str, n: int = 5) -> tuple[str | None, Counter[str], rx.Cost]:
    """The answer with the most votes, all votes, and what it cost; samples without a number abstain."""
    s += f"Question: {question}\nThink step by step and end with the number.\nAnswer:"
    async with s.fork(n) as branches:

        async def sample(branch: rx.State) -> str | None:
            reasoning = await branch.gen(stop="\n\n", max_tokens=32, temperature=0.7)
            branch += "\nSo the number is"
            said = re.search(r"\d+", await branch.gen(max_tokens=4, temperature=0.0))
            return said[0] if said and reasoning else None

        answers = await branches.map(sample)
    votes = Counter(answer for answer in answers if answer is not None)
    best = votes.most_common(1)
    return best[0][0] if best else None, votes, s.cost


def main(engine: rx.Engine) -> None:
    watched = rx.Yardstick(engine)
    answer, votes, cost = self_consistency.run(watched, QUESTION)
    print(f"{answer}, of the votes {dict(votes)}")
    print(f"{cost.generations} generations")
    print(watched)


if __name__ == "__main__":
    with rx.Engine("smollm2-135m") as engine:
        main(engine)
