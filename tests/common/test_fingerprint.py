from __future__ import annotations

import copy
import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baru_common import fingerprint as module
from baru_common.fingerprint import file_digest, files_digest, fingerprint
from baru_common.model_files import load
from support.tiny import byte_tokenizer, save, tiny_target


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# -- of a model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tiny_target(), tmp_path / "model")


def of(folder: Path, dtype: str = "float32") -> bytes:
    return load(str(folder), dtype=dtype).fingerprint


def test_it_is_the_same_at_each_load_and_for_each_copy(folder: Path, tmp_path: Path) -> None:
    """Where the files lie, and when they were written, does not matter."""
    assert len(of(folder)) == 32
    assert of(folder) == of(folder)
    assert of(save(tiny_target(), tmp_path / "copy")) == of(folder)


def test_it_changes_with_one_weight(folder: Path, tmp_path: Path) -> None:
    model: Any = copy.deepcopy(tiny_target().model)
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] += 1e-3
    assert of(save(replace(tiny_target(), model=model), tmp_path / "other")) != of(folder)


def test_it_changes_with_the_numeric_type(folder: Path) -> None:
    """The same files in another type decide other ids."""
    assert len({of(folder, dtype) for dtype in ("float32", "bfloat16", "float16")}) == 3


def test_it_changes_with_the_vocabulary(folder: Path) -> None:
    """The same weights under other meanings are another target."""
    before = of(folder)
    (folder / "tokenizer.json").write_text(byte_tokenizer(num_ids=299).to_str())
    assert of(folder) != before


def test_it_changes_with_the_configuration(folder: Path) -> None:
    before = of(folder)
    config = json.loads((folder / "config.json").read_text())
    config["rms_norm_eps"] = 1e-3
    (folder / "config.json").write_text(json.dumps(config))
    assert of(folder) != before


# -- of facts and files


def test_facts_are_told_apart_and_their_order_is_not() -> None:
    assert len(fingerprint({"a": "1"})) == 32
    assert fingerprint({"a": "1", "b": "2"}) == fingerprint({"b": "2", "a": "1"})
    assert len({fingerprint(f) for f in ({"a": "1"}, {"a": "2"}, {"b": "1"}, {"a": "1", "b": ""}, {})}) == 5


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1])
def test_a_files_digest_is_its_sha_256(size: int, tmp_path: Path) -> None:
    """Whatever the size of the pieces it is read in; the second time from the note."""
    data = bytes(i % 251 for i in range(size))
    (tmp_path / "file").write_bytes(data)
    assert [file_digest(tmp_path / "file") for _ in range(2)] == [sha256(data)] * 2


def test_several_files_are_told_apart_by_name_and_content(tmp_path: Path) -> None:
    """Their order does not matter, and neither does the folder."""
    for name, data in {"a/x": "1", "a/y": "2", "b/x": "1", "b/y": "2", "c/x": "2", "c/y": "1", "d/z": "1"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(data)
    x, y = tmp_path / "a" / "x", tmp_path / "a" / "y"
    assert files_digest([x, y]) == files_digest([y, x]) == files_digest([tmp_path / "b" / "x", tmp_path / "b" / "y"])
    assert files_digest([x, y]) != files_digest([tmp_path / "c" / "x", tmp_path / "c" / "y"])
    assert files_digest([x]) != files_digest([tmp_path / "d" / "z"])


def test_a_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are large: as long as size and time of change stay, the digest is remembered."""
    path = tmp_path / "file"
    path.write_bytes(b"content")
    file_digest(path)
    monkeypatch.setattr(module, "_hash", lambda _: pytest.fail("read again"))
    assert file_digest(path) == sha256(b"content")


@pytest.mark.parametrize("changed", [b"CONTENT", b"longer content"])
def test_a_file_that_changed_is_read_again(changed: bytes, tmp_path: Path) -> None:
    """Told by its time of change, or by its size when that stayed."""
    path = tmp_path / "file"
    path.write_bytes(b"content")
    os.utime(path, ns=(0, 1_000))
    file_digest(path)
    path.write_bytes(changed)
    os.utime(path, ns=(0, 1_000 if len(changed) != 7 else 1_001))
    assert file_digest(path) == sha256(changed)


def test_two_files_of_one_size_and_time_are_told_apart(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, ns=(0, 1_000))
    assert file_digest(tmp_path / "one") == sha256(b"one")
    assert file_digest(tmp_path / "two") == sha256(b"two")


def test_without_a_cache_it_is_read_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system where nothing can be written still gets its digests."""
    (tmp_path / "blocked").write_text("a file where the cache folder should be")
    monkeypatch.setenv("BARU_CACHE_DIR", str(tmp_path / "blocked"))
    (tmp_path / "file").write_bytes(b"content")
    assert [file_digest(tmp_path / "file") for _ in range(2)] == [sha256(b"content")] * 2
