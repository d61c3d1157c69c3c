"""A settings file is read strictly: what it says counts, and what it says wrongly is named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from baru_common.config_file import ConfigFile
from baru_common.errors import ConfigError


@dataclass(frozen=True)
class Settings:
    """One of each kind."""

    address: str = "here"
    count: int = 3
    wait_s: float = 1.0
    folder: Path | None = None
    names: tuple[str, ...] = ()


def settings(tmp_path: Path, text: str, **given: object) -> Settings:
    path = tmp_path / "kit.toml"
    path.write_text(text)
    return ConfigFile.read(path).settings("hub", Settings, given)


def test_the_command_line_goes_before_the_file_and_the_file_before_the_defaults(tmp_path: Path) -> None:
    """Options of other tables are left alone."""
    text = '[hub]\ncount = 5\nwait_s = 2\nfolder = "/a"\nnames = ["x", "y"]\n[target]\nmodel = "m"\n'
    assert settings(tmp_path, text, count=7, model="z") == Settings("here", 7, 2.0, Path("/a"), ("x", "y"))


def test_without_a_file_only_what_is_given_counts() -> None:
    """No file is no error; a table that a file leaves out neither."""
    assert ConfigFile.read(None).settings("hub", Settings, {"count": 4}) == Settings(count=4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[hub]\ncuont = 1", ("hub.cuont is no setting", "did you mean count?")),
        ("[hub]\nqqq = 1", ("hub.qqq is no setting", "there are address, count")),
        ('[hub]\ncount = "5"', ("hub.count is wrong", "integer")),
        ("[hub]\ncount = 1.5", ("hub.count is wrong",)),
        ("[hub]\ncount = true", ("hub.count is wrong",)),
        ("[hub]\naddress = 2026-11-30\ncount = 2026-11-30", ("hub.count is wrong",)),
        ("[hub]\nnames = [1]", ("hub.names.0 is wrong",)),
        ("[hubs]\ncount = 1", ("hubs is no table of settings", "did you mean hub?")),
        ("count = 1", ("count is no table of settings",)),
        ("hub = 1", ("hub is no table of settings",)),
        ("[hub", ("is not TOML",)),
        ("\udcff", ("is not TOML",)),
        ("#" * (1 << 20) + "\n", ("is larger than",)),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    """The file, the key, and what was meant."""
    path = tmp_path / "kit.toml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as refused:
        ConfigFile.read(path).settings("hub", Settings, {})
    assert str(path) in refused.value.message
    assert all(word in str(refused.value) for word in words)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """With the reason."""
    with pytest.raises(ConfigError, match=r"kit.toml cannot be read: No such file"):
        ConfigFile.read(tmp_path / "kit.toml")
