"""Transformers' own generation as a process: reads requests from stdin, answers on stdout, a JSON line each.

Usage: python -m bench.reference TARGET [ASSISTANT]
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from baru_common.model_files import load


def main() -> None:
    """Load, say so, and answer until the input ends."""
    torch.set_num_threads(1)
    model: Any = load(sys.argv[1]).model
    assistant: Any = load(sys.argv[2]).model if len(sys.argv) > 2 and sys.argv[2] else None
    modes: dict[str, dict[str, Any]] = {
        "greedy": {},
        "lookup": {"prompt_lookup_num_tokens": 8},
        "assisted": {"assistant_model": assistant},
    }
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        ids = torch.tensor([request["ids"]])
        start_s = time.perf_counter()
        with torch.inference_mode():
            whole = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=request["num_tokens"],
                do_sample=False,
                **modes[request["mode"]],
            )
        elapsed_s = time.perf_counter() - start_s
        print(json.dumps({"ids": whole[0, ids.shape[1] :].tolist(), "elapsed_s": elapsed_s}), flush=True)


if __name__ == "__main__":
    main()
