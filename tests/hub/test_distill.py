"""Training a head: texts, batches, and an unrolled pass that computes what serving computes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baru_common.errors import ConfigError
from baru_common.model_files import LoadedModel
from baru_hub.distill import observed
from baru_hub.distill.eagle3 import Trainee, new_head
from baru_hub.distill.observed import Observed, observe
from baru_hub.distill.texts import Text, batches, cut, draft_vocabulary, read_texts, split
from baru_hub.distill.train import Recipe, Training, export
from baru_hub.drafters.base import DraftAsk, States, TargetParts
from baru_hub.drafters.eagle3 import Eagle3, Eagle3Head
from baru_hub.drafters.recurrent import RecurrentDrafter
from baru_hub.kv_cache import KvShape, PagedCache
from support.drafted import SIZE, WIDTH, Driven, engine_with, layered_target, states_of

TAPS = (2, 3, 3)
RECIPE = Recipe(draft_vocab_size=80, num_steps=3, batch_ids=256, longest=40, warm_up=2)


def text_of(number: int, length: int = 30, num_prompt: int = 6) -> Text:
    """A prompt and an answer of few ids, so that there is something to learn soon."""
    chance = random.Random(number)
    prompt = [chance.randrange(3, SIZE) for _ in range(num_prompt)]
    return Text(tuple(prompt + [chance.randrange(10, 60) for _ in range(length - num_prompt)]), num_prompt)


TEXTS = [text_of(number, 20 + number % 20) for number in range(24)]


# -- texts


def write(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def saved(path: Path, texts: Sequence[Text]) -> Path:
    return write(
        path,
        ids=np.array([token for text in texts for token in text.ids], dtype=np.uint16),
        lengths=np.array([len(text.ids) for text in texts], dtype=np.int32),
        prompt_lengths=np.array([text.num_prompt for text in texts], dtype=np.int32),
    )


def test_texts_are_read_as_they_were_written(tmp_path: Path) -> None:
    paths = [saved(tmp_path / "a.npz", TEXTS[:3]), saved(tmp_path / "b.npz", TEXTS[3:])]
    assert read_texts(paths) == TEXTS


_GOOD: dict[str, Any] = {"ids": np.arange(6), "lengths": np.array([4, 2]), "prompt_lengths": np.array([2, 1])}


@pytest.mark.parametrize(
    "changes",
    [
        {"lengths": np.array([4, 3])},
        {"lengths": np.array([6])},
        {"lengths": np.array([8, -2])},
        {"lengths": np.array(6), "prompt_lengths": np.array(2)},
        {"prompt_lengths": np.array([5, 1])},
        {"prompt_lengths": np.array([0, 1])},
        {"ids": np.arange(6) - 3},
        {"ids": np.arange(6) + 0.5},
        {"ids": np.arange(6).reshape(2, 3)},
        {"ids": np.array(list("abcdef"))},
        {"ids": np.array([1, "x", None, 2, 3, 4], dtype=object)},
    ],
)
def test_a_file_that_contradicts_itself_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    assert len(read_texts([write(tmp_path / "good.npz", **_GOOD)])) == 2
    with pytest.raises(ConfigError, match=r"bad\.npz"):
        read_texts([write(tmp_path / "bad.npz", **(_GOOD | changes))])


@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x03\x04 cut off"])
def test_a_file_of_another_kind_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.npz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.npz"):
        read_texts([path])


def test_missing_files_and_arrays_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.arange(4))
    partly = {name: array for name, array in _GOOD.items() if name != "lengths"}
    for path in (tmp_path / "none.npz", tmp_path / "one.npy", write(tmp_path / "part.npz", **partly)):
        with pytest.raises(ConfigError, match=path.name):
            read_texts([path])
    with pytest.raises(ConfigError, match="no text"):
        read_texts([])


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_prompt_is_on_one_side_with_all_its_answers(share: float) -> None:
    texts = [
        Text((*prompt, 9, answer), len(prompt))
        for prompt in itertools.product(range(5), range(4))
        for answer in range(3)
    ]
    learned, held = split(texts, share)
    assert sorted([*learned, *held], key=texts.index) == texts
    prompts = [{text.ids[: text.num_prompt] for text in side} for side in (learned, held)]
    assert not prompts[0] & prompts[1]
    assert len(prompts[1]) == round(share * 20)
    assert split(texts, share) == (learned, held)
    assert split(texts, share, seed=1) != (learned, held)


def test_batches_hold_every_text_once() -> None:
    """Of like length, no more ids than wanted, cut to the longest; those with nothing left to learn from left out."""
    texts = [text_of(number, 8 + number % 50) for number in range(700)]
    short = [Text(tuple(range(40)), 40), Text(tuple(range(60)), 45)]
    made = list(batches(cut([*texts, *short], 44), 400, seed=1))
    found = [text for batch in made for text in batch]
    assert sorted(found, key=lambda text: text.ids) == sorted(
        (Text(text.ids[:44], text.num_prompt) for text in texts), key=lambda text: text.ids
    )
    for batch in made:
        assert len(batch) == 1 or len(batch) * max(len(text.ids) for text in batch) <= 400
    padding = sum(len(batch) * max(len(text.ids) for text in batch) for batch in made)
    assert padding < 1.2 * sum(len(text.ids) for text in found)
    assert list(batches(texts, 400, seed=1)) == list(batches(texts, 400, seed=1))
    assert list(batches(texts, 400, seed=1)) != list(batches(texts, 400, seed=2))


def test_the_draft_vocabulary_is_what_answers_hold_most_often() -> None:
    """Prompts do not count; the most frequent ids, ascending."""
    texts = [Text((50, 50, 50, 7, 9, 7, 200), 3), Text((50, 7, 9, 100), 1)]
    assert draft_vocabulary(texts, 2) == [7, 9]
    assert draft_vocabulary(texts, 4) == [7, 9, 100, 200]


def test_no_more_ids_can_be_drafted_than_there_are(tmp_path: Path) -> None:
    """A target of fewer ids than the recipe's draft vocabulary can be trained for, all the same."""
    training = Training(layered_target(), TEXTS, tmp_path, Recipe(num_steps=1, batch_ids=64))
    assert int(training.vocabulary.max()) < SIZE
    assert len(set(training.vocabulary.tolist())) == len(training.vocabulary) <= SIZE


