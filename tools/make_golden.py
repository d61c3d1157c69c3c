"""Writes what transformers' own greedy `generate` says to every prompt: the reference of the lossless suite.

Usage: python tools/make_golden.py [OUTPUT]    (about 8 minutes on one core; shows progress; Ctrl-C loses nothing
but the prompt under way, because the file is written after each)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.progress import track

from baru_common.model_files import DEFAULT_TARGET, load
from baru_common.tokens import Tokenizer

ROOT = Path(__file__).parent.parent
PROMPTS = ROOT / "tests" / "data" / "prompts.jsonl"
OUTPUT = ROOT / "tests" / "data" / "greedy_smollm2_fp32.json"
NUM_TOKENS = 128


def main(output: Path) -> None:
    """Generate what is missing in `output`."""
    torch.set_num_threads(1)
    loaded = load(DEFAULT_TARGET, dtype="float32")
    tokenizer = Tokenizer(loaded.bundle)
    golden: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {"answers": {}}
    golden |= {
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}, CPU, float32, one thread",
        "fingerprint": loaded.fingerprint.hex(),
        "num_tokens": NUM_TOKENS,
    }
    for prompt in track([json.loads(line) for line in PROMPTS.read_text().splitlines()], description="prompts"):
        ids = tokenizer.encode_chat(prompt["messages"])
        if golden["answers"].get(prompt["id"], {}).get("prompt_ids") == ids:
            continue
        golden["answers"][prompt["id"]] = {"prompt_ids": ids, "ids": greedy(loaded.model, ids, NUM_TOKENS)}
        output.write_text(dumps(golden))


def greedy(model: Any, prompt_ids: list[int], num_tokens: int) -> list[int]:
    """Transformers' own answer, end-of-sequence id included."""
    ids = torch.tensor([prompt_ids])
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)
    return [int(i) for i in whole[0, len(prompt_ids) :]]


def dumps(golden: dict[str, Any]) -> str:
    """JSON with one prompt a line."""
    answers = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in golden["answers"].items())
    head = json.dumps({k: v for k, v in golden.items() if k != "answers"})
    return f'{head[:-1]}, "answers": {{\n{answers}\n}}}}\n'


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT)
