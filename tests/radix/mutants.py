"""Faults to put into the cache, one at a time: each is a change of a few characters in one method.

Knows the text of the cache, and nothing of the tests that must notice.
"""

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any
from unittest.mock import patch

from radixrt.radix import LRU, LRU2, Duel, PagePool, RadixCache, RadixTree
from radixrt.radix.copies import Copies
from radixrt.radix.lookup import Lookup
from radixrt.radix.node import Children
from radixrt.radix.shadow import Shadow
from radixrt.radix.tails import LiveTails


@dataclass(frozen=True)
class Mutant:
    """In `owner.method`, `old` (found exactly once) becomes `new`."""

    name: str
    owner: type
    method: str
    old: str
    new: str

    def __str__(self) -> str:
        return self.name

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The fault, while this lasts. LookupError if the code has changed so that the fault no longer fits."""
        original = inspect.getattr_static(self.owner, self.method)
        function = original.fget if isinstance(original, property) else original
        assert isinstance(function, FunctionType)
        source = inspect.getsource(function)
        if source.count(self.old) != 1:
            raise LookupError(f"{self.name}: {self.owner.__name__}.{self.method} does not have once: {self.old}")
        scope: dict[str, Any] = {}
        code = "from __future__ import annotations\n" + textwrap.dedent(source.replace(self.old, self.new))
        exec(compile(code, f"<mutant {self.name}>", "exec"), function.__globals__, scope)
        with patch.object(self.owner, self.method, scope[self.method]):
            yield


def _of(owner: type, method: str, **faults: tuple[str, str]) -> list[Mutant]:
    return [Mutant(name, owner, method, old, new) for name, (old, new) in faults.items()]


MUTANTS = [
    *_of(
        RadixCache,
        "open",
        open_does_not_retain=("self.pool.retain(page_ids)", "pass"),
        open_is_no_use=("self.tree.use(cached, priority=priority, now=self._now)", "pass"),
        open_forgets_its_priority=("            priority=priority,\n", "            priority=0,\n"),
        order_stays_when_the_ranking_changes=("self.tree.rerank()", "pass"),
        open_counts_full_pages_only=("+= match.length", "+= match.prefix_len"),
    ),
    *_of(
        Lookup,
        "match",
        match_reports_a_token_too_many=("tail_len=agreed,", "tail_len=agreed + (agreed > 0),"),
        match_hides_partial_pages=("agreed = beside.agreed if beside else 0", "agreed = 0"),
    ),
    *_of(
        Lookup,
        "_search",
        tree_ignores_namespaces=("self._tree.root(namespace)", 'self._tree.root("")'),
        live_tails_ignore_namespaces=("else namespace", 'else ""'),
        live_tails_are_not_preferred=("live.agreed > cached.agreed", "live.agreed < cached.agreed"),
    ),
    *_of(
        RadixTree,
        "walk",
        walk_takes_a_page_that_agrees_in_part=(
            "agreement(node.tokens.view[offset:edge_len], tokens[position:]) // page_size * page_size",
            "-(-agreement(node.tokens.view[offset:edge_len], tokens[position:]) // page_size) * page_size",
        ),
        walk_stops_a_page_early=("offset // page_size])", "max(offset - page_size, first) // page_size])"),
    ),
    *_of(
        Children,
        "nearest",
        nearest_looks_at_one_neighbour=("in (before, after) if other is not None", "in (before or after,)"),
    ),
    *_of(
        LiveTails,
        "best",
        first_live_tail_wins=("agreed > best.agreed", "False"),
        live_tail_waits_for_its_copy=("page not in copies and", ""),
    ),
    *_of(
        RadixCache,
        "extend",
        failed_extend_changes_statistics=(
            "if fresh is None:",
            "if fresh is None:\n            self._copied_pages += 1",
        ),
        extend_counts_as_written=("return WritePlan", "table.written_len = stop\n        return WritePlan"),
        leader_pages_are_not_retained=("self.pool.retain(shared)", "pass"),
    ),
    *_of(
        RadixCache,
        "_alloc",
        extend_evicts_before_it_knows=("and missing > self.num_evictable", "and False"),
        extend_evicts_one_page_more=("self._evict(missing, by)", "self._evict(missing + 1, by)"),
        extend_trusts_the_number_of_leaves=("and missing > self.num_evictable", ""),
    ),
    *_of(
        RadixCache,
        "_shared_pages",
        leader_shares_a_page_too_far=(": shared_len // self.page_size]", ": -(-shared_len // self.page_size)]"),
    ),
    *_of(
        RadixCache,
        "_is_shared",
        copy_skipped_between_tables=("int(self.pool.refs[page]) - self.copies.naming(page) > 1", "False"),
        copy_skipped_for_pages_of_the_tree=("bool(self.tree.owner[page]) or", "not self.tree.owner[page] and"),
        copies_in_flight_count_as_sharing=(" - self.copies.naming(page)", ""),
    ),
    *_of(
        RadixCache,
        "_copy_last_page",
        copy_is_a_token_short=("table.seq_len % self.page_size)", "table.seq_len % self.page_size - 1)"),
        copy_keeps_no_source=("retain(np.array([copy.src, dst]", "retain(np.array([dst, dst]"),
    ),
    *_of(Copies, "begin", copy_reads_a_page_that_waits_itself=("if src in self._by_dst:", "if False:")),
    *_of(Copies, "finish", copies_are_done_twice=("if self._by_dst.get(copy.dst) is not copy:", "if False:")),
    *_of(
        RadixCache,
        "publish",
        publish_is_no_use_of_what_is_there=(
            "self.tree.use(walk.page_ids, priority=table.priority, now=self._now)",
            "pass",
        ),
        publish_gives_the_tail_too=("stop = len(tokens) if tail else", "stop = len(tokens) if True else"),
        publish_before_the_copy=("if pending:", "if False:"),
    ),
    *_of(
        RadixCache,
        "_repoint",
        publish_frees_before_it_moves_the_table=(
            "= own[changed], cached[changed]\n",
            "= own[changed], cached[changed]\n        self.pool.retain(duplicates)\n        self._release(duplicates)\n"
            "        self._release(duplicates)\n        self.pool.refs[duplicates] += 1\n",
        ),
        publish_leaves_the_table_on_its_duplicate=("own[changed] = canonical", "pass"),
        publish_keeps_duplicates=("self._release(duplicates)", "pass"),
    ),
    *_of(
        RadixCache,
        "_give",
        superseded_page_is_not_released=("self._release(superseded)", "pass"),
        tree_does_not_retain=("self.pool.retain(page_ids)", "pass"),
    ),
    *_of(
        RadixTree,
        "insert",
        partial_leaf_is_not_superseded=("superseded = self._cut(beside.node, 1)", "pass"),
        known_tail_is_added_again=("if beside is not None and beside.agreed == len(tokens):", "if False:"),
        policy_does_not_hear_of_new_pages=(
            "self.policy.add(page_ids, tokens, now, after=after, index=index, namespace=namespace)",
            "pass",
        ),
        new_pages_have_no_priority=("self.priority[page_ids] = priority", "self.priority[page_ids] = 0"),
        superseding_page_inherits_nothing=("self._inherit(int(page_ids[0]), superseded)", "pass"),
    ),
    *_of(
        RadixTree,
        "use",
        later_use_lowers_a_priority=("np.maximum(self.priority[page_ids], priority)", "priority"),
    ),
    *_of(RadixTree, "rank_of", order_ignores_priority=("int(self.priority[page])", "0")),
    *_of(RadixTree, "rerank", ranking_stays=("node.rank = self.rank_of(node)", "pass")),
    *_of(
        RadixTree,
        "count_as_cold",
        priority_inside_a_leaf_is_ignored=("self.priority[pages] > self.priority[pages[-1]]", "pages < 0"),
    ),
    *_of(
        RadixTree,
        "free_end",
        drop_takes_pages_that_others_continue=("and node.pages.view[-1] == page", ""),
        drop_takes_pages_that_others_hold=("node is not None and node.rank is not None and", "node is not None and"),
    ),
    *_of(
        RadixTree,
        "_split",
        split_loses_the_owner=("self.owner[upper.pages.view] = upper.id", "pass"),
        split_forgets_where_it_starts=("upper, node.start + at", "upper, node.start"),
    ),
    *_of(
        RadixTree,
        "_merge",
        merge_puts_pages_in_the_wrong_order=(
            "upper.pages.extend(node.pages.view)\n        node.tokens, node.pages = upper.tokens, upper.pages",
            "node.pages.extend(upper.pages.view)\n        node.tokens = upper.tokens",
        ),
    ),
    *_of(
        RadixTree,
        "trim",
        evict_takes_held_pages=("held = np.flatnonzero(self._refs[pages] != 1)", "held = []"),
        what_is_left_inherits_no_heat=("self._inherit(after, cut.page_ids)", "pass"),
        only_child_is_not_merged=("self._merge(parent)", "pass"),
    ),
    *_of(RadixTree, "coldest", evict_takes_the_hottest=("self.order[0]", "self.order[-1]")),
    *_of(
        RadixTree,
        "_rank",
        held_leaf_stays_evictable=(
            "node.children is None and self._refs[node.pages.view[-1]] == 1",
            "not node.children",
        ),
    ),
    *_of(
        RadixCache,
        "_evict",
        evict_takes_the_whole_leaf=("self.tree.count_as_cold(leaf, remaining)", "1_000"),
        evict_takes_warmer_pages_of_the_leaf=("self.tree.count_as_cold(leaf, remaining)", "remaining"),
        policy_does_not_hear_of_evictions=("self.tree.policy.evicted(cuts[-1])", "pass"),
        evict_does_not_count=("self._evicted_pages += num_pages - remaining", "pass"),
    ),
    *_of(RadixCache, "num_evictable", stray_pages_hide_nothing=("in self._stray_pages()", "in ()")),
    *_of(
        RadixCache,
        "fork",
        fork_does_not_retain=("self.pool.retain(page_ids)", "pass"),
        fork_forgets_the_priority=("priority=table.priority", "priority=0"),
        fork_thinks_all_is_written=("written_len=table.written_len", "written_len=table.seq_len"),
    ),
    *_of(
        RadixCache,
        "truncate",
        truncate_keeps_a_page_too_many=(
            "num_pages, last = -(-seq_len // self.page_size)",
            "num_pages, last = 1 + seq_len",
        ),
        truncate_keeps_what_was_written=("table.written_len = min(table.written_len, seq_len)", "pass"),
        truncate_forgets_the_live_tail=("self.tails.update(table)", "pass"),
        truncate_leaves_its_leaf_out_of_the_order=("self._settle(dropped[max(last - num_pages, 0) :])", "pass"),
    ),
    *_of(
        RadixCache,
        "close",
        close_does_not_release=("self._release(page_ids)", "pass"),
        close_leaves_the_live_tail=("self.tails.update(table)", "pass"),
        close_leaves_its_leaf_out_of_the_order=("self._settle(page_ids[last:])", "pass"),
    ),
    *_of(RadixCache, "_require_live", closed_tables_can_be_used=("if table not in self.tables:", "if False:")),
    *_of(
        RadixCache,
        "drop",
        drop_takes_a_page_that_ends_in_kept_tokens=(
            "[-(-keep_len // self.page_size) :]",
            "[keep_len // self.page_size :]",
        ),
        drop_does_not_count=("self._dropped_pages += len(page_ids)", "pass"),
        drop_counts_as_eviction=("self._dropped_pages += len(page_ids)", "self._evicted_pages += len(page_ids)"),
        drop_does_not_release=("self._release(page_ids)", "pass"),
        drop_takes_the_whole_edge=("len(doomed), by)", "leaf.pages.size, by)"),
        drop_ignores_namespaces=("self._lookup.path(wanted, namespace)", 'self._lookup.path(wanted, "")'),
    ),
    *_of(
        Lookup,
        "path",
        drop_takes_a_tail_that_differs=("beside.agreed < len(beside.tokens)", "not beside.agreed"),
        drop_leaves_the_tail=("if beside is None or beside.agreed < len(beside.tokens):", "if True:"),
    ),
    *_of(
        RadixCache,
        "pin",
        pin_does_not_count=("self.pool.retain(pin.page_ids)", "pass"),
        pins_never_reach_their_budget=("> self._max_pinned:", ">= self._max_pinned:"),
    ),
    *_of(RadixCache, "_num_pinned", pinned_pages_count_twice=("np.unique(np", "(np")),
    *_of(RadixCache, "unpin", unpin_twice_goes_through=("if pin not in self.pins:", "if False:")),
    *_of(
        RadixCache,
        "reset",
        reset_forgets_the_pages=("self._release(self.tree.clear())", "self.tree.clear()"),
        reset_while_copies_run=("or self.copies:", "and self.copies:"),
    ),
    *_of(RadixCache, "_release", nobody_hears_of_one_free_page=("if len(freed) and", "if len(freed) > 1 and")),
    *_of(Lookup, "explain", explain_names_the_wrong_token=("int(there.tokens[agreed])", "int(there.tokens[0])")),
    *_of(LRU, "inherit", lru_page_takes_the_heat_of_its_end=("max(self._last[page], self._last[gone].max())", "0")),
    *_of(
        LRU2,
        "use",
        lru2_forgets_the_use_before=("self._before[page_ids] = self.last[page_ids]", "pass"),
    ),
    *_of(
        LRU2,
        "add",
        lru2_forgets_its_ghosts=("if self._ghosts else 0", "if False else 0"),
        lru2_mistakes_one_place_for_another=("int(self._ids[after]) if after else", ""),
        lru2_new_pages_keep_old_times=("self.last[page_ids] = now", "pass"),
    ),
    *_of(LRU2, "inherit", lru2_inherits_the_last_use_alone=("(self._before, self.last)", "(self.last,)")),
    *_of(
        LRU2,
        "evicted",
        lru2_ghosts_inherit_nothing=("np.maximum.accumulate(self.last[backwards])", "self.last[backwards]"),
        lru2_ghosts_were_never_used=("self.last[backwards])", "self.last[backwards] * 0)"),
        lru2_forgets_the_end_last=("page_ids[::-1]", "page_ids"),
    ),
    *_of(
        LRU2,
        "count_as_cold",
        lru2_takes_pages_used_twice=("(before > before[-1]) | ", ""),
        lru2_takes_pages_used_later=(" | (last > last[-1])", ""),
    ),
    *_of(
        Duel,
        "ask",
        duel_never_changes_its_mind=("lru2 > lru * (1 + self.HYSTERESIS)", "False"),
        duel_never_comes_back=("lru2 >= lru if looked_back", "True if looked_back"),
        duel_sees_no_lead=("lru * (1 + self.HYSTERESIS)", "lru * (1 - self.HYSTERESIS)"),
        duel_looks_too_often=("if self._num_asked % self._interval:", "if False:"),
        duel_ranks_nothing_anew=("return self._looks_back != looked_back", "return False"),
    ),
    *_of(
        Duel, "count_as_cold", duel_ranks_one_way_and_cuts_another=("if self._looks_back:", "if not self._looks_back:")
    ),
    *_of(
        Shadow,
        "ask",
        shadow_forgets_the_use_before=("key[1] if self._looks_back else 0", "0"),
        shadow_counts_misses=("len(path) - num_missing", "len(path)"),
    ),
    *_of(Shadow, "_known", shadow_forgets_its_ghosts=("if self._ghosts.keys().isdisjoint(ids):", "if True:")),
    *_of(PagePool, "release", freed_pages_are_listed_twice=("self.num_free += len(freed)", "self.num_free += 1")),
]
