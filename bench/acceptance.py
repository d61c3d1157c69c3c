"""What coupled and rejection sampling accept on the opt-in model pair, with the bounds of theory beside it.

Generations through the product's own session, chain, engine and drafter at depth 4, in each mode; then target and
drafter once more over each coupled output, for their distributions at its positions: what each rule accepts there in
expectation, over the same positions.

Usage: python -m bench.acceptance [--prompts N] [--tokens N]   (after `make bench-models`)
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import torch
from rich.progress import Progress

from baru_common.drafters.causal_lm import CausalLmDrafter
from baru_common.model_files import LoadedModel, load
from baru_common.sampling import SamplingContext, SamplingMode, SamplingParams, SparseProbs
from baru_common.sampling.noise import Stream, noise_key, race
from baru_common.sampling.sampler import Sampler
from baru_common.sampling.sparse import MAX_SUPPORT
from baru_common.tokens import Tokenizer
from baru_hub.engines.transformers import TransformersEngine

from .lockstep import DEPTH, write
from .real import prompts
from .store import OUT, Store, machine

STORE = Store(OUT / "acceptance.jsonl")
TARGET, DRAFTER = (f"models/qwen2.5-coder-{size}-instruct-q4_k_m.gguf" for size in ("1.5b", "0.5b"))
TEMPERATURES = (0.3, 0.7, 1.0)
MODES = ("coupled", "rejection", "rejection by block")
_NUM_SEEDS = 32


def params_of(temperature: float, mode: str, seed: int) -> SamplingParams:
    """The request of one cell."""
    rejection = mode != "coupled"
    return SamplingParams(
        temperature=temperature,
        seed=seed,
        sampling_mode=SamplingMode.REJECTION if rejection else SamplingMode.COUPLED,
        verify_blocks=mode == "rejection by block",
    )


@torch.inference_mode()
def logits_over(loaded: LoadedModel, ids: list[int], first: int) -> torch.Tensor:
    """Logits that decide ids[first:], in one pass: [num_output, vocabulary]."""
    output = loaded.model(input_ids=torch.tensor([ids]), use_cache=False, logits_to_keep=len(ids) - first + 1)
    logits: torch.Tensor = output.logits[0, :-1, : loaded.vocabulary.size].float()
    return logits


def expectations(target: LoadedModel, drafter: LoadedModel, ids: list[int], params: SamplingParams) -> dict[str, float]:
    """Acceptance of one id in expectation, over the positions of ids' output (after `num_prompt`), by rule."""
    num_prompt = len(ids) - int(params.max_tokens or 0)
    context = SamplingContext(params, num_prompt, target.vocabulary, target.eos_ids)
    sampler = Sampler(context, torch.device("cpu"))
    target_probs, draft_probs = (
        sampler.probs(logits_over(model, ids, num_prompt), ids, num_prompt, num_prompt) for model in (target, drafter)
    )
    overlap = torch.minimum(target_probs, draft_probs).sum(dim=1)
    sent = torch.zeros_like(draft_probs)
    values, tokens = draft_probs.topk(MAX_SUPPORT)
    for row, (ps, ts) in enumerate(zip(values.tolist(), tokens.tolist(), strict=True)):
        sparse = SparseProbs.of([(t, p) for t, p in zip(ts, ps, strict=True) if p > 0])
        sent[row, list(sparse.ids)] = torch.tensor(sparse.probs, dtype=sent.dtype)
    agreed = torch.zeros(len(overlap))
    for seed in range(_NUM_SEEDS):
        keys = [noise_key(seed, Stream.CHOICE, position) for position in range(num_prompt, len(ids))]
        draws = zip(race(target_probs, keys), race(draft_probs, keys), strict=True)
        agreed += torch.tensor([float(a == b) for a, b in draws])
    return {
        "best possible, 1 - TV": float(overlap.mean()),
        "coupled at least, (1 - TV) / (1 + TV)": float((overlap / (2 - overlap)).mean()),
        "coupled": float(agreed.mean()) / _NUM_SEEDS,
        "rejection": float(torch.minimum(target_probs, sent).sum(dim=1).mean()),
        "drafter's likeliest id": float(target_probs.gather(1, draft_probs.argmax(dim=1, keepdim=True)).mean()),
    }


async def measure(num_prompts: int, num_tokens: int) -> None:
    """Run all cells that are not stored yet."""
    chosen = prompts()[:: max(1, len(prompts()) // num_prompts)][:num_prompts]
    target, small = load(TARGET), load(DRAFTER)
    drafter, engine = CausalLmDrafter(small), TransformersEngine(load(TARGET), kv_cache_mb=256)
    tokenizer = Tokenizer(target.bundle)
    done = STORE.rows()
    work = [(p, t, m) for p in chosen for t in TEMPERATURES for m in MODES if f"{p.name} {t} {m}" not in done]
    with Progress() as progress:
        for prompt, temperature, mode in progress.track(work, description="acceptance"):
            params = params_of(temperature, mode, seed=1)
            prompt_ids = tokenizer.encode_chat(prompt.messages)
            sampling = SamplingContext(params, len(prompt_ids), target.vocabulary, target.eos_ids)
            output, usage = await write(engine, drafter, sampling, prompt_ids, num_tokens)
            row: dict[str, Any] = {
                "machine": machine(),
                "target": target.files.name,
                "drafter": small.files.name,
                "depth": DEPTH,
                "prompt": prompt.name,
                "temperature": temperature,
                "mode": mode,
                "usage": vars(usage),
            }
            if mode == "coupled":
                params = SamplingParams(temperature=temperature, seed=1, max_tokens=len(output))
                row["expected"] = expectations(target, small, [*prompt_ids, *output], params)
            STORE.append(f"{prompt.name} {temperature} {mode}", row)
    await engine.close()


def main() -> None:
    """Measure from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    asyncio.run(measure(arguments.prompts, arguments.tokens))


if __name__ == "__main__":
    main()
