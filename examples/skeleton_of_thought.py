"""Skeleton of thought: an outline first, then all of its points written out at once, each on a branch of it."""

from __future__ import annotations

import radixrt as rx

TOPIC = "keeping houseplants alive"
NUM_POINTS = 3


@rx.program
async def skeleton_of_thought(s: rx.State, topic: str) -> tuple[list[str], list[str], rx.Cost]:
    """The points of the outline, what each of them says, and what it cost."""
    with s.user():
        s += f"Give {NUM_POINTS} tips on {topic}, of three words each."
    points: list[str] = []
    with s.assistant():
        for number in range(1, NUM_POINTS + 1):
            s += f"{number}."
            points.append((await s.gen(stop=("\n", ".", "!"), max_tokens=12, temperature=0.5)).strip())
            s += "\n"
    async with s.fork(list(enumerate(points, 1))) as branches:

        async def expand(branch: rx.State, item: tuple[int, str]) -> str:
            number, point = item
            with branch.user():
                branch += f"Explain tip {number} in one sentence: {point}."
            with branch.assistant():
                return (await branch.gen(max_tokens=24, temperature=0.5)).strip()

        texts = await branches.map(expand)
    return points, texts, s.cost


def main(engine: rx.Engine) -> None:
    watched = rx.Yardstick(engine)
    points, texts, cost = skeleton_of_thought.run(watched, TOPIC)
    for number, (point, text) in enumerate(zip(points, texts, strict=True), 1):
        print(f"{number}. {point}\n   {text}")
    print(f"{cost.generations} generations")
    print(watched)


if __name__ == "__main__":
    with rx.Engine("smollm2-135m") as engine:
        main(engine)
