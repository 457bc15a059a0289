"""Request lengths as people have them: numbers, lists, files of two formats; and how a wrong one is named."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from radixrt.frontend.lengths import Lengths
from radixrt.runtime import InvalidRequest

FORMS = {
    "bare": "12,5\n7,0\n\n100,33\n",
    "spaces": " 12 , 5 \n7,0\n100,33",
    "aibrix": "timestamp_ms,prompt_len,output_len\n6011,12,5\n6917,7,0\n7175,100,33\n",
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,12,5\na,7,0\nb,100,33\n",
    "swapped": "output tokens,prompt tokens\n5,12\n0,7\n33,100\n",
    "quoted": '"prompt","what","output"\n12,"a, b",5\n7,,0\n100,"two\nlines",33\n',
    "windows": "\ufeffprompt,output\r\n12,5\r\n7,0\r\n100,33\r\n",
}


def read(tmp_path: Path, content: str | bytes, name: str = "lengths.csv") -> Lengths:
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return Lengths.of(tmp_path / name)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("zipped", [False, True])
def test_forms_of_files(form: str, zipped: bool, tmp_path: Path) -> None:  # noqa: FBT001 - a parameter of the test
    content = FORMS[form].encode()
    lengths = read(tmp_path, gzip.compress(content) if zipped else content, "lengths.gz" if zipped else "lengths")
    assert lengths.prompt.tolist() == [12, 7, 100]
    assert lengths.output.tolist() == [5, 1, 33]  # no output is counted as one token


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)), min_size=1))
def test_lists_keep_every_number(pairs: list[tuple[int, int]]) -> None:
    lengths = Lengths.of(pairs)
    assert list(zip(lengths.prompt.tolist(), lengths.output.tolist(), strict=True)) == pairs
    same = Lengths.of(np.array(pairs))
    assert np.array_equal(same.prompt, lengths.prompt)
    assert np.array_equal(same.output, lengths.output)


@pytest.mark.parametrize(
    ("numbers", "expected"), [((225.4, 73.6), [225, 74]), ([8, 9], [8, 9]), (np.array([3, 4]), [3, 4])]
)
def test_two_numbers_are_one_kind_of_request(numbers: Any, expected: list[int]) -> None:
    lengths = Lengths.of(numbers)
    assert [*lengths.prompt.tolist(), *lengths.output.tolist()] == expected


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "none given"),
        ("\n\n", "none given"),
        ("prompt,output\n", "none given"),
        ("12,5\n7,-1\n", "line 2: '-1' output tokens"),
        ("12,5\n0,1\n", "line 2: '0' prompt tokens"),
        ("12,5\nseven,1\n", "line 2: 'seven' prompt tokens"),
        ("12,5\n\n7\n", "line 3: '7' given"),
        ("prompt,output\n12,5\n7\n", "line 3"),
        ("id,prompt,output\n1,2\n", "line 2: 2 columns given"),
        ("12,nan\n", "line 1: 'nan' output tokens"),
        ("12,1e30\n", "line 1: '1e30' output tokens"),
        ("12;5\n", "line 1"),
        ("Dear reader, this is a letter.\n", "no column for prompt and output lengths"),
        ("prompt,answer\n1,2\n", "no column for output lengths in 'prompt,answer'"),
        (b"\xff\xfe\x00", "no text"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_with_its_line(content: str | bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(tmp_path, content)
    assert words in str(caught.value), str(caught.value)


@pytest.mark.parametrize("content", [b"no gzip", gzip.compress(b"1,2\n" * 99)[:-12]], ids=["no archive", "cut off"])
def test_a_damaged_archive_is_said(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no text"):
        read(tmp_path, content, "lengths.csv.gz")


@pytest.mark.parametrize("given", [[], (), 7, None, [(1, 2, 3)], [1, 2, 3], ["12", "34"], [(1, "x")], [(1, None)], {}])
def test_what_is_no_list_of_pairs_is_refused(given: Any) -> None:
    with pytest.raises(InvalidRequest, match="lengths"):
        Lengths.of(given)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Lengths.of(tmp_path / "nowhere.csv")
