"""The state of a program: what an author appends to, generates from and branches. One branch of the engine.

Knows nothing of how programs are run or of who steps the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack, get_args, overload

from radixrt.runtime import (
    Choice as Generated,
    Grammar,
    InvalidRequest,
    Output,
    PinnedPrefix,
    SamplingParams,
    Usage,
)

from .checks import check_kind, number, optional_integer, refuse
from .choice import Choice
from .content import Content, Said
from .events import BranchClosed, Rewound, SlotReport, TextGiven, Where
from .failures import BranchCancelled, StateMisuse
from .node import Node, owner, root, seed_of, watch
from .options import ScoreName, options_of
from .requests import Requests
from .run import Boundary, Cost, Generation, Run, Sampling
from .slot import Slot
from .tools import Answer, AnyTool, Call, form_of_turn
from .values import Form, form_of

if TYPE_CHECKING:
    from .scope import Branches, ItemBranches, Scope, Scratch

T = TypeVar("T")
Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """A moment of a state, to go back to."""

    _state: State
    _content: Content


class State:
    """Text and generations, in order. Appending encodes nothing that is there; generated ids stay as they are.

    One thread or task uses a state. While a generation runs, what comes next waits for it in a plain program, and is
    refused in an async one until it was awaited. While branches live, the state can be read and nothing else.
    """

    def __init__(
        self, run: Run, *, content: Content | None = None, parent: State | None = None, path: tuple[int, ...] = ()
    ) -> None:
        """For programs, sessions and scopes; authors are given theirs."""
        self._run = run
        self._driver = run.driver
        self._codec = run.driver.codec
        self._content = content if content is not None else Content()
        self._parent = parent
        self._where = Where(program=run.program, path=path)
        self._seed = seed_of(run.seed, path)
        self._held = self._content.hold()
        self._marked: list[Node] = []
        self._pin: PinnedPrefix | None = None
        self._is_pinned = False
        self._pinned_for: int | None = None  # engine steps
        self._begun = self._content
        self._told = self._content.said  # the last that observers know
        self._value: object = None  # what the program returned
        self._last: Requests | None = None  # asked for
        self._num_slots = 0  # ever asked for
        self._scope: Scope | None = None  # while its branches live
        self._num_branches = 0  # ever made
        self._cost = Cost()
        self._closed_by: BaseException | None = None

    # -- writing --------------------------------------------------------------------------------------------------

    def __iadd__(self, text: str | Slot[Any] | Choice[Any]) -> Self:
        """Append text, or the value of a slot or choice as text."""
        self._take_turn()
        self._check_message()
        if not isinstance(text, (str, Slot, Choice)):
            said = f"{text!r:.80} appended; allowed: a text, a slot or a choice"
            raise InvalidRequest(f"state: {said}, in {self._where}; write str(...) if that is meant")
        self._content = self._content.plus(str(text), start_ids=self._codec.start_ids)
        return self

    @contextmanager
    def message(self, role: Role) -> Iterator[None]:
        """Everything in this block is one message of a conversation, laid out by the model's chat template.

        It is closed whatever ends the block; what the template puts behind it is written once more follows.
        """
        check_kind("message", role, str, f"a role, such as {', '.join(get_args(Role))}")
        self._take_turn()
        content = self._content
        if content.is_open or (content.said is not None and not content.roles):
            what = f"inside of {content.roles[-1]}'s" if content.is_open else "after text that is in none"
            raise StateMisuse(f"message: {role}'s opened {what}, in {self._where}; write one after the other")
        items = self._driver.template.opening((*content.roles, role))
        self._content = content.opened(role, items, self._codec)
        try:
            yield
        finally:
            self._content = replace(self._content, is_open=False)

    def system(self) -> AbstractContextManager[None]:
        return self.message("system")

    def user(self) -> AbstractContextManager[None]:
        return self.message("user")

    def assistant(self) -> AbstractContextManager[None]:
        return self.message("assistant")

    def tool(self) -> AbstractContextManager[None]:
        return self.message("tool")

    @overload
    def gen(self, kind: type[str] | Grammar = str, /, **asked: Unpack[Generation]) -> Slot[str]: ...

    @overload
    def gen(self, kind: type[T], /, **asked: Unpack[Generation]) -> Slot[T]: ...

    @overload
    def gen(self, kind: object, /, **asked: Unpack[Generation]) -> Slot[Any]: ...

    def gen(self, kind: Any = str, /, **asked: Unpack[Generation]) -> Slot[Any]:
        """Let the model go on, at once, with a value of a type or a text of a grammar (see `values`).

        Of `str` the slot has the text, cut before the stop string that ended it. Any other value is held to its type
        token by token and ends where it can end and the model would say something else; one that max_tokens cuts is
        GenerationFailed. A type checker takes `Literal[...]`, unions and `Annotated` for Any here.

        `boundary`: "raw" sends the text before it in its own tokens. "heal" takes back those that a continuation could
        change and has the model begin with what they say, in tokens of its choice; its `token_ids` have them, its text
        has not. "exact" refuses a text that ends in such tokens.

        What is drawn depends on the run's seed, the branch and the tokens so far, not on what runs beside it. A
        refused request raises here, a failed one at the slot; either way the state is as before.
        """
        return self._generate(lambda: form_of(kind), **asked)

    @overload
    def act(self, tools: Sequence[AnyTool], **asked: Unpack[Generation]) -> Slot[Call | Answer[str]]: ...

    @overload
    def act(self, tools: Sequence[AnyTool], answer: type[T], **asked: Unpack[Generation]) -> Slot[Call | Answer[T]]: ...

    @overload
    def act(
        self, tools: Sequence[AnyTool], answer: object, **asked: Unpack[Generation]
    ) -> Slot[Call | Answer[Any]]: ...

    def act(self, tools: Sequence[AnyTool], answer: Any = str, **asked: Unpack[Generation]) -> Slot[Call | Answer[Any]]:
        """Let the model call one of these functions or give an answer of this type: one generation, as `gen`'s.

        Nothing is called: `Call.run` does that. What the model wrote stays in the state as it is.
        """
        return self._generate(lambda: form_of_turn(tools, answer), **asked)

    def _generate(
        self,
        find_form: Callable[[], Form[T]],
        *,
        name: str | None = None,
        max_tokens: int = 64,
        stop: str | Sequence[str] = (),
        temperature: float = 1.0,
        boundary: Boundary = "raw",
        **sampling: Unpack[Sampling],
    ) -> Slot[T]:
        requests = self._asked("gen", "slot", name)
        with requests.beginning():
            if unknown := set(sampling) - set(Sampling.__annotations__):
                allowed = ", ".join(sorted(Generation.__annotations__))
                raise InvalidRequest(f"gen: {', '.join(sorted(unknown))} given; allowed: {allowed}")
            form = find_form()
            if stop and not form.is_text:
                raise InvalidRequest(f"stop: {stop!r} given with {form.name}, which ends by itself; allowed: with str")
            params = SamplingParams(
                max_tokens=max_tokens,
                stop=stop,
                temperature=temperature,
                seed=self._seed,
                grammar=form.grammar,
                grammar_end="any",
                prefix=self._healed(boundary),
                **sampling,
            )
            return self._start(Slot(form, requests), params)

    def _start(self, slot: Slot[T], params: SamplingParams) -> Slot[T]:
        with self._driver.lock:
            self._check_open()  # again: whoever closes it has the lock
            node = self._request(params).hold()
            before = self._content
            slot.runs(watch(node, lambda outcome: self._ended(slot, node, params, before, outcome)))
            self._says(slot, node, before)
        return slot

    def _asked(self, verb: str, kind: Literal["slot", "choice"], name: str | None) -> Requests:
        """The requests of something that may be asked for now, and have this name."""
        self._take_turn()
        self._check_message()
        check_kind("name", name, (str, NoneType), "a text, by which state[name] finds it")
        if name is not None and name in self._content.slots:
            raise StateMisuse(f"{verb}: {name!r} is the name of an earlier slot, in {self._where}; choose another")
        return Requests(kind, name, self._driver, self._where, is_async=self._run.is_async)

    def _says(self, slot: Slot[Any] | Choice[Any], node: Node, before: Content) -> None:
        """What was asked for, with its first request, comes next."""
        named = {**before.slots, slot.name: slot} if slot.name is not None else before.slots
        self._content = replace(before, said=Said(slot, before.message, before.said), slots=named)
        self._last = slot.requests
        self._observe(slot, node, before)

    def _healed(self, boundary: Boundary) -> str:
        """The end of the text before a generation that it begins with anew."""
        if boundary not in get_args(Boundary):
            refuse("boundary", boundary, '"raw", "heal" or "exact"')
        rest = "" if boundary == "raw" else self._content.healed(self._codec)[1]
        if rest and boundary == "exact":
            raise InvalidRequest(
                f"boundary: exact, where what follows could change the tokens of {rest[-40:]!r}; allowed: an end at a "
                'special or a generated token, "heal" or "raw"'
            )
        return rest

    def _request(self, params: SamplingParams) -> Node:
        """The request that goes on from here. It sends what came since the last one."""
        content = self._content
        if content.is_empty:
            text = self._codec.start_ids
        else:
            text = content.healed(self._codec)[0] if params.prefix else content.flushed(self._codec)
        if content.node is None:
            return root(self._run.origin, text, params)
        return content.node.forks(1, params, at=content.at, text=text)[0]

    def _ended(
        self, slot: Slot[Any], node: Node, params: SamplingParams, before: Content, outcome: Output | BaseException
    ) -> None:
        """Take what a request generated; where it failed, be as before it."""
        if isinstance(outcome, Output):
            self._charge(outcome.usage)
        choice = slot.take(outcome)
        if choice is None or self._closed_by is not None:
            self._content = replace(self._content, said=before.said, slots=before.slots)
        else:
            self._goes_on(node, params, choice)
        node.drop()

    def _goes_on(self, node: Node, params: SamplingParams, choice: Generated) -> None:
        """Go on behind what a request generated, but for what ended it."""
        node.output = ids = choice.token_ids
        if ids and choice.finish_reason == "stop" and ids[-1] in params.ending_token_ids(self._ending_ids):
            num_kept, rest = len(ids) - 1, ""
        elif choice.finish_reason == "stop":
            # No longer than 3 tokens is an unfinished character, which what healing begins with cannot finish.
            ahead = node.last_tokens(node.num_tokens - len(ids), 3) if not params.prefix else ()
            num_kept, rest = self._codec.kept(ids, params.prefix + choice.text, before=ahead)
        else:
            num_kept, rest = len(ids), ""
        at = node.num_tokens - len(ids) + num_kept
        self._hold(replace(self._content, node=node, at=at, committed=(), chosen=None, pending=rest))
        if self._is_pinned:
            self._pin_anew()

    def choose(
        self,
        options: Iterable[T],
        *,
        score: ScoreName = "sum",
        temperature: float = 0.0,
        end: str | None = None,
        name: str | None = None,
    ) -> Choice[T]:
        """Append the option that the model finds best behind what is here; with a temperature, one drawn by the score.

        Options are texts, or anything that `str` makes one of; Enum members count by their value. All are scored in one
        pass that computes what they share once. `score` names what decides (docs/language.md), and `end` is the text
        behind an option that "prefix_free" counts, by default the token that ends a sequence. Starts at once, as `gen`.
        """
        requests = self._asked("choose", "choice", name)
        temperature = number("temperature", temperature, 0)
        check_kind("options", options, Iterable, "texts, or what `str` makes them of")
        values = list(options)
        with self._driver.lock:
            self._check_open()
            before = self._content
            with requests.beginning():
                known = options_of(
                    values,
                    context=before.certain(self._codec),
                    pending=before.pending,
                    encode=partial(self._codec.encode, plain=bool(before.roles)),
                    score=score,
                    end=end,
                    start_ids=self._codec.start_ids,
                    ending_ids=self._ending_ids,
                )
                choice = Choice(values, known, requests)
                choice.runs(
                    self._run.origin,
                    temperature=temperature,
                    seed=self._seed,
                    on_end=lambda: self._chosen(choice, before),
                )
                self._says(choice, choice.nodes[0], before)
        return choice

    def _chosen(self, choice: Choice[Any], before: Content) -> None:
        """Take the option that was chosen; where none was, be as before."""
        ids = choice.committed
        if ids is None or self._closed_by is not None:
            self._content = replace(self._content, said=before.said, slots=before.slots)
        else:
            given = before.committed if not before.is_empty else self._codec.start_ids
            node = owner(self._run.origin, [*before.certain(self._codec), *ids])
            self._hold(replace(self._content, committed=(*given, *ids), chosen=node, pending=""))
        self._charge(choice.cost)

    @property
    def _ending_ids(self) -> frozenset[int]:
        return self._driver.backend.eos_token_ids

    def _observe(self, slot: Slot[Any] | Choice[Any], node: Node, before: Content) -> None:
        """Tell observers that a slot started, with its first request, and from now on what comes of it."""
        number, self._num_slots = self._num_slots, self._num_slots + 1
        if self._run.observers:
            self._tell_given(before)
            report = SlotReport(self._run.tell, self._where, number, slot.name)
            prompt = node.tokens(node.num_tokens)
            report.started(node.handle.number, self._driver.backend.explain(prompt, self._run.origin.namespace))
            slot.requests.tells(report)

    def _tell_given(self, content: Content) -> None:
        """Tell observers what text was appended since they last heard. O(what was)."""
        if not self._run.observers:
            return
        told, self._told = self._told, content.said
        pieces: list[Said] = []
        said = content.said
        while said is not None and said is not told and isinstance(said.what, str):
            pieces.append(said)
            said = said.before
        for message, given in groupby(reversed(pieces), key=lambda piece: piece.message):
            role, text = (
                content.roles[message] if message is not None else None,
                "".join(str(one.what) for one in given),
            )
            self._run.tell(TextGiven(where=self._where, role=role, text=text))

    # -- branching ------------------------------------------------------------------------------------------------

    @overload
    def fork(self, branches: int) -> Branches: ...

    @overload
    def fork(self, branches: Sequence[T]) -> ItemBranches[T]: ...

    def fork(self, branches: int | Sequence[Any]) -> Branches | ItemBranches[Any]:
        """A scope, `with` or `async with`, of so many branches or of one for each item. No copy, no text is sent.

        On leaving it, in whatever way, what branches still generate is cancelled and their pages are free.
        """
        from .scope import Branches, ItemBranches  # scopes are made of states

        self._take_turn()
        if isinstance(branches, Iterable):
            return ItemBranches(self, list(branches))
        return Branches(self, branches)

    def scratch(self) -> Scratch:
        """A scope, `with` or `async with`, of one branch, which is thrown away when it closes."""
        from .scope import Scratch

        self._take_turn()
        return Scratch(self)

    def adopt(self, branch: State) -> None:
        """Mark the winner among the branches of the scope that is open: this state goes on as it when that closes."""
        self._check_open()
        if self._scope is None:
            raise StateMisuse(f"adopt: no branches live, in {self._where}; call it inside of the scope that made them")
        self._scope.choose(branch)

    def splice(self, branch: State) -> None:
        """Append what was said in a branch since the fork, as text, once its scope has closed.

        The text is encoded anew and, wherever this state has gone on otherwise, computed anew, every token of it: KV
        depends on all that comes before. `adopt` computes nothing, but takes one branch alone.
        """
        check_kind("splice", branch, State, "a branch of this state")
        self._take_turn()
        if branch._parent is not self:
            raise StateMisuse(f"splice: {branch!r} is no branch of {self!r}; splice those of its own scopes")
        if branch._content.roles != branch._begun.roles:
            raise StateMisuse(f"splice: {branch!r} has messages of its own, which are no text; append what they say")
        self += branch._since_fork()

    def _since_fork(self) -> str:
        self._settle()
        return "".join(said.text for said in self._content.things(since=self._begun.said))

    def mark(self) -> Mark:
        """This moment, to `rewind` to."""
        self._take_turn()
        with self._driver.lock:
            self._check_open()
            self._tell_given(self._content)
            self._marked += self._content.hold()
        return Mark(self, self._content)

    def rewind(self, mark: Mark) -> None:
        """Be as at the mark. Computes nothing; what is generated then is drawn anew."""
        check_kind("rewind", mark, Mark, "what mark() of this state returned")
        self._take_turn()
        if mark._state is not self:
            raise StateMisuse(f"rewind: to the mark of another state, in {self._where}")
        self._go_on_as(mark._content, told=mark._content.said)
        self._seed = seed_of(self._seed, (-1,))  # no branch has that number
        self._run.tell(Rewound(where=self._where))

    def _go_on_as(self, content: Content, *, told: Said | None) -> None:
        with self._driver.lock:
            self._check_open()
            self._told = told
            self._hold(content)

    def _hold(self, content: Content) -> None:
        """Have this content from now on, and hold what it needs in place of what was needed before."""
        held, self._held = self._held, content.hold()
        self._content = content
        for node in held:
            node.drop()

    # -- reading --------------------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """Everything as text, what the chat template wrote included; special tokens add nothing. O(tokens)."""
        self._settle()
        node, at = self._content.node, self._content.at
        sent = node.tokens(at) if node is not None else []
        return self._codec.decode([*sent, *self._content.committed]) + self._content.pending

    @property
    def tokens(self) -> tuple[int, ...]:
        """Everything as token ids, as a generation would send it now. O(tokens)."""
        self._settle()
        return tuple(self._content.tokens(self._codec))

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages so far, as role and content."""
        self._settle()
        parts: list[list[str]] = [[] for _ in self._content.roles]
        for said in self._content.things():
            if said.message is not None:
                parts[said.message].append(said.text)
        roles = self._content.roles
        return [{"role": role, "content": "".join(part)} for role, part in zip(roles, parts, strict=True)]

    @property
    def cost(self) -> Cost:
        """What this state and its branches have cost so far."""
        self._settle()
        return self._cost

    @property
    def path(self) -> tuple[int, ...]:
        """Which branch this is: the numbers of the branches that lead to it, each among those of its parent."""
        return self._where.path

    def __getitem__(self, name: str) -> Any:
        """The slot or choice of this name, here or before the fork."""
        if name not in self._content.slots:
            raise StateMisuse(f"slot: none is named {name!r}, in {self._where}; there are {list(self._content.slots)}")
        return self._content.slots[name]

    def __repr__(self) -> str:
        return f"<state of {self._where}>"

    def _repr_html_(self) -> str:
        """For notebooks: given, generated and forced text and the chat template's, told apart. Waits for nothing."""
        from .notebook import html_of

        cost = self._cost
        title = f"{self._where}, {cost.cached_tokens} of {cost.prompt_tokens} prompt tokens cached"
        return html_of(self._content, self._driver.template, self._codec, title)

    def pin(self, ttl: int | None = None) -> None:
        """From now on keep what the cache has of this state, anew behind each generation: until it closes or for `ttl`
        engine steps without one. Computes nothing; where the engine's `pin_budget` is used up, nothing is kept."""
        ttl = optional_integer("ttl", ttl, 1)
        self._take_turn()
        with self._driver.lock:
            self._check_open()
            self._pinned_for, self._is_pinned = ttl, True
            self._pin_anew()

    def _pin_anew(self) -> None:
        backend, content = self._driver.backend, self._content
        with self._driver.lock, suppress(InvalidRequest):
            if self._pin is not None:
                pin, self._pin = self._pin, None
                backend.unpin(pin)
            if content.node is not None and self._is_pinned:
                tokens, namespace = content.node.tokens(content.at), self._run.origin.namespace
                self._pin = backend.pin(tokens, namespace, ttl=self._pinned_for)

    # -- turns ----------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if isinstance(self._closed_by, BranchCancelled):
            raise self._closed_by
        if self._closed_by is not None:
            raise StateMisuse(f"state: used after its end, in {self._where}; return values, not states")

    def _take_turn(self) -> None:
        """Nothing else goes on with this state now. StateMisuse where that would have no meaning."""
        self._check_open()
        if self._scope is not None:
            raise StateMisuse(f"state: its branches live, in {self._where}; use them, or leave their scope first")
        self._settle()

    def _check_message(self) -> None:
        if self._content.roles and not self._content.is_open:
            raise StateMisuse(f"state: no message is open, in {self._where}; open one, such as `with s.user():`")

    def _settle(self) -> None:
        """The last generation has ended, and if it failed, somebody knows."""
        requests = self._last
        if requests is not None:
            requests.settle()
            if not requests.was_raised:
                requests.raise_error()

    async def _settled(self) -> None:
        if self._last is not None:
            await self._last.settled()
            self._settle()

    def _charge(self, usage: Usage) -> None:
        state: State | None = self
        while state is not None:
            state._cost = state._cost.plus(usage)
            state = state._parent

    def close(self, reason: BaseException | None = None, *, adopted: bool = False) -> None:
        """Cancel what runs and give everything back, branches first. Twice is fine."""
        with self._driver.lock:
            if self._closed_by is not None:
                return
            self._closed_by = reason if reason is not None else StateMisuse("state: closed before this had ended")
            if self._scope is not None:
                self._scope.close(reason)
            if self._last is not None:
                self._last.cancel(self._closed_by)
            for node in (*self._marked, *self._held):
                node.drop()
            self._is_pinned = False
            self._pin_anew()
            self._marked, self._held = [], ()
            if self._parent is not None:
                self._run.tell(BranchClosed(where=self._where, adopted=adopted))
