"""A branch of a run while it lives: what it holds, whose turn it is, what goes on from it and who hears of that.

Knows nothing of what authors write, which is a state over one branch, or of who steps the engine.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal

from radixrt.runtime import Choice as Generated, InvalidRequest, Output, PinnedPrefix, SamplingParams, Usage, checks

from .choice import Choice
from .content import Content, Said
from .events import BranchClosed, Rewound, SlotReport, TextGiven, Where
from .failures import BranchCancelled, StateMisuse
from .node import Node, owner, root, seed_of, watch
from .requests import Requests
from .run import Cost, Run
from .slot import Slot

if TYPE_CHECKING:
    from .scope import Scope


class Branch:
    """One thread or task goes on with it. Another may close it, and has the driver's lock then."""

    def __init__(
        self, run: Run, *, content: Content | None = None, parent: Branch | None = None, path: tuple[int, ...] = ()
    ) -> None:
        self.run = run
        self.driver = run.driver
        self.codec = run.driver.codec
        self.where = Where(program=run.program, path=path)
        self.parent = parent
        self.seed = seed_of(run.seed, path)
        self.begun = self.content = content if content is not None else Content()
        self.told = self.content.said  # the last that observers know
        self.scope: Scope | None = None  # while its branches live
        self.num_branches = 0  # ever made
        self.cost = Cost()
        self.value: object = None  # what the program returned
        self._held = self.content.hold()
        self._marked: list[Node] = []
        self._last: Requests | None = None  # asked for
        self._num_slots = 0  # ever asked for
        self._pin: PinnedPrefix | None = None
        self._is_pinned = False
        self._pinned_for: int | None = None  # engine steps
        self._closed_by: BaseException | None = None
        self._is_closed = False  # and has given everything back

    # -- turns ----------------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        if isinstance(self._closed_by, BranchCancelled):
            raise self._closed_by
        if self._closed_by is not None:
            raise StateMisuse(f"state: used after its end, in {self.where}; return values, not states")

    def take_turn(self) -> Content:
        """Nothing else goes on from here now; what there is. StateMisuse where that would have no meaning."""
        self.check_open()
        if self.scope is not None:
            raise StateMisuse(f"state: its branches live, in {self.where}; use them, or leave their scope first")
        return self.settle()

    def take_word(self) -> Content:
        """As `take_turn`, to say something: outside of messages, or in the one that is open."""
        content = self.take_turn()
        if content.roles and not content.is_open:
            raise StateMisuse(f"state: no message is open, in {self.where}; open one, such as `with s.user():`")
        return content

    def settle(self) -> Content:
        """What there is once the last generation has ended and, if it failed, somebody knows."""
        if self._last is not None:
            self._last.settle()
            if not self._last.was_raised:
                self._last.raise_error()
        return self.content

    async def settled(self) -> None:
        """As `settle`, in an async program."""
        if self._last is not None:
            await self._last.settled()
            self.settle()

    # -- what is asked for ----------------------------------------------------------------------------------------

    def asked(self, verb: str, kind: Literal["slot", "choice"], name: str | None) -> Requests:
        """The requests of something that may be asked for now, and have this name."""
        content = self.take_word()
        checks.instance("name", name, (str, NoneType), "a text, by which state[name] finds it")
        if name is not None and name in content.slots:
            raise StateMisuse(f"{verb}: {name!r} is the name of an earlier slot, in {self.where}; choose another")
        return Requests(kind, name, self.driver, self.where, is_async=self.run.is_async)

    def generate(self, slot: Slot[Any], params: SamplingParams) -> None:
        """Ask for what a slot will be, at once. InvalidRequest for what could never run."""
        with self.driver.lock:
            self.check_open()  # again: whoever closes it has the lock
            node, before = self._request(params).hold(), self.content
            slot.runs(watch(node, lambda outcome: self._ended(slot, node, params, before, outcome)))
            self._say(slot, node)

    def choose(self, choice: Choice[Any], *, temperature: float) -> None:
        """Ask for the scores of a choice's options, at once. InvalidRequest for what could never run."""
        with self.driver.lock:
            self.check_open()
            before = self.content
            choice.runs(
                self.run.origin,
                temperature=temperature,
                seed=self.seed,
                on_end=lambda: self._chosen(choice, before),
            )
            self._say(choice, choice.nodes[0])

    def _request(self, params: SamplingParams) -> Node:
        """The request that goes on from here. It sends what came since the last one."""
        content = self.content
        if content.is_empty:
            text = self.codec.start_ids
        else:
            text = content.healed(self.codec)[0] if params.prefix else content.flushed(self.codec)
        if content.node is None:
            return root(self.run.origin, text, params)
        return content.node.forks(1, params, at=content.at, text=text)[0]

    def _say(self, slot: Slot[Any] | Choice[Any], node: Node) -> None:
        """What was asked for, with its first request, comes next; from now on observers hear what comes of it."""
        before, self._last = self.content, slot.requests
        named = {**before.slots, slot.name: slot} if slot.name is not None else before.slots
        self.content = replace(before, said=Said(slot, before.message, before.said), slots=named)
        number, self._num_slots = self._num_slots, self._num_slots + 1
        if self.run.observers:
            self.tell_given(before)
            report = SlotReport(self.run.tell, self.where, number, slot.name)
            prompt = node.tokens(node.num_tokens)
            explanation = self.driver.backend.explain(prompt, self.run.origin.namespace)
            report.started(node.handle.number, explanation, is_choice=isinstance(slot, Choice))
            slot.requests.tells(report)

    def _unsay(self, before: Content) -> None:
        """What was asked for came to nothing."""
        self.content = replace(self.content, said=before.said, slots=before.slots)

    def _ended(
        self, slot: Slot[Any], node: Node, params: SamplingParams, before: Content, outcome: Output | BaseException
    ) -> None:
        """Take what a request generated; where it failed, be as before it."""
        if isinstance(outcome, Output):
            self._charge(outcome.usage)
        generated = slot.take(outcome)
        if generated is None or self._closed_by is not None:
            self._unsay(before)
        else:
            self._go_on_behind(generated, node, params)
        node.drop()

    def _go_on_behind(self, generated: Generated, node: Node, params: SamplingParams) -> None:
        """Go on behind what a request generated, but for what ended it."""
        node.output = ids = generated.token_ids
        is_stopped = generated.finish_reason == "stop"
        if is_stopped and ids and ids[-1] in params.ending_token_ids(self.driver.backend.eos_token_ids):
            num_kept, rest = len(ids) - 1, ""
        elif is_stopped:
            # No longer than 3 tokens is an unfinished character, which what healing begins with cannot finish.
            ahead = node.last_tokens(node.num_tokens - len(ids), 3) if not params.prefix else ()
            num_kept, rest = self.codec.kept(ids, params.prefix + generated.text, before=ahead)
        else:
            num_kept, rest = len(ids), ""
        at = node.num_tokens - len(ids) + num_kept
        self._hold(replace(self.content, node=node, at=at, committed=(), chosen=None, pending=rest))
        if self._is_pinned:
            self._pin_anew()

    def _chosen(self, choice: Choice[Any], before: Content) -> None:
        """Take the option that was chosen; where none was, be as before."""
        ids = choice.committed
        if ids is None or self._closed_by is not None:
            self._unsay(before)
        else:
            given = before.committed if not before.is_empty else self.codec.start_ids
            node = owner(self.run.origin, [*before.certain(self.codec), *ids])
            self._hold(replace(self.content, committed=(*given, *ids), chosen=node, pending=""))
        if (cost := choice.cost) is not None:
            self._charge(cost)

    def _charge(self, usage: Usage) -> None:
        branch: Branch | None = self
        while branch is not None:
            branch.cost = branch.cost.plus(usage)
            branch = branch.parent

    # -- what it holds --------------------------------------------------------------------------------------------

    def mark(self) -> Content:
        """What there is, held until the end."""
        self.take_turn()
        with self.driver.lock:
            self.check_open()
            self.tell_given(self.content)
            self._marked += self.content.hold()
            return self.content

    def rewind(self, content: Content) -> None:
        """Be as at a mark; what is drawn then is drawn anew."""
        self.go_on_as(content, told=content.said)
        self.seed = seed_of(self.seed, (-1,))  # no branch has that number
        self.run.tell(Rewound(where=self.where))

    def go_on_as(self, content: Content, *, told: Said | None) -> None:
        """Have what a mark or a branch had, of which observers know all up to `told`."""
        with self.driver.lock:
            self.check_open()
            self.told = told
            self._hold(content)

    def _hold(self, content: Content) -> None:
        """Have this content from now on, and hold what it needs in place of what was needed before."""
        held, self._held = self._held, content.hold()
        self.content = content
        for node in held:
            node.drop()

    def pin(self, ttl: int | None) -> None:
        """Pin what there is, and from now on what there is behind each generation, for `ttl` engine steps."""
        self.take_turn()
        with self.driver.lock:
            self.check_open()
            self._pinned_for, self._is_pinned = ttl, True
            self._pin_anew()

    def _pin_anew(self) -> None:
        backend, content = self.driver.backend, self.content
        with self.driver.lock, suppress(InvalidRequest):
            if self._pin is not None:
                pin, self._pin = self._pin, None
                backend.unpin(pin)
            if content.node is not None and self._is_pinned:
                tokens, namespace = content.node.tokens(content.at), self.run.origin.namespace
                self._pin = backend.pin(tokens, namespace, ttl=self._pinned_for)

    def tell_given(self, content: Content) -> None:
        """Tell observers what text was appended since they last heard. O(what was)."""
        if not self.run.observers:
            return
        texts = [said for said in content.things(since=self.told) if isinstance(said.what, str)]
        self.told = content.said
        for message, given in groupby(texts, key=lambda said: said.message):
            role = content.roles[message] if message is not None else None
            self.run.tell(TextGiven(where=self.where, role=role, text="".join(said.text for said in given)))

    def close(self, reason: BaseException | None = None, *, adopted: bool = False) -> None:
        """Cancel what runs and give everything back, branches first. Twice is fine, and goes on where one broke off."""
        with self.driver.lock:
            if self._is_closed:
                return
            if self._closed_by is None:
                self._closed_by = reason if reason is not None else StateMisuse("state: closed before this had ended")
            if self.scope is not None:
                self.scope.close(reason)
            if self._last is not None:
                self._last.cancel(self._closed_by)
            self._is_pinned = False
            self._pin_anew()  # first: what is pinned stays when it is given back
            self._marked, self._held = [*self._marked, *self._held], ()
            while self._marked:
                self._marked.pop().drop()
            self._is_closed = True
            if self.parent is not None:
                self.run.tell(BranchClosed(where=self.where, adopted=adopted))
