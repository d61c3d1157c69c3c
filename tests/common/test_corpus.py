"""A node's own texts: what is taken in, what is left out, who may read it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from baru_common import corpus as module
from baru_common.corpus import DEFAULT_CORPUS, SUFFIXES, Added, Corpus, corpora
from baru_common.drafters import load_drafter
from baru_common.errors import ConfigError
from baru_common.folders import data_folder


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The node's data folder, which does not exist yet."""
    folder = tmp_path / "data"
    monkeypatch.setenv("BARU_DATA_DIR", str(folder))
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder to add from."""
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


def written(folder: Path, **texts: str | bytes) -> Path:
    """Write files (`a_txt` is `a.txt`) and return the folder."""
    for name, text in texts.items():
        path = folder / name.replace("_", ".")
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


# -- where


def test_texts_are_in_the_folder_that_the_environment_names(source: Path, data: Path) -> None:
    Corpus("reports").add(written(source, a_txt="one"))
    assert data_folder() == data
    (path,) = data.rglob("*.txt")
    assert path.parent == data / "corpora" / "reports"


@pytest.mark.parametrize("value", ["", None])
def test_without_it_the_users_data_folder_serves(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is None:
        monkeypatch.delenv("BARU_DATA_DIR")
    else:
        monkeypatch.setenv("BARU_DATA_DIR", value)
    assert data_folder().is_absolute()
    assert "baru" in data_folder().parts


def test_asking_makes_no_folder(data: Path) -> None:
    corpus = Corpus()
    assert (corpus.name, corpus.version, corpus.num_bytes, list(corpus.texts())) == (DEFAULT_CORPUS, (), 0, [])
    assert corpora() == []
    assert not data.exists()


def test_nobody_else_may_read_it(source: Path) -> None:
    """Folder 0700, texts without a bit for anyone else."""
    corpus = Corpus()
    corpus.add(written(source, a_txt="one"))
    assert stat.S_IMODE(corpus.folder.stat().st_mode) == 0o700
    (path,) = corpus.folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


@pytest.mark.parametrize("name", ["", ".", "..", "../other", "a/b", "A", "-a", "_a", "a b", "a\n", "ü", "a" * 65])
def test_a_name_that_may_lead_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Corpus(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("name", ["a", "0", "reports-2024_b", "a" * 64])
def test_a_plain_name_is_taken(name: str) -> None:
    assert Corpus(name).folder.name == name


# -- what is added


def test_every_text_below_a_folder_is_added(source: Path) -> None:
    (source / "deep" / "deeper").mkdir(parents=True)
    written(source, a_txt="one", b_MD="two")
    written(source / "deep" / "deeper", c_log="three, ünïcode 取暖")
    corpus = Corpus()
    assert corpus.add(source) == Added(num_texts=3, num_known=0, skipped=())
    assert sorted(corpus.texts()) == ["one", "three, ünïcode 取暖", "two"]
    assert corpus.num_bytes == len("onetwothree, ünïcode 取暖".encode())


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_single_file_is_added(suffix: str, source: Path) -> None:
    path = source / f"a{suffix}"
    path.write_text("one")
    assert Corpus().add(path) == Added(1, 0, ())


def test_the_copy_stays_when_the_source_goes(source: Path) -> None:
    corpus = Corpus()
    corpus.add(written(source, a_txt="one"))
    (source / "a.txt").unlink()
    assert list(corpus.texts()) == ["one"]


def test_the_same_text_is_kept_once(source: Path) -> None:
    """In two files, and added again."""
    corpus = Corpus()
    assert corpus.add(written(source, a_txt="one", b_txt="one")) == Added(1, 1, ())
    version = corpus.version
    assert corpus.add(source) == Added(0, 2, ())
    assert corpus.version == version
    assert list(corpus.texts()) == ["one"]


def test_what_is_no_text_is_left_out_by_name_and_reason(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TEXT_BYTES", 100)
    written(source, a_txt="one", b_png="two", c_txt=b"\xff\xfe\x00", d_txt=" \n\t", e_txt="x" * 101, f_txt="x" * 100)
    corpus = Corpus()
    added = corpus.add(source)
    assert (added.num_texts, added.num_known) == (2, 0)
    assert sorted(corpus.texts()) == ["one", "x" * 100]
    reasons = {path.name: why for path, why in added.skipped}
    assert sorted(reasons) == ["b.png", "c.txt", "d.txt", "e.txt"]
    assert reasons["b.png"] == "not a kind of text file"
    assert "utf-8" in reasons["c.txt"]
    assert reasons["d.txt"] == "empty"
    assert reasons["e.txt"].startswith("larger than")


def test_where_nothing_is_there_is_an_error(source: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing at .*missing"):
        Corpus().add(source / "missing")


@pytest.mark.parametrize("texts", [{}, {"a_png": "one"}, {"a_txt": ""}])
def test_where_no_text_is_there_is_an_error_that_says_what_is_one(texts: dict[str, str], source: Path) -> None:
    with pytest.raises(ConfigError, match="no text at") as caught:
        Corpus().add(written(source, **texts))
    assert ".txt" in str(caught.value.hint)


def test_a_corpus_has_a_limit(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte, with what is there already; what came before the file that is too much stays."""
    monkeypatch.setattr(module, "MAX_CORPUS_BYTES", 10)
    corpus = Corpus()
    corpus.add(written(source, a_txt="12345"))
    written(source, b_txt="67890", c_txt="x")
    with pytest.raises(ConfigError, match=r"c\.txt"):
        corpus.add(source)
    assert corpus.num_bytes == 10
    assert sorted(corpus.texts()) == ["12345", "67890"]
    assert corpus.add(source / "b.txt") == Added(0, 1, ())  # known: takes no room


