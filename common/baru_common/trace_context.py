"""Which request something belongs to, across node and hub: the W3C Trace Context.

https://www.w3.org/TR/trace-context/ (level 1; `tracestate` is neither read nor sent).
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

TRACEPARENT = "traceparent"
"""Key of the header in a call's metadata."""

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


@dataclass(frozen=True)
class TraceContext:
    """One request's trace, and the span in it that others are children of. Ids are lower-case hexadecimal."""

    trace_id: str
    span_id: str
    sampled: bool = True

    @classmethod
    def new(cls) -> TraceContext:
        """Begin a trace."""
        return cls(secrets.token_hex(16), secrets.token_hex(8))

    @classmethod
    def parse(cls, header: str) -> TraceContext | None:
        """Read a header; None when it is none, for a trace is no reason to refuse a request."""
        if not (match := _FORM.fullmatch(header)):
            return None
        version, trace_id, span_id, flags, more = match.groups()
        if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
            return None
        return cls(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))

    @property
    def header(self) -> str:
        """The header's value."""
        return f"00-{self.trace_id}-{self.span_id}-{self.sampled:02x}"
