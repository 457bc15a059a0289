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
from radixrt.radix.host import HostPages
from radixrt.radix.lookup import Lookup
from radixrt.radix.node import Children
from radixrt.radix.order import EvictionOrder
from radixrt.radix.pool import _FreeList
from radixrt.radix.room import Room
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
        open_is_no_use=("self.tree.use(cached, priority=priority, now=self._room.now)", "pass"),
        open_forgets_its_priority=("            priority=priority,\n", "            priority=0,\n"),
        order_stays_when_the_ranking_changes=("self.tree.order.sort()", "pass"),
        open_counts_full_pages_only=("page_ids, match.length)", "page_ids, match.prefix_len)"),
    ),
    *_of(
        Lookup,
        "match",
        match_reports_a_token_too_many=("tail_len=tail_len,", "tail_len=tail_len + (tail_len > 0),"),
        match_hides_partial_pages=("tail.agreed if tail else 0", "0"),
        match_takes_a_host_page_for_its_tail=("cached is not None and cached.on_device", "cached is not None"),
        match_forgets_the_last_host_page=("np.append(host_ids, np.int32(cached.page))", "host_ids"),
        match_counts_host_tokens_twice=("reached - prefix_len - tail_len", "reached - prefix_len"),
        match_offers_host_pages_that_reach_no_further=("host_ids if host_len else EMPTY", "host_ids"),
    ),
    *_of(
        Lookup,
        "_search",
        tree_ignores_namespaces=("self._tree.root(namespace)", 'self._tree.root("")'),
        live_tails_ignore_namespaces=("else namespace", 'else ""'),
        live_tails_follow_host_pages=("walk.page_ids[walk.num_device - 1]", "walk.page_ids[-1]"),
    ),
    *_of(
        RadixTree,
        "walk",
        walk_takes_a_page_that_agrees_in_part=(
            "agreement(node.tokens.view[offset:edge_len], tokens[position:]) // page_size * page_size",
            "-(-agreement(node.tokens.view[offset:edge_len], tokens[position:]) // page_size) * page_size",
        ),
        walk_stops_a_page_early=("offset // page_size])", "max(offset - page_size, first) // page_size])"),
        walk_takes_host_pages_for_device_pages=(" - _num_host(node, offset // page_size)", ""),
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
            "if fresh is None:\n            self._forked_copies += 1",
        ),
        extend_counts_as_written=("return WritePlan", "table.written_len = stop\n        return WritePlan"),
        leader_pages_are_not_retained=("self.pool.retain(shared)", "pass"),
        first_copy_ends_no_borrowing=("table.borrows = table.borrows and not len(new)", "pass"),
    ),
    *_of(
        Room,
        "alloc",
        extend_evicts_before_it_knows=("and missing > self.num_evictable", "and False"),
        extend_evicts_one_page_more=("self.evict(missing, by)", "self.evict(missing + 1, by)"),
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
            "self.tree.use(page_ids[first:index], priority=table.priority, now=self._room.now)",
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
            "= own[changed], cached[changed]\n        self.pool.retain(duplicates)\n"
            "        self._room.release(duplicates)\n"
            "        self._room.release(duplicates)\n        self.pool.refs[duplicates] += 1\n",
        ),
        publish_leaves_the_table_on_its_duplicate=("own[changed] = canonical", "pass"),
        publish_keeps_duplicates=("self._room.release(duplicates)", "pass"),
    ),
    *_of(
        RadixCache,
        "_give",
        superseded_page_is_not_released=("self._room.release(superseded)", "pass"),
        tree_does_not_retain=("self.pool.retain(page_ids)", "pass"),
    ),
    *_of(
        RadixTree,
        "insert",
        partial_leaf_is_not_superseded=("superseded = self._cut(beside.node, 1)", "pass"),
        known_tail_is_added_again=("if beside is not None and beside.agreed == len(tokens):", "if False:"),
        policy_does_not_hear_of_new_pages=(
            "self.policy.add(page_ids, superseded, tokens, now, after=after, index=index, namespace=namespace)",
            "pass",
        ),
        new_pages_have_no_priority=("self.priority[page_ids] = priority", "self.priority[page_ids] = 0"),
        superseding_page_inherits_no_priority=("self.priority[superseded].max(initial=priority)", "priority"),
        host_tail_is_kept_beside_its_like=("or beside.on_device:", "or True:"),
    ),
    *_of(
        RadixTree,
        "use",
        later_use_lowers_a_priority=("np.maximum(self.priority[page_ids], priority)", "priority"),
    ),
    *_of(EvictionOrder, "rank_at", order_ignores_priority=("int(self._priority[page])", "0")),
    *_of(
        EvictionOrder,
        "sort",
        ranking_stays=("node.rank = self.rank_at(node, node.num_device - 1)", "pass"),
        ranking_of_host_pages_stays=("node.host_rank = self.rank_at(node, node.pages.size - 1)", "pass"),
    ),
    *_of(
        EvictionOrder,
        "cold_from",
        priority_inside_a_leaf_is_ignored=("self._priority[pages] > self._priority[pages[-1]]", "pages < 0"),
        evict_takes_held_pages=("(self._refs[pages] != 1)", "(pages < 0)"),
        evict_takes_warmer_pages_of_the_leaf=(
            "self._policy.count_as_cold(pages[len(pages) - count_after_last(warmer) :])",
            "count_after_last(warmer)",
        ),
    ),
    *_of(
        RadixTree,
        "leaf_of",
        drop_takes_pages_that_others_continue=("and node.pages.view[-1] == page", ""),
    ),
    *_of(
        Room,
        "_num_loose",
        drop_takes_pages_that_others_hold=("count_after_last(counts != 1)", "len(page_ids)"),
        drop_stops_at_what_is_under_way=("if self._swaps:", "if False:"),
    ),
    *_of(
        RadixTree,
        "move",
        page_moves_out_before_what_continues_it=("and not node.num_warm:", ":"),
        page_moves_in_before_what_it_continues=("(stop or parent.num_device == parent.pages.size)", "True"),
        moved_page_keeps_its_owner=("self.owner[src], self.owner[dst] = 0, node.id", "self.owner[dst] = node.id"),
        moved_page_leaves_its_heat=("self.policy.move(src, dst)", "pass"),
        moved_page_leaves_its_priority=("self.publisher[src], self.priority[src]", "self.publisher[src], 0"),
        what_stays_on_the_device_inherits_no_heat=("if num_device == index:", "if False:"),
        moved_page_is_not_counted=("self._set_device(node, num_device)", "pass"),
    ),
    *_of(
        EvictionOrder,
        "cold_pages",
        cold_pages_come_first_first=("[first:stop][::-1]", "[first:stop]"),
        cold_pages_are_too_many=("max_pages -= stop - first", "pass"),
        cold_pages_go_by_node=("if first and self._refs[node.pages.view[first - 1]] == 1:", "if False:"),
        begun_nodes_wait_for_all_others=("(begun and begun[0][0] < fresh)", "False"),
        cold_pages_pass_held_ones=("and self._refs[node.pages.view[first - 1]] == 1", ""),
    ),
    *_of(
        RadixTree,
        "_split",
        split_loses_the_owner=("self.owner[upper.pages.view] = upper.id", "pass"),
        split_forgets_where_it_starts=("upper, node.start + at", "upper, node.start"),
        split_counts_device_pages_twice=("node.num_device -= upper.num_device", "pass"),
        split_thinks_that_all_is_warm=("int(node.num_device > 0)", "1"),
    ),
    *_of(
        RadixTree,
        "_merge",
        merge_puts_pages_in_the_wrong_order=(
            "upper.pages.extend(node.pages.view)\n        node.tokens, node.pages = upper.tokens, upper.pages",
            "node.pages.extend(upper.pages.view)\n        node.tokens = upper.tokens",
        ),
        merge_forgets_device_pages=("node.num_device += upper.num_device", "pass"),
        merged_node_stays_in_the_order=("self.order.remove(upper)", "pass"),
        merged_node_keeps_its_place=("self.order.put(node)", "pass"),
    ),
    *_of(
        RadixTree,
        "_trim",
        what_is_left_inherits_no_heat=("self._inherit(after, edges[-1])", "pass"),
        only_child_is_not_merged=("self._merge(parent)", "pass"),
        host_pages_below_stay=("edges = self._drop_children(node)", "edges = []"),
        parent_of_a_leaf_that_is_used_up_keeps_its_place=("self._reorder_parent(node)", "pass"),
    ),
    *_of(
        RadixTree,
        "trim_host",
        host_eviction_takes_device_pages=("leaf.num_device, stop, max_pages", "0, stop, max_pages"),
    ),
    *_of(
        RadixTree,
        "_drop_children",
        dropped_host_pages_stay_owned=("self.owner[child.pages.view] = 0", "pass"),
        dropped_leaves_stay_counted=("self.num_leaves -= child.children is None", "pass"),
        dropped_nodes_stay_in_the_order=("self.order.remove(child)", "pass"),
    ),
    *_of(
        RadixTree,
        "_set_device",
        parent_does_not_count_warm_children=("parent.num_warm += change", "pass"),
        parent_of_the_last_warm_child_is_not_evictable=("self._reorder_parent(node)", "pass"),
    ),
    *_of(EvictionOrder, "coldest", evict_takes_the_hottest=("self.device[0]", "self.device[-1]")),
    *_of(EvictionOrder, "coldest_host", hottest_host_page_goes=("self.host[0]", "self.host[-1]")),
    *_of(
        EvictionOrder,
        "put",
        held_leaf_stays_evictable=("and self._refs[pages[stop - 1]] == 1", ""),
        held_host_leaf_stays_evictable=("and self._refs[pages[-1]] == 1", ""),
        device_pages_are_evictable_before_what_continues_them=("not node.num_warm and", ""),
        host_pages_are_evictable_before_what_continues_them=("node.children is None and", ""),
    ),
    *_of(
        Room,
        "evict",
        swaps_are_given_up_in_vain=("min(num_pages, num_found + self.num_evictable)", "num_pages"),
        eviction_stops_before_what_is_under_way=("if num_found < num_pages and self._swaps:", "if False:"),
    ),
    *_of(
        Room,
        "_give_up_swaps",
        held_pages_are_given_up=("int(self.pool.refs[copy.src]) > 2 or", ""),
    ),
    *_of(
        Room,
        "_shrink",
        evict_takes_the_whole_leaf=("trim(node, remaining)", "trim(node, 1_000)"),
    ),
    *_of(
        Room,
        "_forget",
        evict_does_not_count=("self.evicted_pages += num_device", "pass"),
        policy_does_not_hear_of_evictions=("self.tree.policy.evicted(edge)", "pass"),
        evict_does_not_count_host_pages=("self.evicted_host_pages += len(page_ids) - num_device", "pass"),
    ),
    *_of(
        HostPages,
        "bring_home",
        pages_come_home_unretained=("self._pool.retain(own)", "pass"),
        host_pages_stay_when_others_came_home=("self._room.release(host)", "pass"),
    ),
    *_of(
        HostPages,
        "swap_out",
        swap_out_drops_too_many_host_pages=("missing, by)", "missing + 1, by)"),
        swap_out_keeps_nothing=("with self._room.holding(keep):", "with self._room.holding(None):"),
        swap_out_drops_no_host_pages=("if missing > 0:", "if False:"),
        swap_out_starts_at_the_wrong_end=(
            "page_ids[: self._pool.num_free_host]",
            "page_ids[::-1][: self._pool.num_free_host]",
        ),
    ),
    *_of(
        HostPages,
        "swap_in",
        swap_in_copies_what_is_under_way=("if self._swaps else host_ids", "if False else host_ids"),
        swap_in_is_no_use=("self._tree.use(np.concatenate([match.page_ids, used]), now=self._room.tick())", "pass"),
        swap_in_uses_what_it_brings_alone=("np.concatenate([match.page_ids, used])", "used"),
    ),
    *_of(
        Room,
        "holding",
        swaps_evict_their_own_path=(
            "(match.page_ids, match.host_ids):\n            self.pool.retain",
            "():\n            self.pool.retain",
        ),
        swaps_keep_their_path=("self.release(page_ids)", "pass"),
        swaps_leave_their_path_out_of_the_order=(
            "self.release(page_ids)\n        self.settle(ends)",
            "self.release(page_ids)",
        ),
    ),
    *_of(
        HostPages,
        "_begin",
        swaps_keep_no_source=("self._pool.retain(src)", "self._pool.retain(dst)"),
        swapped_page_stays_evictable=("self._room.settle(src)", "pass"),
    ),
    *_of(
        HostPages,
        "done",
        page_moves_under_its_reader=("int(self._pool.refs[src]) == 2 and", ""),
        moved_source_is_not_released=("src if moved else dst", "dst"),
        nobody_knows_what_came_back=("self._came_back[dst] = True", "pass"),
        moves_are_counted_the_wrong_way=("moved and dst > self", "moved and src > self"),
    ),
    *_of(
        HostPages,
        "failed",
        failed_copies_take_effect=("self._end(copy,", "self._tree.move(copy.src, copy.dst), self._end(copy,"),
    ),
    *_of(HostPages, "_end", page_stays_out_of_the_order=("self._room.settle(np.array", "(np.array")),
    *_of(Room, "num_evictable", stray_pages_hide_nothing=("in self._stray_pages()", "in ()")),
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
        truncate_leaves_its_leaf_out_of_the_order=("self._room.settle(dropped[max(last - num_pages, 0) :])", "pass"),
    ),
    *_of(
        RadixCache,
        "close",
        close_does_not_release=("self._room.release(page_ids)", "pass"),
        close_leaves_the_live_tail=("self.tails.update(table)", "pass"),
        close_leaves_its_leaf_out_of_the_order=("self._room.settle(page_ids[last:])", "pass"),
    ),
    *_of(RadixCache, "_require_live", closed_tables_can_be_used=("if table not in self.tables:", "if False:")),
    *_of(
        RadixCache,
        "drop",
        drop_takes_a_page_that_ends_in_kept_tokens=("if num_kept and len(doomed) and", "if False and"),
        drop_leaves_a_page_that_others_are_like=("and not self.tree.has_like(int(doomed[0]), num_kept)", ""),
        drop_ignores_namespaces=("self._lookup.path(wanted, namespace)", 'self._lookup.path(wanted, "")'),
    ),
    *_of(
        Room,
        "drop",
        drop_does_not_count=("self.dropped_pages += num_pages", "pass"),
        drop_counts_as_eviction=("self.dropped_pages += num_pages", "self.evicted_pages += num_pages"),
        drop_does_not_release=("self.release(cut.edges[0])", "pass"),
        drop_takes_the_whole_edge=("self.tree.cut_end(leaf, num_pages)", "self.tree.cut_end(leaf, leaf.pages.size)"),
        drop_takes_more_than_its_leaf=("doomed[-leaf.pages.size :]", "doomed"),
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
        reset_forgets_the_pages=("self._room.release(self.tree.clear())", "self.tree.clear()"),
        reset_while_copies_run=("or self.copies or", "or"),
        reset_while_swaps_run=("or self.copies or self.swaps:", "or self.copies:"),
    ),
    *_of(Room, "release", nobody_hears_of_one_free_page=("if len(freed):", "if len(freed) > 1:")),
    *_of(HostPages, "freed", freed_pages_came_back=("= False", "= True")),
    *_of(
        HostPages,
        "take_hits",
        host_hits_are_counted_again=("self._came_back[page_ids] = False", "pass"),
        host_hits_are_whole_pages=("np.minimum(length - index * self._page_size, self._page_size)", "(0 * index + 1)"),
    ),
    *_of(
        RadixCache,
        "truncate",
        borrowing_outlives_the_borrowed_page=("table.borrows = table.borrows and not len(dropped)", "pass"),
    ),
    *_of(Lookup, "explain", explain_names_the_wrong_token=("int(there.tokens[agreed])", "int(there.tokens[0])")),
    *_of(LRU, "inherit", lru_page_takes_the_heat_of_its_end=("max(self._last[page], self._last[gone].max())", "0")),
    *_of(LRU, "move", lru_moved_page_is_cold=("self._last[src]", "0")),
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
        lru2_superseding_page_inherits_nothing=("max(self._before[page_ids[0]], before_gone)", "0"),
        lru2_new_pages_keep_old_times=("self.last[page_ids] = now", "pass"),
    ),
    *_of(LRU2, "inherit", lru2_inherits_the_last_use_alone=("(self._before, self.last)", "(self.last,)")),
    *_of(
        LRU2,
        "move",
        lru2_moved_page_has_no_name=("(self._ids, self._before, self.last)", "(self._before, self.last)"),
        lru2_moved_page_was_used_once=("(self._ids, self._before, self.last)", "(self._ids, self.last)"),
    ),
    *_of(Duel, "move", duel_moved_page_is_cold=("self._uses.move(src, dst)", "pass")),
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
    *_of(Shadow, "_evict", shadow_leaves_no_ghosts=("if self._looks_back:", "if False:")),
    *_of(
        PagePool,
        "release",
        host_pages_become_device_pages=("self._host.push(freed[num_device:])", "self._device.push(freed[num_device:])"),
    ),
    *_of(_FreeList, "push", freed_pages_are_listed_twice=("self.size += len(page_ids)", "self.size += 1")),
]