def test_the_limit_is_counted_in_bytes(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CORPUS_BYTES", 5)
    with pytest.raises(ConfigError):
        Corpus().add(written(source, a_txt="üüü"))


def test_two_corpora_are_two(source: Path) -> None:
    Corpus("a").add(written(source, a_txt="one"))
    Corpus("b").add(written(source, b_txt="two"))
    assert list(Corpus("a").texts()) == ["one"]
    assert [corpus.name for corpus in corpora()] == ["a", "b"]


# -- what changes


def test_the_version_changes_when_texts_come_or_go(source: Path) -> None:
    """And is the same again when the same texts are there."""
    corpus = Corpus()
    corpus.add(written(source, a_txt="one"))
    first = corpus.version
    corpus.add(written(source, b_txt="two"))
    second = corpus.version
    corpus.remove()
    gone = corpus.version
    corpus.add(source / "a.txt")
    assert len({first, second, gone}) == 3
    assert corpus.version == first


def test_a_text_half_written_is_none(source: Path) -> None:
    """What a crash leaves beside the texts is no text."""
    corpus = Corpus()
    corpus.add(written(source, a_txt="one"))
    version, (path,) = corpus.version, corpus.folder.iterdir()
    path.with_name(f".{path.name}-abc").write_text("half")
    assert corpus.version == version
    assert list(corpus.texts()) == ["one"]


def test_a_corpus_is_removed_with_its_copies(source: Path) -> None:
    corpus = Corpus("a")
    corpus.add(written(source, a_txt="one"))
    Corpus("b").add(source)
    corpus.remove()
    assert not corpus.folder.exists()
    assert [other.name for other in corpora()] == ["b"]
    assert (source / "a.txt").exists()


def test_what_is_not_there_cannot_be_removed() -> None:
    with pytest.raises(ConfigError, match="no corpus gone"):
        Corpus("gone").remove()


def test_what_holds_no_text_leaves_no_corpus_behind(tmp_path: Path) -> None:
    """Nothing was added, so there is nothing to list."""
    (tmp_path / "photo.jpg").write_bytes(b"no text")
    with pytest.raises(ConfigError, match="no text"):
        Corpus("new").add(tmp_path)
    assert "new" not in [corpus.name for corpus in corpora()]


def test_a_drafter_without_a_name_for_its_corpus_is_refused() -> None:
    """`suffix` drafts from the session alone; `suffix:` is a slip."""
    with pytest.raises(ConfigError, match="no drafter"):
        load_drafter("suffix:")
