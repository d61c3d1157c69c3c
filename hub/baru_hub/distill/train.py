"""The training loop: resumable, with progress, and a drafter in the published layout after each checkpoint."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from baru_common.model_files import LoadedModel
from baru_common.whole_files import write_atomically
from baru_hub.drafters.checkpoint import tap_layers
from baru_hub.drafters.eagle3 import Eagle3Head

from .eagle3 import Trainee, new_head
from .observed import Observed
from .texts import Text, batches, cut, draft_vocabulary

_KEPT = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("num_hidden_layers", "rms_norm_eps", "max_position_embeddings", "vocab_size", "draft_vocab_size"),
    "rope_parameters",
)
"""What config.json says of a head."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recipe:
    """How a head is trained."""

    draft_vocab_size: int = 8192
    num_steps: int = 4
    """Unrolled steps."""
    decay: float = 0.8
    """Weight of each unrolled step's loss, of the one before."""
    learning_rate: float = 1e-3
    """Of AdamW, for norms and output rows; the layer's matrices have Muon at twice that."""
    weight_decay: float = 0.05
    batch_ids: int = 4096
    longest: int = 384
    """Ids of a text that are read."""
    warm_up: int = 50
    seed: int = 0


@dataclass
class State:
    """Where training stands."""

    step: int = 0
    num_ids: int = 0
    epoch: int = 0
    elapsed_s: float = 0.0


class Training:
    """Trains one head in a folder; begins where an earlier run stopped."""

    def __init__(self, target: LoadedModel, texts: Sequence[Text], folder: Path, recipe: Recipe) -> None:
        self.target, self.folder, self.recipe = target, folder, recipe
        self.texts = cut(texts, recipe.longest)
        self.state = State()
        self.taps = tap_layers({}, target.model.config.get_text_config(decoder=True).num_hidden_layers)
        self._observed = Observed(target, self.taps, self.texts, folder / f"observed-{target.fingerprint.hex()[:12]}")
        torch.manual_seed(recipe.seed)
        saved = folder / "state.pt"
        self._saved: dict[str, Any] = torch.load(saved, weights_only=True) if saved.exists() else {}
        size = min(recipe.draft_vocab_size, target.vocabulary.size)
        vocabulary = self._saved.get("vocabulary") or draft_vocabulary(texts, size)
        self.vocabulary = torch.tensor(vocabulary, device=target.model.device)
        embedding: Any = target.model.get_input_embeddings()
        examples = self._observed.batch(self.vocabulary, self.texts[:8]).taps.flatten(0, 1)
        self.trainee = Trainee(new_head(target, vocabulary, examples).float(), embedding, recipe.decay)
        self._optimizers = self._make_optimizers()
        if self._saved:
            self.trainee.load_state_dict(self._saved["trainee"])
            for optimizer, saved_state in zip(self._optimizers, self._saved["optimizers"], strict=True):
                optimizer.load_state_dict(saved_state)
            self.state = State(**self._saved["state"])
            self._saved = {}

    def run(self, seconds: float, tell: Callable[[str], None], judge: Callable[[], str] | None = None) -> None:
        """Train for `seconds` more, the learning rate falling to nothing over all the time spent; checkpoint, and call
        `judge`, now and again. Ctrl-C ends it after a checkpoint."""
        begin_s, before_s = time.monotonic(), self.state.elapsed_s
        kept_s = begin_s
        try:
            while self.state.elapsed_s - before_s < seconds:
                self.state.epoch += 1
                for texts in batches(self.texts, self.recipe.batch_ids, self.state.epoch):
                    share = (self.state.elapsed_s - before_s) / seconds
                    if share >= 1:
                        break
                    loss, hits = self._step(texts, share)
                    now_s = time.monotonic()
                    self.state.elapsed_s = before_s + now_s - begin_s
                    if self.state.step % 5 == 0:
                        shown = " ".join(f"{hit:.3f}" for hit in hits)
                        tell(
                            f"step {self.state.step} epoch {self.state.epoch} loss {loss:.3f} right {shown}"
                            f" {self.state.num_ids / 1e6:.2f}M ids, {share:.1%} of the time"
                        )
                    if now_s - kept_s > 600:
                        self.save()
                        kept_s = now_s
                        if judge:
                            tell(judge())
        finally:
            self.save()

    def _step(self, texts: Sequence[Text], share: float) -> tuple[float, list[float]]:
        batch = self._observed.batch(self.vocabulary, texts)
        warm = min(1.0, (self.state.step + 1) / self.recipe.warm_up)
        factor = warm * 0.5 * (1 + math.cos(math.pi * share))
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * factor
        with torch.autocast(self.target.model.device.type, torch.bfloat16):
            loss, hits = self.trainee.loss(batch, self.recipe.num_steps)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.trainee.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.state.step += 1
        self.state.num_ids += int(batch.counts.sum())
        return float(loss.detach()), hits

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        recipe = self.recipe
        named = list(self.trainee.named_parameters())
        matrices = [p for name, p in named if p.dim() == 2 and "lm_head" not in name]
        others = [p for name, p in named if p.dim() != 2 or "lm_head" in name]
        muon = torch.optim.Muon(
            matrices,
            lr=2 * recipe.learning_rate,
            weight_decay=recipe.weight_decay,
            momentum=0.95,
            adjust_lr_fn="match_rms_adamw",
        )
        adam = torch.optim.AdamW(others, lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
        for optimizer, rate in ((muon, 2 * recipe.learning_rate), (adam, recipe.learning_rate)):
            for group in optimizer.param_groups:
                group["base_lr"] = rate
        return [muon, adam]

    def save(self) -> None:
        """Write the state, and the head as it is now."""
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "trainee": self.trainee.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "state": asdict(self.state),
            "vocabulary": self.vocabulary.tolist(),
        }
        scratch = self.folder / "state.tmp"
        torch.save(state, scratch)
        scratch.replace(self.folder / "state.pt")
        export(self.trainee.head, self.folder)


def export(head: Eagle3Head, folder: Path) -> None:
    """Write a head in the published layout, in bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().bfloat16().contiguous() if tensor.is_floating_point() else tensor.detach().contiguous()
        for name, tensor in head.state_dict().items()
        if not name.startswith("rotary")
    }
    member = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    member[head.target_ids().cpu()] = True
    scratch = folder / "model.tmp"
    save_file(tensors | {"t2d": member}, scratch, metadata={"format": "pt"})
    scratch.replace(folder / "model.safetensors")
    raw = {key: getattr(head.config, key) for key in _KEPT}
    raw |= {"fc_norm": head.options.fc_norm}
    raw |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "dtype": "bfloat16"}
    write_atomically(folder / "config.json", json.dumps(raw, indent=1).encode())
