"""One sequence of a test, from open to close. Knows nothing of what a test looks at then."""

from __future__ import annotations

from collections.abc import Sequence

from radixrt.radix import RadixCache


def put(
    cache: RadixCache,
    tokens: Sequence[int],
    *,
    namespace: str = "",
    label: str = "",
    priority: int = 0,
    tail: bool = False,
) -> None:
    """Open, extend by what is not cached, publish and close; then everything is audited."""
    table = cache.open(tokens, namespace, label, priority=priority)
    plan = cache.extend(table, tokens[table.seq_len :])
    assert plan is not None
    cache.copies_done(plan)
    cache.publish(table, tail=tail)
    cache.close(table)
    cache.check()