# -- what the target says


def test_what_is_observed_is_what_the_target_says() -> None:
    """States, likeliest ids, and its distribution over the draft vocabulary; in a batch as alone."""
    target, vocabulary = layered_target(), torch.tensor([5, 10, 20, 250])
    batch = observe(target, TAPS, vocabulary, TEXTS[:6])
    model: Any = target.model
    for row, text in enumerate(TEXTS[:6]):
        states, length = states_of(target, text.ids), len(text.ids)
        logits = (states[-1] @ model.lm_head.weight.T)[:, :SIZE]
        torch.testing.assert_close(
            batch.taps[row, :length], torch.stack([states[i] for i in TAPS], 1), rtol=1e-4, atol=1e-4
        )
        assert batch.likeliest[row, :length].tolist() == logits.argmax(-1).tolist()
        torch.testing.assert_close(
            batch.target_probs[row, :length].float(), logits[:, vocabulary].softmax(-1), rtol=1e-2, atol=1e-3
        )
        wanted = [text.num_prompt - 1 <= j < length - 1 for j in range(batch.ids.shape[1])]
        assert batch.counts[row].tolist() == wanted


def test_the_target_is_run_once_over_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not again in this run, nor in a later one with more texts; what is read back is what it said."""
    runs: list[int] = []
    real = observed.states_of

    def counted(target: LoadedModel, taps: Sequence[int], ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        runs.append(len(ids))
        return real(target, taps, ids)

    monkeypatch.setattr(observed, "states_of", counted)
    target, vocabulary = layered_target(), torch.tensor([5, 10, 20, 250])
    first = Observed(target, TAPS, TEXTS[:6], tmp_path)
    first.batch(vocabulary, TEXTS[:4])
    seen = first.batch(vocabulary, TEXTS[1:6])
    later = Observed(target, TAPS, TEXTS[:8], tmp_path).batch(vocabulary, [*TEXTS[1:6], TEXTS[7]])
    assert runs == [4, 2, 1]
    fresh = observe(target, TAPS, vocabulary, TEXTS[1:6])
    for row, text in enumerate(TEXTS[1:6]):
        length = len(text.ids)
        for batch in (seen, later):
            assert batch.ids[row, :length].tolist() == list(text.ids)
            torch.testing.assert_close(batch.taps[row, :length], fresh.taps[row, :length], rtol=1e-4, atol=1e-4)
            assert torch.equal(batch.likeliest[row, :length], fresh.likeliest[row, :length])
            assert torch.equal(batch.counts[row, :length], fresh.counts[row, :length])
            torch.testing.assert_close(
                batch.target_probs[row, :length], fresh.target_probs[row, :length], rtol=2e-2, atol=1e-3
            )


def test_a_text_half_written_is_seen_again(tmp_path: Path) -> None:
    """The ids are written last: without them all, a row is no row."""
    target, vocabulary = layered_target(), torch.tensor([5, 10, 20, 250])
    Observed(target, TAPS, TEXTS[:2], tmp_path).batch(vocabulary, TEXTS[:2])
    for name, size in (("ids", 4), ("states", 4)):
        with (tmp_path / f"{name}.bin").open("r+b") as file:
            file.write(bytes(size * 3))
    batch = Observed(target, TAPS, TEXTS[:2], tmp_path).batch(vocabulary, TEXTS[:2])
    length = len(TEXTS[0].ids)
    fresh = observe(target, TAPS, vocabulary, TEXTS[:2])
    torch.testing.assert_close(batch.taps[0, :length], fresh.taps[0, :length], rtol=1e-4, atol=1e-4)


# -- the unrolled pass


def examples() -> torch.Tensor:
    return torch.stack([states_of(layered_target(), TEXTS[0].ids)[i] for i in TAPS], 1)


def trained_head(seed: int = 0) -> Eagle3Head:
    torch.manual_seed(seed)
    head = new_head(layered_target(), draft_vocabulary(TEXTS, 80), examples())
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if "norm" in name:
                weight.add_(0.3 * torch.randn_like(weight))
    return head.eval().requires_grad_(False)


class Recorder(RecurrentDrafter):
    """Notes what the head read at each drafted position."""

    def __init__(self, head: Eagle3, parts: TargetParts) -> None:
        super().__init__(head, "eagle3", TAPS, parts)
        self.read: list[torch.Tensor] = []

    def _pass(self, feeds: Any, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        following, normed = super()._pass(feeds, state)
        self.read.append(normed[0, -1])
        return following, normed


def served(head: Eagle3Head, ids: Sequence[int], num_committed: int, num_steps: int) -> list[torch.Tensor]:
    """What serving computes after `num_committed` ids, when what is drafted then is what the text has."""
    target = layered_target()
    shape = KvShape.of(target.model.config)
    cache = PagedCache(shape, 4, 64, dtype=torch.float32, device=torch.device("cpu"))
    drafter = Recorder(Eagle3(head, target, TAPS), TargetParts(target, cache, 4, 2, 2))
    states = States()
    known = states_of(target, ids[: num_committed - 1])
    states.add(0, torch.stack([known[i] for i in TAPS], 1))
    run = Driven.open(engine_with(target, None), [1])
    chain = ids[num_committed : num_committed + num_steps - 1]
    drafter.draft([DraftAsk([2, 0, 3], ids[:num_committed], run.sampler, states, 1, chain=chain)])
    run.engine._worker.shutdown()
    return drafter.read


@pytest.mark.parametrize("num_committed", [2, 3, 17, 38])
def test_unrolled_it_computes_what_serving_computes(num_committed: int) -> None:
    """Step s at a row: what the head reads in the drafter after s drafted ids."""
    head, text = trained_head(), text_of(99, 44)
    batch = observe(layered_target(), TAPS, head.target_ids(), [text, text_of(98, 12)])
    trainee = Trainee(head, layered_target().model.get_input_embeddings())
    unrolled = trainee.unroll(batch, 5)
    read = served(head, text.ids, num_committed, 5)
    assert len(read) == len(unrolled) == 5
    for step, (wanted, found) in enumerate(zip(unrolled, read, strict=True)):
        torch.testing.assert_close(found, wanted[0, num_committed - 2], rtol=1e-4, atol=1e-4, msg=f"step {step}")


def test_the_loss_is_the_cross_entropy_to_the_target() -> None:
    """Against a plain sum over texts, steps and rows."""
    head = trained_head(1)
    trainee = Trainee(head, layered_target().model.get_input_embeddings(), decay=0.5)
    texts = TEXTS[:5]
    batch = observe(layered_target(), TAPS, head.target_ids(), texts)
    loss, hits = trainee.loss(batch, 3)
    known = head.target_ids().tolist()
    total = 0.0
    for step, read in enumerate(trainee.unroll(batch, 3)):
        losses, num_right = [], 0
        for row, text in enumerate(texts):
            for n in range(len(text.ids)):
                at = n + 1 + step  # the row of the target that is about the id at n + 2 + step
                if not text.num_prompt - 1 <= at < len(text.ids) - 1:
                    continue
                log_probs = head.lm_head(read[row, n]).log_softmax(-1)
                wanted = int(batch.likeliest[row, at])
                num_right += known[int(log_probs.argmax())] == wanted
                losses.append(
                    -(batch.target_probs[row, at].float() @ log_probs) if wanted in known else torch.tensor(0.0)
                )
        total += 0.5**step * float(sum(losses)) / len(losses)
        assert hits[step] == pytest.approx(num_right / len(losses))
    assert float(loss) == pytest.approx(total, rel=2e-3)  # the target's side is kept in bf16


def test_what_would_be_accepted_is_what_a_hub_accepts() -> None:
    """Counted by hand: from each emitted id on, as many as are right, and one more."""
    head = trained_head(2)
    trainee = Trainee(head, layered_target().model.get_input_embeddings())
    texts = TEXTS[:4]
    batch = observe(layered_target(), TAPS, head.target_ids(), texts)
    likeliest = batch.likeliest.clone()
    for step, read in enumerate(trainee.unroll(batch, 3)):  # a target that often says what the head guesses
        guessed = head.target_ids()[head.lm_head(read).argmax(-1)]
        for n in range(0, batch.ids.shape[1] - 1 - step, 1 + step):
            likeliest[:, n + 1 + step] = guessed[:, n]
    batch = type(batch)(batch.ids, batch.taps, batch.target_probs, likeliest, batch.counts)
    reads = trainee.unroll(batch, 3)
    num_emitted = num_steps = 0
    for row, text in enumerate(texts):
        at, end = text.num_prompt - 1, len(text.ids) - 2
        while at < end:
            right = 0
            while right < 3 and at + 1 + right <= end:
                guess = int(head.target_ids()[head.lm_head(reads[right][row, at]).argmax()])
                if guess != int(likeliest[row, at + 1 + right]):
                    break
                right += 1
            emitted = min(right + 1, end - at)
            num_emitted, num_steps, at = num_emitted + emitted, num_steps + 1, at + emitted
    assert trainee.accepted(batch, 3) == (num_emitted, num_steps)
    assert num_emitted > num_steps


# -- training


def trained(folder: Path, num_steps: int, training: Training | None = None) -> tuple[Training, list[float]]:
    training = training or Training(layered_target(), TEXTS, folder, RECIPE)
    losses: list[float] = []
    while len(losses) < num_steps:
        for texts in batches(TEXTS, RECIPE.batch_ids, seed=training.state.step):
            losses.append(training._step(texts, 0.2)[0])
            break
    return training, losses


def test_a_few_steps_lower_the_loss(tmp_path: Path) -> None:
    training = Training(layered_target(), TEXTS, tmp_path, RECIPE)
    batch = observe(layered_target(), training.taps, training.vocabulary, TEXTS)
    before = float(training.trainee.loss(batch, 3)[0].detach())
    trained(tmp_path, 24, training)
    assert float(training.trainee.loss(batch, 3)[0].detach()) < 0.9 * before
    assert training.state.step == 24
    assert training.state.num_ids > 24 * 50


def test_the_target_stays_as_it_is(tmp_path: Path) -> None:
    before = [weight.clone() for weight in layered_target().model.parameters()]
    training, _ = trained(tmp_path, 2)
    for weight, was in zip(layered_target().model.parameters(), before, strict=True):
        assert torch.equal(weight, was)
    assert not any("_embedding" in name for name in training.trainee.state_dict())


def test_interrupted_and_resumed_is_as_if_it_had_not_been(tmp_path: Path) -> None:
    """Weights and optimizers go on where they were: the same batches give the same head, bit for bit."""
    whole, losses = trained(tmp_path / "whole", 6)
    first, before = trained(tmp_path / "parts", 3)
    first.save()
    torch.manual_seed(12345)
    more = [*TEXTS, Text(tuple(range(100, 140)), 3)]  # the vocabulary stays what it was
    second = Training(layered_target(), more, tmp_path / "parts", RECIPE)
    assert second.state == first.state
    _, after = trained(tmp_path / "parts", 3, second)
    assert [*before, *after] == losses
    assert second.state == whole.state
    for (name, weight), again in zip(
        whole.trainee.state_dict().items(), second.trainee.state_dict().values(), strict=True
    ):
        assert torch.equal(weight, again), name


def test_a_run_ends_in_time_and_can_be_gone_on_with(tmp_path: Path) -> None:
    """It says how it is going, and leaves a state and a head behind."""
    told: list[str] = []
    training = Training(layered_target(), TEXTS, tmp_path, RECIPE)
    training.run(0.5, told.append)
    assert training.state.elapsed_s >= 0.5
    assert training.state.step >= 1
    files = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert files == {"state.pt", "model.safetensors", "config.json"}
    again = Training(layered_target(), TEXTS, tmp_path, RECIPE)
    assert again.state == training.state
    again.run(0.1, told.append)
    assert again.state.step > training.state.step
    assert all(line.startswith("step ") for line in told)


def test_a_run_that_is_stopped_keeps_what_it_learned(tmp_path: Path) -> None:
    training = Training(layered_target(), TEXTS, tmp_path, RECIPE)
    calls = []

    def stop(line: str) -> None:
        calls.append(line)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training.run(60, stop)
    assert Training(layered_target(), TEXTS, tmp_path, RECIPE).state.step == training.state.step == 5


def test_what_is_exported_loads_and_says_the_same_in_bf16(tmp_path: Path) -> None:
    """In the published layout; drafts and logits are those of the head, rounded."""
    head = trained_head(3)
    export(head, tmp_path)
    loaded = Eagle3.load(str(tmp_path), layered_target())
    assert loaded.taps == TAPS
    rounded = head.to(torch.bfloat16).to(torch.float32)
    own, ids = Eagle3(rounded, layered_target(), TAPS), TEXTS[0].ids
    states = states_of(layered_target(), ids[:-1])
    taps = torch.stack([states[i] for i in TAPS], 1)

    def attend(_layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    logits = []
    for eagle in (own, loaded):
        inner: Any = eagle
        embedded = inner._embedding(torch.tensor([ids[1:]]))
        _, read = inner._head(embedded, eagle.fused(taps), torch.arange(len(ids) - 1), attend)
        logits.append(eagle.logits(read[0]))
    assert torch.equal(*logits)
    assert logits[0].shape == (len(ids) - 1, SIZE)
    assert int(logits[0].isfinite()[0].sum()) == 80


def test_a_new_head_begins_as_the_targets_last_layer() -> None:
    """On its state, not on the embedding; and no dimension of what it taps counts more than another."""
    model: Any = layered_target().model
    head = new_head(layered_target(), [4, 9, 100], examples()).requires_grad_(False)
    last = model.model.layers[-1]
    middle: Any = head.midlayer
    assert torch.equal(middle.self_attn.q_proj.weight[:, WIDTH:], last.self_attn.q_proj.weight)
    assert float(middle.self_attn.q_proj.weight[:, :WIDTH].abs().max()) < 0.1
    assert torch.equal(middle.self_attn.o_proj.weight, last.self_attn.o_proj.weight)
    assert torch.equal(middle.mlp.down_proj.weight, last.mlp.down_proj.weight)
    assert torch.equal(middle.hidden_norm.weight, last.input_layernorm.weight)
    assert torch.equal(middle.post_attention_layernorm.weight, last.post_attention_layernorm.weight)
    assert torch.equal(head.state_dict()["norm.weight"], model.model.norm.weight)
    for norm, tap in zip(head.fc_norm, examples().unbind(1), strict=True):
        torch.testing.assert_close(norm(tap).abs().mean(0), torch.ones(WIDTH), rtol=1e-3, atol=1e-3)


def test_a_new_head_is_of_the_targets_shape() -> None:
    """Its output rows are the target's, of the ids that it can draft."""
    model: Any = layered_target().model
    head = new_head(layered_target(), [4, 9, 100], examples())
    assert torch.equal(head.lm_head.weight, model.lm_head.weight[[4, 9, 100]])
    assert head.target_ids().tolist() == [4, 9, 100]
    assert head.fc.weight.shape == (WIDTH, 3 * WIDTH)
