"""Any legal attention plan of a step, at random: what planners could have chosen. Knows nothing of kernels."""

from __future__ import annotations

from random import Random

import numpy as np

from radixrt.kernels.plan import AttentionPlan, IntArray, group_len


def random_plan(
    random: Random,
    positions: IntArray,  # [T]
    row_indptr: IntArray,  # [S + 1]
    page_indptr: IntArray,  # [S + 1]
    page_ids: IntArray,  # [page_indptr[-1]]
    *,
    page_size: int,
    exact: bool,
) -> AttentionPlan:
    """A plan of these segments, whose runs are cut and shared by chance (arguments as in `build_plan`)."""
    align = (group_len(page_size) if exact else page_size) // page_size
    segment_of = np.repeat(np.arange(len(row_indptr) - 1), np.diff(row_indptr))
    tables = [page_ids[page_indptr[s] : page_indptr[s + 1]] for s in range(len(row_indptr) - 1)]
    num_pages = [int(position) // page_size + 1 for position in positions]
    nodes: list[tuple[int, IntArray, IntArray]] = []

    def cover(members: list[int], depth: int) -> None:
        """Nodes from page `depth` on, where all members stand."""
        by_page: dict[int, list[int]] = {}
        for row in members:
            if depth < num_pages[row]:
                by_page.setdefault(int(tables[segment_of[row]][depth]), []).append(row)
        for alike in by_page.values():
            parts: dict[int, list[int]] = {}
            num_parts = random.choice([1, 1, 2, len(alike)])
            for row in alike:
                parts.setdefault(random.randrange(num_parts), []).append(row)
            for part in parts.values():
                if stops := _stops(part, depth):
                    add(part, depth, random.choice(stops))
                else:
                    for row in part:
                        add([row], depth, random.choice(_stops([row], depth)))

    def add(part: list[int], depth: int, stop: int) -> None:
        nodes.append((depth * page_size, tables[segment_of[part[0]]][depth:stop], np.array(part)))
        cover(part, stop)

    def _stops(part: list[int], depth: int) -> list[int]:
        """Where a node of these rows from `depth` on may end: it starts the next one, or is the end of all of them."""
        segments = {int(segment_of[row]) for row in part}
        longest = max(num_pages[row] for row in part)
        shortest = longest if len(segments) == 1 else min(num_pages[row] for row in part)
        stops = [depth]
        while stops[-1] < shortest and len({int(tables[s][stops[-1]]) for s in segments}) == 1:
            stops.append(stops[-1] + 1)
        return [stop for stop in stops[1:] if stop % align == 0 or stop == longest]

    cover(list(range(len(positions))), 0)
    return AttentionPlan.of(nodes, positions, page_size=page_size, exact=exact)
