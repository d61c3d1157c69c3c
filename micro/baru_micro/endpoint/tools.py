"""Tools that the model may call: what its template is told, what it must write, and what it wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from baru_common.errors import InvalidRequest
from baru_common.sampling import Grammar

_MARKED = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
MARK = "<tool_call>"
"""What a call begins with in the templates of Hermes, Qwen and their kin."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Function(_Strict):
    """What can be called."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Strict):
    """A tool."""

    type: Literal["function"]
    function: Function


class _Named(_Strict):
    name: str


class NamedTool(_Strict):
    """The one tool that must be called."""

    type: Literal["function"]
    function: _Named


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True)
class Call:
    """A call that the model wrote."""

    name: str
    arguments: str
    """JSON."""


def template_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> tuple[Mapping[str, Any], ...]:
    """Return what the chat template is told of."""
    if choice == "none":
        return ()
    return tuple(tool.model_dump(exclude_none=True) for tool in tools)


def call_grammar(tools: Sequence[Tool], choice: ToolChoice | None) -> Grammar | None:
    """Return what an answer looks like that must be a call, as JSON; None where it need not be one."""
    if choice in (None, "none", "auto"):
        return None
    allowed = [t for t in tools if not isinstance(choice, NamedTool) or t.function.name == choice.function.name]
    if not allowed:
        raise InvalidRequest("tool_choice names no tool of this request", details={"param": "tool_choice"})
    return Grammar.json_schema({"anyOf": [_call_schema(tool.function) for tool in allowed]})


def _call_schema(function: Function) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "arguments": function.parameters or {"type": "object"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def calls_in(text: str, *, only: bool) -> tuple[str, list[Call]]:
    """Return the text around calls, and the calls. `only`: all of it is one call. What is no call stays text."""
    if only:
        call = _call(text)
        return ("", [call]) if call else (text, [])
    calls = [call for found in _MARKED.findall(text) if (call := _call(found))]
    return (_MARKED.sub("", text).strip() if calls else text), calls


def _call(text: str) -> Call | None:
    try:
        made = json.loads(text)
        return Call(made["name"], json.dumps(made.get("arguments", {}), ensure_ascii=False))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
