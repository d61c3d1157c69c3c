"""Where things are kept, whoever runs us."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import platformdirs
import pytest

from baru_common import folders

_EACH = pytest.mark.parametrize(
    ("variable", "folder", "part"),
    [
        ("BARU_CACHE_DIR", folders.cache_folder, "cache"),
        ("BARU_CONFIG_DIR", folders.config_folder, "config"),
        ("BARU_DATA_DIR", folders.data_folder, "data"),
        ("BARU_STATE_DIR", folders.state_folder, "state"),
    ],
)
_Folder = Callable[[], Path]


@_EACH
def test_the_environment_the_home_or_the_system_says(
    variable: str, folder: _Folder, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this order; nothing is made."""
    monkeypatch.setenv(variable, str(tmp_path / "mine"))
    assert folder() == tmp_path / "mine"
    assert not (tmp_path / "mine").exists()
    monkeypatch.setenv(variable, "")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert folder().is_relative_to(tmp_path)
    assert "baru" in folder().parts

    def homeless(_: str) -> Path:
        raise RuntimeError

    monkeypatch.setattr(platformdirs, f"user_{part}_path", homeless)
    assert folder() == folders.SYSTEM / part
