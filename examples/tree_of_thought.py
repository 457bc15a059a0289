"""Tree of thought: branches share every step before them, a scratch branch judges each, the best goes on."""

from __future__ import annotations

from functools import partial

import radixrt as rx

TASK = "Plan a small garden for a balcony."


async def step(branch: rx.State, number: int) -> float:
    """One more step; how good the model finds it, from 1 to 5 on average."""
    branch += f"Step {number}:"
    await branch.gen(stop="\n", max_tokens=24, temperature=0.8)
    async with branch.scratch() as probe:  # the model reads this, the branch does not keep it
        probe += "\nHow useful is this step, from 1 to 5? "
        mark = probe.choose((1, 2, 3, 4, 5))
        await mark
    return mark.expected()


@rx.program
async def tree_of_thought(s: rx.State, task: str, width: int = 3, depth: int = 2) -> tuple[str, rx.Cost]:
    s += f"Task: {task}\n"
    for number in range(1, depth + 1):
        async with s.fork(width) as branches:
            marks = await branches.map(partial(step, number=number))
            s.adopt(branches[marks.index(max(marks))])
        s += "\n"
    s += "In short:"
    await s.gen(stop="\n", max_tokens=24, temperature=0.0)
    return s.text, s.cost


def main(engine: rx.Engine) -> None:
    watched = rx.Yardstick(engine)
    text, cost = tree_of_thought.run(watched, TASK)
    print(text)
    print(f"{cost.generations} generations")
    print(watched)


if __name__ == "__main__":
    with rx.Engine("smollm2-135m") as engine:
        main(engine)
