"""What drafts at the hub, from the target's own state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from baru_common.errors import ConfigError
from baru_common.fingerprint import fingerprint
from baru_common.model_files import LoadedModel
from baru_hub.kv_cache import KvShape

from .base import DraftAsk, HubDrafter, States, TargetParts
from .checkpoint import extra_tensors, folder_digest
from .dflash import DFlash, DFlashDrafter
from .eagle3 import Eagle3
from .early_exit import EarlyExitDrafter
from .mtp import Mtp
from .recurrent import RecurrentDrafter

DRAFTERS = ("early_exit:LAYERS", "eagle3", "eagle3:PATH", "mtp", "dflash:PATH")
_DATA = Path(__file__).parents[1] / "data"
_SHIPPED = {"0c8d74595952ca17a329723a6dc7371c9f7f0508a74bc596101568efe0c2dafe": "smollm2-135m-eagle3"}
"""Heads that come with this package, by the digest of their targets' files."""

__all__ = ["DRAFTERS", "DraftAsk", "HubDrafter", "States", "TargetParts", "drafter_digest", "hub_drafter"]

Maker = Callable[[TargetParts], HubDrafter]


class Head(Protocol):
    """Weights of a drafter's own."""

    @property
    def kv_shape(self) -> KvShape:
        """Shape of its keys and values."""


def hub_drafter(spec: str, target: LoadedModel) -> tuple[Maker, Head | None]:
    """Return what makes the drafter that `spec` names, one of `DRAFTERS`, and its head, if it has one of its own.

    ConfigError for an unknown name, ModelFileError for a head that cannot be loaded or does not fit the target.
    """
    name, _, argument = spec.partition(":")
    if name == "early_exit" and argument.isdecimal():
        return (lambda parts: EarlyExitDrafter(parts, int(argument))), None
    if name == "mtp" and not argument:
        num_layers = target.model.config.get_text_config(decoder=True).num_hidden_layers
        mtp = Mtp.load(extra_tensors(target.files, num_layers), target)
        return (lambda parts: RecurrentDrafter(mtp, "mtp", mtp.taps, parts)), mtp
    if name == "dflash" and argument:
        dflash = DFlash.load(argument, target)
        return (lambda parts: DFlashDrafter(dflash, parts)), dflash
    if name == "eagle3":
        eagle = Eagle3.load(_eagle3_folder(spec, target), target)
        return (lambda parts: RecurrentDrafter(eagle, "eagle3", eagle.taps, parts)), eagle
    raise ConfigError(f"there is no hub drafter {spec!r}", hint=f"use one of: {', '.join(DRAFTERS)}")


def drafter_digest(spec: str, target: LoadedModel) -> bytes:
    """Return 32 bytes over what makes the drafter that `spec` names: its weights and configuration, or the target's
    and how it is cut from them. Where a head lies does not matter."""
    name, _, argument = spec.partition(":")
    is_folder = name in ("eagle3", "dflash")
    folder = _eagle3_folder(spec, target) if name == "eagle3" else argument
    weights = folder_digest(folder) if is_folder else target.fingerprint.hex()
    return fingerprint({"family": name, "argument": "" if is_folder else argument, "weights": weights})


def _eagle3_folder(spec: str, target: LoadedModel) -> str:
    """The folder of a head: the one that is named, or that comes with this package for the target."""
    name, colon, argument = spec.partition(":")
    if argument:
        return argument
    if colon or target.files.digest not in _SHIPPED:
        raise ConfigError(
            f"there is no hub drafter {spec!r}: no {name} head for {target.files.name} comes with this package",
            hint="name one's folder, eagle3:PATH; `baru-hub distill` trains one",
        )
    return str(_DATA / _SHIPPED[target.files.digest])
