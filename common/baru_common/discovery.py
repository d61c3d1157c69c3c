"""Hubs that can be found by name on the local network (mDNS, DNS-SD; RFC 6762, 6763). Needs `zeroconf`.

What is announced proves nothing: a hub says who it is, and only those on the node's list are considered. That it is
so is proven when connecting.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

from .errors import ConfigError, HubUnavailable
from .waiting import within

SERVICE = "_baru-hub._tcp.local."
PREFIX = "mdns:"
"""Begins the name of a hub that is to be found: `mdns:IDENTITY`."""
_FIND_S = 3.0
_ASK_MS = 1000


@asynccontextmanager
async def announced(host: str, port: int, identity: str) -> AsyncIterator[None]:
    """Announce a hub while the block runs, where it listens. ConfigError without the library."""
    library = _library()
    info = library.asyncio.AsyncServiceInfo(
        SERVICE,
        f"{_label(identity)}.{SERVICE}",
        addresses=[ipaddress.ip_address(host).packed],
        port=port,
        properties={"identity": identity},
    )
    everywhere = ipaddress.ip_address(host).is_unspecified
    zeroconf = library.asyncio.AsyncZeroconf(interfaces=_interfaces(library) if everywhere else [host])
    try:
        await zeroconf.async_register_service(info)
        yield
    finally:
        await zeroconf.async_unregister_all_services()
        await zeroconf.async_close()


async def find(identities: Collection[str], timeout_s: float = _FIND_S) -> list[str]:
    """Return addresses of hubs that say they are one of `identities`, in the order of these; HubUnavailable when none
    is heard in time. Others are passed over."""
    found = await _found(identities, timeout_s)
    return [found[identity] for identity in identities if identity in found]


async def _found(identities: Collection[str], timeout_s: float) -> dict[str, str]:
    """Return addresses by identity; HubUnavailable when there is none."""
    search = _Search(frozenset(identities), _library())
    with suppress(asyncio.TimeoutError):
        await within(search.run(), timeout_s)
    if not search.found:
        raise HubUnavailable(
            f"no hub of {', '.join(identities)} was heard of in {timeout_s:.0f} s",
            hint="check that it runs with --announce, or give its address",
        )
    return search.found


class _Search:
    """Listens, and asks each hub that it hears of who it is."""

    def __init__(self, wanted: frozenset[str], library: Any) -> None:
        self.found: dict[str, str] = {}
        self._wanted = wanted
        self._library = library
        self._names: asyncio.Queue[str] = asyncio.Queue()

    async def run(self) -> None:
        """Listen until all are found."""
        zeroconf = self._library.asyncio.AsyncZeroconf(interfaces=_interfaces(self._library))
        browser = self._library.asyncio.AsyncServiceBrowser(zeroconf.zeroconf, SERVICE, handlers=[self._heard])
        try:
            while self._wanted - self.found.keys():
                info = self._library.asyncio.AsyncServiceInfo(SERVICE, await self._names.get())
                if await info.async_request(zeroconf.zeroconf, _ASK_MS):
                    self._note(info)
        finally:
            await browser.async_cancel()
            await zeroconf.async_close()

    def _heard(self, **change: Any) -> None:
        if change["state_change"] is self._library.ServiceStateChange.Added:
            self._names.put_nowait(change["name"])

    def _note(self, info: Any) -> None:
        identity = (info.properties.get(b"identity") or b"").decode(errors="replace")
        if identity in self._wanted and (hosts := info.parsed_addresses()):
            host = f"[{hosts[0]}]" if ":" in hosts[0] else hosts[0]
            self.found[identity] = f"{host}:{info.port}"


class Place(NamedTuple):
    """Where a hub is, and who it has to be, if that is known."""

    address: str
    identity: str = ""


async def resolved(hubs: Sequence[str]) -> list[Place]:
    """Return where hubs are: of names that begin with `mdns:` those that are found, others as they are."""
    wanted = [name.removeprefix(PREFIX) for name in hubs if name.startswith(PREFIX)]
    if not wanted:
        return [Place(address) for address in hubs]
    others = [Place(name) for name in hubs if not name.startswith(PREFIX)]
    try:
        found = await _found(wanted, _FIND_S)
        return [*(Place(found[identity], identity) for identity in wanted if identity in found), *others]
    except HubUnavailable:
        if not others:
            raise
        return others


def _label(identity: str) -> str:
    """One DNS label of at most 63 characters."""
    return "".join(c if c.isalnum() else "-" for c in identity)[-63:].strip("-") or "hub"


def _interfaces(library: Any) -> Any:
    return library.InterfaceChoice.All


def _library() -> Any:
    try:
        import zeroconf
        import zeroconf.asyncio
    except ImportError as error:
        raise ConfigError("finding hubs by name needs zeroconf", hint="pip install 'baru-drafting[mdns]'") from error
    return zeroconf
