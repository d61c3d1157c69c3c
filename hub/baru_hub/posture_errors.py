"""What is wrong with a posture document, said so that somebody finds the place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from baru_common.errors import ConfigError

_HINTS = {
    "extra_forbidden": "is not a key of this section: remove it, or check its spelling",
    "missing": "is missing: add it",
}
_MOST = 20


def described(error: ValidationError, text: str) -> ConfigError:
    """Return the error that names each key, its line where that is found, and what to do."""
    found = error.errors(include_url=False, include_context=False)
    lines = [_line(one, text) for one in found[:_MOST]]
    more = f"; and {len(found) - _MOST} more" if len(found) > _MOST else ""
    keys = ", ".join(dict.fromkeys(_key(one["loc"]) for one in found[:_MOST] if one["loc"]))
    return ConfigError(
        "the posture document is not valid: " + "; ".join(lines) + more,
        hint="correct it; nothing was changed",
        details={"param": keys} if keys else {},
    )


def _line(one: Any, text: str) -> str:
    loc, message = one["loc"], one["msg"].removeprefix("Value error, ")
    said = _HINTS.get(one["type"]) or f"{message[:1].lower()}{message[1:]}"
    if not loc:
        loc = _loc_in(message)
        if not loc:
            return said
        return f"{_place(loc, text)}{message}"
    value = one.get("input")
    shown = f" (it is {value!r:.60})" if isinstance(value, (str, int, float)) else ""
    return f"{_place(loc, text)}{_key(loc)} {said}{'' if one['type'] in _HINTS else shown}"


def _loc_in(message: str) -> tuple[str | int, ...]:
    """The key that a check over several sections starts its message with."""
    match = re.match(r"rules\.(\d+)\.(\w+)", message)
    return ("rules", int(match[1]), match[2]) if match else ()


def _place(loc: Sequence[str | int], text: str) -> str:
    number = line_of(text, loc)
    return f"line {number}: " if number else ""


def _key(loc: Sequence[str | int]) -> str:
    return ".".join(map(str, loc))


def line_of(text: str, loc: Sequence[str | int]) -> int | None:
    """Return the line of a key of a TOML text, or of the nearest section around it; None if neither is found."""
    lines, first, end, found = text.splitlines(), 0, len(text.splitlines()), None
    section = ""
    for index, key in enumerate(loc):
        if isinstance(key, int):
            continue
        section = f"{section}.{key}" if section else key
        count = next((k for k in loc[index + 1 : index + 2] if isinstance(k, int)), 0)
        headers = [i for i in range(first, end) if re.match(rf"\s*\[+\s*{re.escape(section)}\s*\]", lines[i])]
        if count < len(headers):
            first = headers[count]
            found = first
            within = rf"\s*\[+(?!\[)\s*(?!{re.escape(section)}\.)"
            end = next((i for i in range(first + 1, end) if re.match(within, lines[i])), end)
            continue
        if any(re.match(rf"\s*\[+\s*{re.escape(section)}\.", line) for line in lines[first:end]):
            continue  # a section that has no header of its own
        own = [i for i in range(first, end) if re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[.=]", lines[i])]
        inline = [i for i in range(first, end) if re.search(rf"[{{,]\s*{re.escape(key)}\s*=", lines[i])]
        if own or inline:
            found = (own or inline)[0]
            first, end = found, found + 1
    return None if found is None else found + 1
