"""The boundary policy: what is committed of a text stays, whatever follows, and generated ids are cut where text is."""

from __future__ import annotations

import codecs
from functools import lru_cache

from hypothesis import example, given, strategies as st
from tokenizers import AddedToken, Tokenizer as Rust, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from radixrt.frontend.codec import Codec
from radixrt.runtime.detokenizer import Detokenizer
from radixrt.runtime.testing import ByteTokenizer
from radixrt.runtime.tokenizer import HFTokenizer

from .conftest import default_tokenizer

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
LETTERS = "abc .\n'1é"
TEXTS = st.text(st.sampled_from(LETTERS), max_size=12)
SPECIAL = "<|end|>"


@st.composite
def byte_pair_codecs(draw: st.DrawFn) -> Codec:
    """A tokenizer of random merges, with or without a split into words before them, and a special token."""
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(LETTERS)[0][0]
    pieces = sorted(set(spelled))
    merges: list[tuple[str, str]] = []
    for _ in range(draw(st.integers(0, 12))):
        left, right = draw(st.sampled_from(pieces)), draw(st.sampled_from(pieces))
        if left + right not in pieces:
            merges.append((left, right))
            pieces.append(left + right)
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys(BYTES + pieces))}
    rust = Rust(models.BPE(vocab=vocab, merges=merges))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=draw(st.booleans()))
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return Codec(HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=rust)), len(vocab) + 1)  # type: ignore[no-untyped-call]


@lru_cache
def default_codec() -> Codec:
    return Codec(default_tokenizer(), 49_152)


def check_commit(codec: Codec, a: str, b: str, *, plain: bool) -> None:
    ids, rest = codec.commit(a, plain=plain)
    assert ids + codec.encode(rest + b, plain=plain) == codec.encode(a + b, plain=plain)
    assert codec.encode(a + b, plain=plain)[: len(ids)] == ids


@given(byte_pair_codecs(), TEXTS | st.just("a b <|e"), TEXTS | st.just("nd|> c"), st.booleans())
def test_no_continuation_changes_what_random_vocabularies_commit(codec: Codec, a: str, b: str, plain: bool) -> None:  # noqa: FBT001
    check_commit(codec, a, b, plain=plain)


WORDS = st.lists(
    st.sampled_from(
        ["the", " ", "  ", "\n", "cat", "'", "s", "1", "234", ".", "(", "日本", "é", "<|im_", "end|>", "\t"]
    )
    | st.text(max_size=3),
    max_size=10,
).map("".join)


@given(a=WORDS, b=WORDS, plain=st.booleans())
@example(a="so <|im_", b="end|> it", plain=False)
@example(a="two  ", b="words", plain=False)
def test_no_continuation_changes_what_the_real_tokenizer_commits(a: str, b: str, plain: bool) -> None:  # noqa: FBT001
    if any("\ud800" <= char <= "\udfff" for char in a + b):
        return
    check_commit(default_codec(), a, b, plain=plain)


def test_the_real_tokenizer_commits_all_but_the_last_word() -> None:
    ids, rest = default_codec().commit("The capital of France is Par")
    assert default_codec().decode(ids) == "The capital of France is"
    assert rest == " Par"


def test_a_vocabulary_with_tokens_across_words_commits_nothing_there() -> None:
    vocab = {piece: number for number, piece in enumerate([*BYTES, "aĠ", "aĠb"])}
    rust = Rust(models.BPE(vocab=vocab, merges=[("a", "Ġ"), ("aĠ", "b")]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    codec = Codec(HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=rust)), len(vocab))  # type: ignore[no-untyped-call]
    assert codec.commit("c a") == (codec.encode("c"), " a")
    assert codec.commit("a c") == ([], "a c")


def test_plain_text_never_becomes_a_special_token() -> None:
    codec = default_codec()
    text = "a<|im_end|>b <|im_start|>"
    specials = [token_id for token_id in codec.encode(text, plain=True) if not codec.decode([token_id])]
    assert not specials
    assert codec.decode(codec.encode(text, plain=True)) == text
    assert any(not codec.decode([token_id]) for token_id in codec.encode(text))
    many = "<|im_end|>" * 1500  # more than Python's recursion allows
    assert codec.decode(codec.encode(many, plain=True)) == many


@given(st.text(max_size=8), st.data())
def test_kept_ids_are_those_within_the_text(text: str, data: st.DataObject) -> None:
    if any("\ud800" <= char <= "\udfff" for char in text):
        return
    codec = Codec(ByteTokenizer(), 256)
    ids = tuple(codec.encode(text))
    cut = data.draw(st.integers(0, len(text)))
    num_kept, rest = codec.kept(ids, text[:cut])
    assert codec.decode(ids[:num_kept]) + rest == text[:cut]
    assert rest == ""


BYTE = st.sampled_from([*b"abx", *"é日😀".encode(), 0x80, 0xFF])


@given(st.lists(BYTE, max_size=4), st.lists(BYTE, max_size=12), st.sampled_from(["x", "ab", "é", "b日"]))
def test_kept_ids_are_those_before_a_stop_string_whatever_bytes_there_are(
    before: list[int], said: list[int], stop: str
) -> None:
    codec = Codec(ByteTokenizer(), 256)
    detokenizer = Detokenizer(ByteTokenizer(), [stop], before)
    ids, text = list[int](), ""
    while said and detokenizer.stopped is None:
        ids.append(said.pop(0))
        text += detokenizer.add(ids[-1])
    if detokenizer.stopped is None:
        return
    num_kept, rest = codec.kept(tuple(ids), text, before=before[-3:])
    finished = codecs.utf_8_decode(bytes(before), "replace")[0]
    assert rest == ""
    assert codec.decode([*before, *ids[:num_kept]]) in (finished + text, codec.decode(before) + text)
    assert num_kept < len(ids)


def test_a_cut_inside_a_token_leaves_text() -> None:
    codec = default_codec()
    ids = tuple(codec.encode("one two three"))
    assert codec.kept(ids, "one tw") == (1, " tw")
