"""Who may call what: a pure decision. What is not allowed here is denied, methods that do not exist included."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baru_common.errors import BaruError, ConfigError, PermissionDenied, Unauthenticated
from baru_common.identity import Identity, Role

EVERYBODY = "*"
_DRAFTING = "/baru.drafting.v1.DraftingService/"
_HEALTH = frozenset(f"/grpc.health.v1.Health/{name}" for name in ("Check", "List", "Watch"))
_LOOK = _HEALTH | {f"{_DRAFTING}Describe"}
_REFLECTION = frozenset(f"/grpc.reflection.{v}.ServerReflection/ServerReflectionInfo" for v in ("v1", "v1alpha"))

ALLOWED: dict[Role, frozenset[str]] = {
    Role.NODE: _LOOK | {f"{_DRAFTING}{name}" for name in ("FetchTokenizer", "Decode", "DecodeShaped")},
    Role.OBSERVER: _LOOK,
    Role.OPERATOR: _LOOK | _REFLECTION,
    Role.HUB: frozenset(),
}
"""Full method names, as gRPC has them."""


@dataclass(frozen=True)
class Policy:
    """Whom this hub lets in."""

    kit: str
    allow: frozenset[str] = frozenset({EVERYBODY})
    """Names, as `alpha` or `node/alpha`; `*` is everybody of the kit."""
    revoked: frozenset[int] = frozenset()
    """Serial numbers of certificates."""

    def refusal(self, identity: Identity, serial: int, left_s: float) -> BaruError | None:
        """Return why the holder of a certificate that is good for `left_s` more seconds is kept out; None if not."""
        if identity.kit != self.kit:
            return Unauthenticated(f"{identity} is not of the kit {self.kit}", hint="use a certificate of this kit")
        if serial in self.revoked:
            return Unauthenticated(f"the certificate of {identity} has been revoked", hint="ask the kit's operator")
        if left_s <= 0:
            return Unauthenticated(f"the certificate of {identity} has expired", hint="renew it")
        if not self.allow & {EVERYBODY, identity.name, f"{identity.role.value}/{identity.name}"}:
            return PermissionDenied(f"{identity} is not on this hub's list", hint="add it with --allow")
        return None


def check_method(identity: Identity, method: str) -> BaruError | None:
    """Return why this role may not call a method; None if it may."""
    if method in ALLOWED[identity.role]:
        return None
    return PermissionDenied(f"{_an(identity.role)} may not call {method}", hint="use a certificate of another role")


def allow_list(entries: Iterable[str]) -> frozenset[str]:
    """Return checked entries; empty ones and comments (#) are left out. ConfigError names one that is wrong."""
    found = frozenset(entry for line in entries if (entry := line.partition("#")[0].strip()))
    for entry in found - {EVERYBODY}:
        try:
            Identity.parse(f"spiffe://kit/{entry if '/' in entry else f'node/{entry}'}")
        except ConfigError:
            raise ConfigError(f"{entry!r} on the list names nobody", hint="write NAME, ROLE/NAME or *") from None
    return found


def _an(role: Role) -> str:
    return f"an {role.value}" if role.value[0] in "aeiou" else f"a {role.value}"
