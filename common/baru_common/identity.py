"""Who somebody is: a name and a role within one kit, spelled as a SPIFFE URI.

spiffe://<kit>/node/<name>      .../hub/<name>      .../observer/<name>      .../operator/<name>
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from .errors import ConfigError

_WORD = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""One label of a DNS name, so that a name can be one."""
_SCHEME = "spiffe://"


class Role(Enum):
    """What somebody is there for; `baru_hub.access` says what each may do."""

    NODE = "node"
    """Drafts, and has its sessions verified."""
    OBSERVER = "observer"
    """Looks, and changes nothing."""
    OPERATOR = "operator"
    """Looks after hubs."""
    HUB = "hub"
    """Verifies."""


@dataclass(frozen=True)
class Identity:
    """ConfigError when kit or name are not lower-case letters, digits and inner hyphens, at most 63 of them."""

    kit: str
    role: Role
    name: str

    def __post_init__(self) -> None:
        for what, word in (("kit", self.kit), ("name", self.name)):
            if not _WORD.fullmatch(word):
                raise ConfigError(
                    f"{word!r} is no {what}",
                    hint="use lower-case letters, digits and hyphens between them, at most 63",
                )

    def __str__(self) -> str:
        return f"{_SCHEME}{self.kit}/{self.role.value}/{self.name}"

    @classmethod
    def parse(cls, uri: str) -> Identity:
        """Read a SPIFFE URI of this form, exactly; ConfigError for any other."""
        kit, *rest = uri.removeprefix(_SCHEME).split("/")
        roles = {role.value: role for role in Role}
        if not uri.startswith(_SCHEME) or len(rest) != 2 or rest[0] not in roles:
            raise ConfigError(
                f"{uri!r} is no identity", hint=f"write spiffe://KIT/ROLE/NAME; ROLE is one of {', '.join(roles)}"
            )
        return cls(kit, roles[rest[0]], rest[1])
