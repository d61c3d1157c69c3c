"""Tokenizers are fetched once, and never believed without their digest."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from baru_common.errors import NotFound
from baru_common.tokens import TokenizerBundle
from baru_micro.tokenizer_cache import cached_bundle
from support.tiny import tiny_bundle

_BUNDLE = tiny_bundle()
_OTHER = tiny_bundle(num_ids=290)


@dataclass
class Fetch:
    """Answers as a hub would, and counts."""

    digests: list[bytes] = field(default_factory=list)

    async def __call__(self, digest: bytes) -> TokenizerBundle:
        self.digests.append(digest)
        for bundle in (_BUNDLE, _OTHER):
            if bundle.digest == digest:
                return bundle
        raise NotFound("the hub has no such tokenizer")


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def test_a_tokenizer_is_fetched_once(cache_folder: Path) -> None:
    """The second time it comes from the cache, the same to the byte."""
    fetch = Fetch()
    first = await cached_bundle(_BUNDLE.digest, fetch)
    second = await cached_bundle(_BUNDLE.digest, fetch)
    assert fetch.digests == [_BUNDLE.digest]
    assert first.data == second.data == _BUNDLE.data
    assert [path.read_bytes() for path in files_in(cache_folder)] == [_BUNDLE.data]


async def test_tokenizers_are_kept_apart_by_digest() -> None:
    """Two hubs with different targets do not disturb each other."""
    fetch = Fetch()
    for bundle in (_BUNDLE, _OTHER, _BUNDLE, _OTHER):
        assert (await cached_bundle(bundle.digest, fetch)).digest == bundle.digest
    assert fetch.digests == [_BUNDLE.digest, _OTHER.digest]


@pytest.mark.parametrize("damage", [b"", b"{}", _BUNDLE.data[:-1], _BUNDLE.data + b" ", _OTHER.data])
async def test_a_damaged_file_is_fetched_again(cache_folder: Path, damage: bytes) -> None:
    """Cut, changed, or another's: it is replaced, and right from then on."""
    fetch = Fetch()
    await cached_bundle(_BUNDLE.digest, fetch)
    (file,) = files_in(cache_folder)
    file.write_bytes(damage)
    assert (await cached_bundle(_BUNDLE.digest, fetch)).data == _BUNDLE.data
    assert len(fetch.digests) == 2
    assert file.read_bytes() == _BUNDLE.data


async def test_a_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once, and each connection fetches."""
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("BARU_CACHE_DIR", str(tmp_path / "file"))
    fetch = Fetch()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert (await cached_bundle(_BUNDLE.digest, fetch)).digest == _BUNDLE.digest
    assert len(fetch.digests) == 2
    assert "cannot be kept" in caplog.text


async def test_a_failed_fetch_leaves_nothing_behind(cache_folder: Path) -> None:
    """The error is the fetch's own."""
    with pytest.raises(NotFound):
        await cached_bundle(b"x" * 32, Fetch())
    assert files_in(cache_folder) == []
