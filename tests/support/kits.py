"""A kit's authority and the folders of its machines, made in a moment."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from baru_common.identity import Role
from baru_hub.ca import LIFETIME, Authority


@dataclass(frozen=True)
class Kit:
    """`kit(tmp_path)` makes one."""

    folder: Path
    authority: Authority

    def issue(
        self,
        name: str,
        role: Role = Role.NODE,
        *,
        lifetime: timedelta = LIFETIME,
        replace: bool = False,
        now: datetime | None = None,
    ) -> Path:
        """Make, or replace, the folder of a machine; `now`: when it was made."""
        out = self.folder / name
        self.authority.issue(name, role, out, lifetime=lifetime, replace=replace, now=now)
        return out

    @property
    def hub(self) -> Path:
        """The folder of the hub `one`, made once."""
        return self.folder / "one" if (self.folder / "one").exists() else self.issue("one", Role.HUB)

    def revoke(self, name: str) -> None:
        """Revoke a name's certificates, and have the hub know."""
        self.authority.revoke(name)
        self.authority.publish(self.hub)


def kit(folder: Path, name: str = "kit") -> Kit:
    """Make a kit below this folder."""
    return Kit(folder / name, Authority.create(folder / name / "ca", name))
