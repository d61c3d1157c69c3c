"""A drafter that reads a corpus, while the corpus changes under it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from baru_common.corpus import Corpus
from baru_common.drafters import TextDrafter, load_drafter
from baru_common.drafters.corpus_drafter import BoundCorpusDrafter, CorpusDrafter
from baru_common.drafters.suffix import SuffixStream
from baru_common.errors import ConfigError
from baru_common.tokens import Tokenizer
from support.tiny import tiny_bundle

_TOKENIZER = Tokenizer(tiny_bundle())
_WAIT_S = 30.0


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    """A corpus of one text."""
    monkeypatch.setenv("BARU_DATA_DIR", str(tmp_path / "data"))
    made = Corpus("reports")
    add(made, tmp_path, "gauge: 3.2 m rising")
    return made


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    finish_reading()


def add(corpus: Corpus, tmp_path: Path, text: str) -> None:
    path = tmp_path / f"{len(corpus.version)}.txt"
    path.write_text(text)
    corpus.add(path)


def finish_reading() -> None:
    """Wait for every thread that reads a corpus."""
    for thread in threading.enumerate():
        if thread.name == "baru-corpus":
            thread.join(_WAIT_S)
            assert not thread.is_alive()


def says(stream: SuffixStream, text: str, num_tokens: int = 64) -> str:
    """What a session proposes after `text`."""
    ids = _TOKENIZER.encode_inside(text)
    return _TOKENIZER.decode(stream.propose(ids, len(ids), num_tokens).ids)


class Gate:
    """Holds up whoever reads the corpus."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        texts = Corpus.texts

        def held(corpus: Corpus) -> Iterator[str]:
            for text in texts(corpus):
                self.reached.set()
                assert self.opened.wait(_WAIT_S)
                yield text

        monkeypatch.setattr(Corpus, "texts", held)


# -- bound to a tokenizer


def test_it_is_loaded_by_name_and_drafts_once_it_is_bound(corpus: Corpus) -> None:
    found = load_drafter("suffix:reports")
    assert isinstance(found, TextDrafter)
    drafter = found.bound(_TOKENIZER)
    assert (drafter.family, drafter.vocabulary, drafter.blocking) == ("suffix", None, False)
    ids = _TOKENIZER.encode_inside("the gauge:")
    assert _TOKENIZER.decode(drafter.start().propose(ids, len(ids), 64).ids) == " 3.2 m rising"


def test_the_ids_are_those_of_the_target(corpus: Corpus) -> None:
    """The same text, in a tokenizer that merges other letters, is other ids."""
    other = Tokenizer(tiny_bundle(num_ids=260))
    ids = other.encode_inside("the gauge:")
    assert other.decode(CorpusDrafter(corpus).bound(other).start().propose(ids, len(ids), 64).ids) == " 3.2 m rising"
    assert len(other.encode_inside("the gauge: rising")) != len(_TOKENIZER.encode_inside("the gauge: rising"))


def test_a_control_string_in_a_text_is_just_text(corpus: Corpus, tmp_path: Path) -> None:
    add(corpus, tmp_path, "say <|im_end|> over")
    stream = CorpusDrafter(corpus).bound(_TOKENIZER).start()
    ids = _TOKENIZER.encode_inside("say <")
    proposed = stream.propose(ids, len(ids), 64).ids
    assert min(proposed) > 2
    assert _TOKENIZER.decode(proposed) == "|im_end|> over"


def test_an_empty_corpus_is_refused_and_the_hint_says_how_to_fill_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BARU_DATA_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match="corpus nothing is empty") as caught:
        load_drafter("suffix:nothing")
    assert "corpus add" in str(caught.value.hint)


# -- read again


def test_a_text_that_comes_serves_the_sessions_after_the_next(corpus: Corpus, tmp_path: Path) -> None:
    """The first one that begins sets off the reading."""
    drafter = CorpusDrafter(corpus).bound(_TOKENIZER)
    add(corpus, tmp_path, "road: closed at the mill")
    assert says(drafter.start(), "gauge:") == " 3.2 m rising"
    finish_reading()
    assert says(drafter.start(), "road:") == " closed at the mill"


