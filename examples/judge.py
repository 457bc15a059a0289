"""A judge over several dimensions: a branch each, a mark from 1 to 5 by what the model finds likely, not its text."""

from __future__ import annotations

import radixrt as rx

ESSAY = "Tea is older than coffee. It is made of leaves. Everybody likes it, and so do I."
DIMENSIONS = ("clarity", "accuracy", "style", "depth")
MARKS = (1, 2, 3, 4, 5)


@rx.program
def judge(s: rx.State, essay: str) -> dict[str, float]:
    s += f"Essay: {essay}\n\nMarks from 1 (poor) to 5 (excellent).\n"

    def mark(branch: rx.State, dimension: str) -> float:
        branch += f"{dimension}: "
        return branch.choose(MARKS).expected()

    with s.fork(DIMENSIONS) as branches:
        return dict(zip(DIMENSIONS, branches.map(mark), strict=True))


def main(engine: rx.Engine) -> None:
    watched = rx.Yardstick(engine)
    for dimension, mark in judge.run(watched, ESSAY).items():
        print(f"{dimension:<9} {mark:.2f}")
    print(watched)


if __name__ == "__main__":
    with rx.Engine("smollm2-135m") as engine:
        main(engine)
