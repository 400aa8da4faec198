"""Tests the text of the training service: its order, its growth, and its saved position."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from service.corpus import Corpus, CorpusChangedError

CONTEXT = 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Makes two files, of 5 and 3 windows and some bytes more."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_bytes(bytes(range(22)))
    (tmp_path / "sub" / "b.md").write_bytes(bytes(range(100, 115)))
    return tmp_path


def corpus_of(folder: Path, seed: int = 0) -> Corpus:
    corpus = Corpus(folder, CONTEXT, seed)
    corpus.look()
    return corpus


def windows(corpus: Corpus, count: int) -> list[bytes]:
    return [bytes(row) for row in corpus.next_batch(count).tolist()]


def append(file: Path, text: bytes) -> None:
    with file.open("ab") as opened:
        opened.write(text)


def restored(folder: Path, state: dict[str, Any]) -> Corpus:
    corpus = Corpus(folder, CONTEXT, 0)
    corpus.load_state_dict(json.loads(json.dumps(state)))  # nothing is shared
    return corpus


def test_a_pass_visits_each_window_once(folder: Path) -> None:
    expected = [bytes(range(k, k + 5)) for k in (0, 4, 8, 12, 16, 100, 104, 108)]
    assert sorted(windows(corpus_of(folder), 8)) == expected


def test_batches_follow_one_another_whatever_their_size(folder: Path) -> None:
    parts = corpus_of(folder)
    assert windows(corpus_of(folder), 21) == [w for n in (1, 2, 18) for w in windows(parts, n)]


@pytest.mark.parametrize("before", [1, 3, 8, 13])
def test_a_corpus_continues_where_its_state_was_saved(folder: Path, before: int) -> None:
    corpus = corpus_of(folder)
    windows(corpus, before)
    again = restored(folder, corpus.state_dict())
    assert windows(again, 20) == windows(corpus, 20)


def test_text_found_by_a_look_comes_once_in_this_pass(folder: Path) -> None:
    corpus = corpus_of(folder)
    windows(corpus, 3)
    (folder / "c.txt").write_bytes(bytes(range(200, 209)))
    assert corpus.look() == 8
    rest = windows(corpus, 7)
    assert sorted(rest[5:]) == [bytes(range(200, 205)), bytes(range(204, 209))]
    assert corpus.position == {"pass": 0, "part": 1, "window": 2}


def test_the_next_pass_mixes_new_text_with_the_rest(folder: Path) -> None:
    corpus = corpus_of(folder)
    (folder / "c.txt").write_bytes(bytes(range(200, 241)))
    corpus.look()
    windows(corpus, 18)
    new = [window[0] >= 200 for window in windows(corpus, 18)]
    assert sum(new) == 10
    assert new != sorted(new)


def test_no_byte_is_lost_where_a_file_was_appended_to(folder: Path) -> None:
    corpus = corpus_of(folder)
    for size in (23, 24, 29, 30, 45):  # in pieces that are no windows
        (folder / "a.txt").write_bytes(bytes(range(size)))
        corpus.look()
    found = sorted(w for w in windows(corpus, corpus.windows) if w[0] < 100)
    assert found == [bytes(range(k, k + 5)) for k in range(0, 41, 4)]


def test_a_state_with_parts_goes_on_in_the_middle_of_one(folder: Path) -> None:
    corpus = corpus_of(folder)
    append(folder / "a.txt", bytes(range(22, 60)))
    corpus.look()
    windows(corpus, 11)
    again = restored(folder, corpus.state_dict())
    assert again.position["part"] == 1
    assert windows(again, 40) == windows(corpus, 40)
    append(folder / "a.txt", bytes(range(60, 90)))
    assert again.look() == corpus.look() == 32
    assert windows(again, 40) == windows(corpus, 40)


def test_a_file_that_is_gone_or_shorter_is_an_error(folder: Path) -> None:
    corpus = corpus_of(folder)
    (folder / "a.txt").write_bytes(bytes(3))
    with pytest.raises(CorpusChangedError, match=r"a\.txt is not what it was: it ends before byte"):
        windows(corpus, 8)
    (folder / "a.txt").unlink()
    with pytest.raises(CorpusChangedError, match="it is gone"):
        windows(corpus, 8)


def test_a_resume_with_other_bytes_is_an_error(folder: Path) -> None:
    state = corpus_of(folder).state_dict()
    text = bytearray((folder / "a.txt").read_bytes())
    text[20] += 1  # the last target
    (folder / "a.txt").write_bytes(text)
    with pytest.raises(CorpusChangedError, match="its first 21 bytes are others"):
        restored(folder, state)
