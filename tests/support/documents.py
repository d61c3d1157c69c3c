"""Small posture documents."""

from __future__ import annotations

MINIMAL = """
schema_version = 1
version = {version}
{extra}
[tiers.micro]
device = "board"
role = "node"

[default]
local = {{ on = true }}
upward = {{ on = true }}
because = "nothing speaks against it"
{more}
"""


def document(version: int = 1, micro: str = "", canary: str = "") -> str:
    """A document in which `micro`, an inline table, says what that tier may draft upward."""
    rule = f"""
[[rules]]
name = "nano"
tiers = ["micro"]
local = {{ on = false }}
upward = {micro}
because = "too small"
"""
    return MINIMAL.format(version=version, extra="", more=(rule if micro else "") + canary)


FLOORS = """
[canary]
depth = 2
window = 16

[[canary.floors]]
family = "*"
expected = 0.63
fraction = 0.5
source = "its card"
"""
