"""Starts a hub on a free loopback port, runs one generation through a node, stops the hub."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BIN = Path(sys.executable).parent
# A prompt whose answer repeats it in part: there n-gram drafting does well.
PROMPT = (
    "Repeat this report word for word, then add one line of advice. "
    "REPORT: At 06:40 the river gauge at Mill Lane reads 3.2 m and rising. Mill Lane bridge is closed. "
    "Team Heron is at Mill Lane with two boats. Team Osprey is at the school with blankets and water. "
    "The school has power. The river gauge is read every 20 minutes."
)


def main() -> int:
    """Return the exit code of the generation."""
    with subprocess.Popen(
        [BIN / "baru-hub", "serve", "--listen", "127.0.0.1:0", "--json"], stdout=subprocess.PIPE, text=True
    ) as hub:
        try:
            address = wait_until_ready(hub)
            if address is None:
                return 1
            print(f"hub ready on {address}\n\n> {PROMPT}\n", flush=True)
            node = [str(BIN / "baru-micro"), "generate", PROMPT, "--hub", address, "--max-tokens", "160"]
            return subprocess.run(node, check=False).returncode
        finally:
            hub.terminate()


def wait_until_ready(hub: subprocess.Popen[str]) -> str | None:
    """Return the address the hub listens on; None when it ended instead (it has said why)."""
    assert hub.stdout is not None
    for line in hub.stdout:
        event = json.loads(line)
        if event["event"] == "ready":
            return str(event["address"])
        print(f"{event['event']} {event.get('target', '')} ...", flush=True)
    return None


if __name__ == "__main__":
    sys.exit(main())