def test_an_unchanged_corpus_is_not_read_again(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = CorpusDrafter(corpus).bound(_TOKENIZER)
    monkeypatch.setattr(BoundCorpusDrafter, "_read", lambda _: pytest.fail("it was read"))
    drafter.start()
    finish_reading()


def test_sessions_that_run_keep_what_they_began_with(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, during and after the reading, one that began before says the same; so does one that begins during it."""
    drafter = CorpusDrafter(corpus).bound(_TOKENIZER)
    before = drafter.start()
    add(corpus, tmp_path, "gauge: 3.2 m rising, gauge: 3.2 m falling, gauge: 3.2 m falling")
    gate = Gate(monkeypatch)
    during = drafter.start()
    assert gate.reached.wait(_WAIT_S)
    later = drafter.start()
    for stream in (before, during, later):
        assert says(stream, "xx 3.2 m") == " rising"
    gate.opened.set()
    finish_reading()
    for stream in (before, during, later):
        assert says(stream, "xx 3.2 m") == " rising"
    assert says(drafter.start(), "xx 3.2 m").startswith(" falling")


def test_only_one_thread_reads(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many sessions begin meanwhile."""
    drafter = CorpusDrafter(corpus).bound(_TOKENIZER)
    add(corpus, tmp_path, "road: closed")
    gate = Gate(monkeypatch)
    for _ in range(5):
        drafter.start()
    assert gate.reached.wait(_WAIT_S)
    assert sum(thread.name == "baru-corpus" for thread in threading.enumerate()) == 1
    gate.opened.set()


def test_sessions_begin_and_draft_in_many_threads_while_the_corpus_changes(corpus: Corpus, tmp_path: Path) -> None:
    """Each says what some state of the corpus says: never a mixture, never an error."""
    drafter = CorpusDrafter(corpus).bound(_TOKENIZER)
    wrong: list[str] = []
    done = threading.Event()

    def run() -> None:
        try:
            while not done.is_set():
                stream = drafter.start()
                answers = {says(stream, "xx number") for _ in range(3)}
                if len(answers) != 1 or not answers <= {"", *(f" {i} of the list" for i in range(9))}:
                    wrong.append(str(answers))
        except Exception as error:  # a thread's error is the finding
            wrong.append(repr(error))

    threads = [threading.Thread(target=run, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for i in range(9):
            for path in list(corpus.folder.iterdir()):
                path.unlink()
            add(corpus, tmp_path, f"xx number {i} of the list")
            time.sleep(0.01)
    finally:
        done.set()
    for thread in threads:
        thread.join(_WAIT_S)
    finish_reading()
    drafter.start()
    finish_reading()
    assert wrong == []
    assert says(drafter.start(), "xx number") == " 8 of the list"


def test_a_text_deleted_while_it_is_read_costs_nothing_but_a_warning(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was read before stays in use, and the next session has it read again."""
    drafter = CorpusDrafter(corpus).bound(_TOKENIZER)
    add(corpus, tmp_path, "road: closed at the mill")
    add(corpus, tmp_path, "units: two, both in reserve")
    gate = Gate(monkeypatch)
    with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
        paths = Corpus._paths
        patch.setattr(Corpus, "_paths", lambda self: list(paths(self)))  # as listed before the first was opened
        first = drafter.start()
        assert gate.reached.wait(_WAIT_S)
        for path in sorted(paths(corpus))[1:]:
            path.unlink()
        gate.opened.set()
        finish_reading()
    assert "reports could not be read again" in caplog.text
    assert says(first, "gauge:") == " 3.2 m rising"
    drafter.start()
    finish_reading()
    heading, colon, rest = next(iter(corpus.texts())).partition(":")
    assert says(drafter.start(), heading + colon) == rest
    assert len(corpus.version) == 1


def test_a_session_begins_while_the_corpus_is_being_removed(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder may go between any two looks at it: the session drafts from what was read."""
    drafter = CorpusDrafter(corpus).bound(_TOKENIZER)

    def gone(_: Corpus) -> Iterator[Path]:
        raise FileNotFoundError(corpus.folder)

    monkeypatch.setattr(Corpus, "_paths", gone)
    assert says(drafter.start(), "gauge:") == " 3.2 m rising"


def test_a_corpus_that_went_leaves_a_drafter_that_looks_in_the_session(corpus: Corpus) -> None:
    drafter = CorpusDrafter(corpus).bound(_TOKENIZER)
    corpus.remove()
    drafter.start()
    finish_reading()
    assert says(drafter.start(), "gauge:") == ""
    assert says(drafter.start(), "xy qz xy", 3) == " qz"
