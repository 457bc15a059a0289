"""The state of a program: what an author appends to, generates from, branches and reads.

Knows nothing of how programs are run, or of requests: a state is written over one branch of a run, which has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack, get_args, overload

from radixrt.runtime import Grammar, InvalidRequest, SamplingParams, checks

from .branch import Branch
from .choice import Choice
from .content import Content
from .failures import StateMisuse
from .options import ScoreName, options_of
from .run import Boundary, Cost, Generation, Sampling
from .slot import Slot
from .tools import Answer, AnyTool, Call, form_of_turn
from .values import Form, form_of

if TYPE_CHECKING:
    from .scope import Branches, ItemBranches, Scratch

T = TypeVar("T")
Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """A moment of a state, to go back to."""

    _branch: Branch
    _content: Content


class State:
    """Text and generations, in order. Appending encodes nothing that is there; generated ids stay as they are.

    One thread or task uses a state. While a generation runs, what comes next waits for it in a plain program, and is
    refused in an async one until it was awaited. While branches live, the state can be read and nothing else.
    """

    def __init__(self, branch: Branch) -> None:
        """For programs, sessions and scopes; authors are given theirs."""
        self._branch = branch

    # -- writing --------------------------------------------------------------------------------------------------

    def __iadd__(self, text: str | Slot[Any] | Choice[Any]) -> Self:
        """Append text, or the value of a slot or choice as text."""
        branch = self._branch
        content = branch.take_word()
        if not isinstance(text, (str, Slot, Choice)):
            said = f"{text!r:.80} appended; allowed: a text, a slot or a choice"
            raise InvalidRequest(f"state: {said}, in {branch.where}; write str(...) if that is meant")
        written = str(text)
        checks.text("state", written)
        branch.content = content.plus(written, start_ids=branch.codec.start_ids)
        return self

    @contextmanager
    def message(self, role: Role) -> Iterator[None]:
        """Everything in this block is one message of a conversation, laid out by the model's chat template.

        It is closed whatever ends the block; what the template puts behind it is written once more follows.
        """
        checks.instance("message", role, str, f"a role, such as {', '.join(get_args(Role))}")
        branch = self._branch
        content = branch.take_turn()
        if content.is_open or (content.said is not None and not content.roles):
            what = f"inside of {content.roles[-1]}'s" if content.is_open else "after text that is in none"
            raise StateMisuse(f"message: {role}'s opened {what}, in {branch.where}; write one after the other")
        items = branch.driver.template.opening((*content.roles, role))
        branch.content = content.opened(role, items, branch.codec)
        try:
            yield
        finally:
            branch.content = replace(branch.content, is_open=False)

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
        requests = self._branch.asked("gen", "slot", name)
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
                seed=self._branch.seed,
                grammar=form.grammar,
                grammar_end="any",
                prefix=self._healed(boundary),
                **sampling,
            )
            slot = Slot(form, requests)
            self._branch.generate(slot, params)
        return slot

    def _healed(self, boundary: Boundary) -> str:
        """The end of the text before a generation that it begins with anew."""
        if boundary not in get_args(Boundary):
            checks.refuse("boundary", boundary, '"raw", "heal" or "exact"')
        rest = "" if boundary == "raw" else self._branch.content.healed(self._branch.codec)[1]
        if rest and boundary == "exact":
            raise InvalidRequest(
                f"boundary: exact, where what follows could change the tokens of {rest[-40:]!r}; allowed: an end at a "
                'special or a generated token, "heal" or "raw"'
            )
        return rest

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
        branch = self._branch
        requests = branch.asked("choose", "choice", name)
        temperature = checks.number("temperature", temperature, 0)
        values = checks.items("options", options, "a sequence of texts, or of what `str` makes them of")
        content, codec = branch.content, branch.codec
        with requests.beginning():
            known = options_of(
                values,
                context=content.certain(codec),
                pending=content.pending,
                encode=partial(codec.encode, plain=bool(content.roles)),
                score=score,
                end=end,
                start_ids=codec.start_ids,
                ending_ids=branch.driver.backend.eos_token_ids,
            )
            choice = Choice(values, known, requests)
            branch.choose(choice, temperature=temperature)
        return choice

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

        self._branch.take_turn()
        if isinstance(branches, Iterable):
            return ItemBranches(self._branch, checks.items("fork", branches, "a count, or a sequence of items"))
        return Branches(self._branch, branches)

    def scratch(self) -> Scratch:
        """A scope, `with` or `async with`, of one branch, which is thrown away when it closes."""
        from .scope import Scratch

        self._branch.take_turn()
        return Scratch(self._branch)

    def adopt(self, branch: State) -> None:
        """Mark the winner among the branches of the scope that is open: this state goes on as it when that closes."""
        self._branch.check_open()
        scope = self._branch.scope
        if scope is None:
            where = self._branch.where
            raise StateMisuse(f"adopt: no branches live, in {where}; call it inside of the scope that made them")
        scope.choose(branch)

    def splice(self, branch: State) -> None:
        """Append what was said in a branch since the fork, as text, once its scope has closed.

        The text is encoded anew and, wherever this state has gone on otherwise, computed anew, every token of it: KV
        depends on all that comes before. `adopt` computes nothing, but takes one branch alone.
        """
        checks.instance("splice", branch, State, "a branch of this state")
        self._branch.take_turn()
        spliced = branch._branch
        if spliced.parent is not self._branch:
            raise StateMisuse(f"splice: {branch!r} is no branch of {self!r}; splice those of its own scopes")
        if spliced.content.roles != spliced.begun.roles:
            raise StateMisuse(f"splice: {branch!r} has messages of its own, which are no text; append what they say")
        self += "".join(said.text for said in spliced.settle().things(since=spliced.begun.said))

    def mark(self) -> Mark:
        """This moment, to `rewind` to."""
        return Mark(self._branch, self._branch.mark())

    def rewind(self, mark: Mark) -> None:
        """Be as at the mark. Computes nothing; what is generated then is drawn anew."""
        checks.instance("rewind", mark, Mark, "what mark() of this state returned")
        self._branch.take_turn()
        if mark._branch is not self._branch:
            raise StateMisuse(f"rewind: to the mark of another state, in {self._branch.where}")
        self._branch.rewind(mark._content)

    # -- reading --------------------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """Everything as text, what the chat template wrote included; special tokens add nothing. O(tokens)."""
        return self._branch.settle().text(self._branch.codec)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Everything as token ids, as a generation would send it now. O(tokens)."""
        return tuple(self._branch.settle().tokens(self._branch.codec))

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages so far, as role and content."""
        return self._branch.settle().messages()

    @property
    def cost(self) -> Cost:
        """What this state and its branches have cost so far."""
        self._branch.settle()
        return self._branch.cost

    @property
    def path(self) -> tuple[int, ...]:
        """Which branch this is: the numbers of the branches that lead to it, each among those of its parent."""
        return self._branch.where.path

    def __getitem__(self, name: str) -> Any:
        """The slot or choice of this name, here or before the fork."""
        slots = self._branch.content.slots
        if name not in slots:
            raise StateMisuse(f"slot: none is named {name!r}, in {self._branch.where}; there are {list(slots)}")
        return slots[name]

    def __repr__(self) -> str:
        return f"<state of {self._branch.where}>"

    def _repr_html_(self) -> str:
        """For notebooks: given, generated and forced text and the chat template's, told apart. Waits for nothing."""
        from .notebook import html_of

        branch, cost = self._branch, self._branch.cost
        title = f"{branch.where}, {cost.cached_tokens} of {cost.prompt_tokens} prompt tokens cached"
        return html_of(branch.content, branch.driver.template, branch.codec, title)

    def pin(self, ttl: int | None = None) -> None:
        """From now on keep what the cache has of this state, anew behind each generation: until it closes or for `ttl`
        engine steps without one. Computes nothing; where the engine's `pin_budget` is used up, nothing is kept."""
        self._branch.pin(checks.optional_integer("ttl", ttl, 1))

    def close(self, reason: BaseException | None = None) -> None:
        """Cancel what runs and give everything back, branches first. Twice is fine."""
        self._branch.close(reason)
