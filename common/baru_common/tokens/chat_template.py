"""Renders chat templates: a program that reads requests and writes answers, one JSON line each.

A template is a program that came with the target, and a node's target is somebody else's. So it runs in a sandbox, in
a process of its own, within limits that the system enforces: a loop without end or a text without bounds costs the
request, not the node. `rendering` is the other end. Nothing but jinja2 is imported here.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_S = 1.0
"""Processor time for one prompt; the process ends when it is over."""
MEMORY_BYTES = 512 << 20
"""Address space of the process."""
MAX_RENDERED = 8 << 20
"""Most characters of a prompt."""


class _Generation(Extension):
    """`{% generation %}`: marks the model's own words for training; here it is just what it holds."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


@lru_cache(8)
def _compiled(template: str) -> Any:
    # The environment that templates are written for: transformers' chat_template_utils documents it.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda fmt: datetime.now().astimezone().strftime(fmt)
    return environment.from_string(template)


def _answer(template: str, variables: dict[str, Any]) -> dict[str, str]:
    try:
        rendered = _compiled(template).render(**variables)
    except Exception as error:  # a template may fail in any way
        return {"error": str(error)[:1000] or type(error).__name__}
    if len(rendered) > MAX_RENDERED:
        return {"error": f"the prompt has {len(rendered)} characters, at most {MAX_RENDERED} are allowed"}
    return {"text": rendered}


def main() -> None:
    """Answer until nobody asks any more."""
    with contextlib.suppress(ValueError, OSError):  # a stricter limit stands
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    print("{}", flush=True)  # noqa: T201
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
        answer = json.dumps(_answer(**json.loads(line)))
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        print(answer, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
