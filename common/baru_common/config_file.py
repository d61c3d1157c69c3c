"""Settings from a TOML file. One file describes a kit: each program reads its own tables of it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import tomli

from .errors import ConfigError

TABLES = ("hub", "target", "posture", "node")
_MAX_BYTES = 1 << 20
_T = TypeVar("_T")


@dataclass(frozen=True)
class ConfigFile:
    """What a file says; nothing, when there is none."""

    path: Path | None = None
    tables: Mapping[str, Mapping[str, Any]] | None = None

    @classmethod
    def read(cls, path: Path | None, known: tuple[str, ...] = TABLES) -> ConfigFile:
        """Read a file; ConfigError when it is no TOML, or holds a table that is not `known`."""
        if path is None:
            return cls()
        try:
            with path.open("rb") as file:
                data = file.read(_MAX_BYTES + 1)
            if len(data) > _MAX_BYTES:
                raise ConfigError(f"{path} is larger than {_MAX_BYTES} bytes", hint="this is no settings file")
            tables = tomli.loads(data.decode())
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:  # not UTF-8, or not TOML
            raise ConfigError(f"{path} is not TOML: {error}") from error
        for name, table in tables.items():
            if name not in known or not isinstance(table, dict):
                raise ConfigError(f"{path}: {name} is no table of settings", hint=_meant(name, known))
        return cls(path, tables)

    def has(self, table: str) -> bool:
        """Whether the file says anything for a table."""
        return bool((self.tables or {}).get(table))

    def settings(self, table: str, kind: type[_T], given: Mapping[str, Any]) -> _T:
        """Return the settings of one table as the dataclass `kind`; what is `given` otherwise goes before the file.

        ConfigError names the key that is unknown, or whose value is of the wrong type.
        """
        names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
        values = self._checked(table, kind) | {name: value for name, value in given.items() if name in names}
        return kind(**values)

    def _checked(self, table: str, kind: type[Any]) -> dict[str, Any]:
        if table not in (self.tables or {}):
            return {}
        values = dict((self.tables or {})[table])
        import pydantic  # a node without a settings file does without it

        hints = get_type_hints(kind)
        keys: dict[str, Any] = {field.name: (hints[field.name], _default(field)) for field in fields(kind)}
        strict = pydantic.ConfigDict(extra="forbid", strict=True)
        model = pydantic.create_model(kind.__name__, __config__=strict, **keys)
        try:
            # JSON has no paths and tuples: from it, strict means strict in what there is.
            checked = model.model_validate_json(json.dumps(values, default=str))
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            raise self._refusal(table, first["loc"], first["type"], first["msg"], list(hints)) from None
        return {name: getattr(checked, name) for name in values}

    def _refusal(self, table: str, where: tuple[int | str, ...], kind: str, says: str, names: list[str]) -> ConfigError:
        key = ".".join(map(str, (table, *where)))
        if kind == "extra_forbidden":
            return ConfigError(f"{self.path}: {key} is no setting", hint=_meant(str(where[0]), names))
        if kind == "missing":
            return ConfigError(f"{self.path}: {key} is missing")
        return ConfigError(f"{self.path}: {key} is wrong: {says}")


def in_force(settings: Any) -> dict[str, Any]:
    """Return the settings of a dataclass as a file would say them; what is not set is left out."""
    return {name: _plain(value) for name, value in vars(settings).items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _default(field: Field[Any]) -> Any:
    """Only its being there counts: what the file leaves out is left to the dataclass."""
    return ... if field.default is MISSING and field.default_factory is MISSING else None


def _meant(name: str, names: tuple[str, ...] | list[str]) -> str:
    near = difflib.get_close_matches(name, names, 1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
