"""Sampling parameters from command-line options."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from baru_common.errors import ConfigError
from baru_common.sampling import Grammar, SamplingParams

_OWN_OPTIONS = ("grammar",)


def grammar_of(
    *, json_schema: str | None, regex: str | None, lark: str | None, choices: Sequence[str] | None
) -> Grammar | None:
    """Return the one grammar that is asked for, if any; ConfigError for more than one."""
    given = {"--json-schema": json_schema, "--regex": regex, "--lark": lark, "--choice": choices}
    names = [name for name, value in given.items() if value]
    if len(names) > 1:
        raise ConfigError(f"{' and '.join(names)} contradict each other", hint="leave all but one of them out")
    if json_schema:
        return Grammar.json_schema(_content(json_schema))
    if lark:
        return Grammar.lark(_content(lark))
    if regex:
        return Grammar.regex(regex)
    return Grammar.choices(choices) if choices else None


def with_settings(params: SamplingParams, settings: Sequence[str]) -> SamplingParams:
    """Return `params` with each NAME=JSON of `settings`; ConfigError for a name that there is not."""
    names = [field.name for field in fields(SamplingParams) if field.name not in _OWN_OPTIONS]
    values: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if name not in names or not equals:
            raise ConfigError(f"--set {setting} names no parameter", hint=f"NAME=JSON with one of {', '.join(names)}")
        values[name] = _parsed(name, text)
    return replace(params, **values)


def _parsed(name: str, text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text  # a bare word, such as a mode
    # JSON has no numbers for keys.
    if name == "logit_bias" and isinstance(value, dict):
        return {int(key) if key.isdecimal() else key: bias for key, bias in value.items()}
    return value


def _content(given: str) -> str:
    """The text of a file of this name, or the argument itself when it is plainly not one."""
    if given.lstrip().startswith("{") or "\n" in given or ":" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{given} cannot be read: {error}") from error
