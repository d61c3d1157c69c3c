"""The nodes of `bench.steps`, in a process of their own."""

from __future__ import annotations

import sys

import uvloop

from .steps import clients

if __name__ == "__main__":
    uvloop.run(clients(sys.argv[1]))
