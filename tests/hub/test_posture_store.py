"""A posture document on disk: applied whole or not at all, kept, logged, and taken back."""

from __future__ import annotations

from pathlib import Path

import pytest

from baru_common.errors import ConfigError, NotFound
from baru_hub.posture_store import PostureStore, shipped
from support.documents import document

_V2, _V3 = document(2), document(3, micro="{ on = false }")


@pytest.fixture
def store(tmp_path: Path) -> PostureStore:
    return PostureStore(tmp_path / "state")


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def test_before_anything_is_applied_the_shipped_document_holds(store: PostureStore) -> None:
    assert store.current() is shipped()
    assert store.history() == []
    with pytest.raises(NotFound, match="nothing was applied"):
        store.rollback()


def test_changes_are_kept_and_logged_and_can_be_taken_back(store: PostureStore) -> None:
    """Back to any version, the shipped one among them; the last change can be undone, and that, too."""
    store.apply(_V2)
    store.apply(_V3)
    assert store.current().version == 3
    assert store.rollback().version == store.current().version == 2
    assert store.was_rolled_back_to(store.current())
    assert store.rollback(1).digest == shipped().digest
    assert store.rollback().version == 2
    log = [(entry.action, entry.before, entry.version) for entry in store.history()]
    assert log == [("apply", 1, 2), ("apply", 2, 3), ("rollback", 3, 2), ("rollback", 2, 1), ("rollback", 1, 2)]
    assert all(entry.at and entry.by for entry in store.history())
    with pytest.raises(NotFound, match="9 was not kept"):
        store.rollback(9)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("version = [", "no TOML"),
        (_V3.replace("upward", "upwards"), "upwards"),
        (document(2, micro="{ on = false }"), "version 2 has been there"),
        (document(1), "version 2 has been there"),
    ],
)
def test_a_bad_document_changes_nothing(store: PostureStore, text: str, words: str) -> None:
    """Not a byte: neither one that is not valid, nor one that would be another document of a version that was there."""
    store.apply(_V2)
    before = everything(store.folder)
    with pytest.raises(ConfigError, match=words):
        store.apply(text)
    assert everything(store.folder) == before


def test_a_version_that_was_taken_back_is_not_used_again(store: PostureStore) -> None:
    """Hubs that were away would take one for the other."""
    store.apply(_V2)
    store.rollback()
    with pytest.raises(ConfigError, match="version 2 has been there") as refused:
        store.apply(document(2, micro="{ on = false }"))
    assert "version 3" in refused.value.hint


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file"):
        PostureStore(tmp_path / "file").apply(_V2)
