from __future__ import annotations

import copy
import itertools
import json
import operator
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from baru_common.drafters import load_drafter
from baru_common.drafters.causal_lm import CausalLmDrafter, CausalLmStream
from baru_common.errors import ModelFileError
from baru_common.model_files import LoadedModel
from baru_common.sampling import SamplingContext, SamplingMode
from baru_common.tokens import TokenizerBundle
from support.sampling import context
from support.tiny import plain_greedy, save, tiny_bundle, tiny_target, with_eos


def favouring(loaded: LoadedModel, token_ids: list[int], bundle: TokenizerBundle | None = None) -> LoadedModel:
    """A copy of a model whose largest logit nearly always belongs to one of `token_ids`."""
    model: Any = copy.deepcopy(loaded.model)
    model.lm_head.weight.data[token_ids] *= 100
    return replace(loaded, model=model, bundle=bundle or loaded.bundle)


def raw_choice(loaded: LoadedModel, ids: list[int]) -> int:
    with torch.inference_mode():
        return int(loaded.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())


def best_but(loaded: LoadedModel, ids: list[int], banned: set[int]) -> int:
    """The greedy choice among the ids that mean something."""
    with torch.inference_mode():
        logits = loaded.model(input_ids=torch.tensor([ids])).logits[0, -1]
    return max((i for i in range(loaded.vocabulary.size) if i not in banned), key=lambda i: float(logits[i]))


def endless(loaded: LoadedModel) -> SamplingContext:
    """A greedy request that no id ends."""
    return context(1, vocabulary=loaded.vocabulary, eos_ids=loaded.eos_ids, ignore_eos=True)


def test_with_the_targets_weights_it_drafts_what_the_target_says() -> None:
    """A block at once, or one id a call, each fed back: the same ids as plain greedy decoding."""
    target, prompt = tiny_target(), [1, 5, 9]
    expected = plain_greedy(target, prompt, 24)
    assert CausalLmDrafter(target).start().propose(prompt, len(prompt), 24).ids == expected
    stream, ids = CausalLmDrafter(target).start(), list(prompt)
    for token in expected:
        assert stream.propose(ids, len(prompt), 1).ids == [token]
        ids.append(token)


@pytest.mark.parametrize("seed", range(6))
def test_it_equals_greedy_decoding_after_any_rewinds(seed: int) -> None:
    """Whatever was drafted and refused, fed twice, cut to one id or replaced as a whole leaves no trace."""
    chance = random.Random(seed)
    target = tiny_target()
    stream, ids = CausalLmDrafter(target).start(endless(target)), [1]
    for _ in range(25):
        kept = ids[: chance.choice([len(ids), len(ids), chance.randint(0, len(ids)), 0])]
        ids = (kept + chance.choices(range(target.vocabulary.size), k=chance.randint(0, 6))) or [chance.randint(0, 2)]
        num_tokens = chance.randint(0, 4)
        proposed = stream.propose(ids, chance.randint(1, len(ids)), num_tokens).ids
        assert proposed == plain_greedy(target, ids, num_tokens)
        ids += proposed if chance.random() < 0.5 else []


def test_nothing_is_proposed_past_what_ends_the_output() -> None:
    """The end itself is; and where it is committed, it ended nothing."""
    prompt = [1, 5, 9]
    answer = plain_greedy(tiny_target(), prompt, 8)
    place = next(i for i in range(2, 8) if answer[i] not in answer[:i])
    stop, whole = answer[place], [*prompt, *answer]
    target = with_eos(tiny_target(), stop)
    stopping = context(3, vocabulary=target.vocabulary, stop_ids=(stop,))
    for stream in (CausalLmDrafter(target).start(), CausalLmDrafter(tiny_target()).start(stopping)):
        assert stream.propose(prompt, 3, 8).ids == answer[: place + 1]
        assert stream.propose(whole[: 3 + place + 1], 3, 8).ids == []
        assert stream.propose(whole[: 3 + place + 1], 3 + place + 1, 7 - place).ids == answer[place + 1 :]
    assert CausalLmDrafter(target).start(endless(target)).propose(prompt, 3, 8).ids == answer


def test_only_what_is_new_is_fed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids that the cache holds are not computed again; after a refusal only those from there on."""
    target, fed = tiny_target(), []
    forward = target.model.forward

    def counted(input_ids: torch.Tensor, **options: Any) -> Any:
        fed.append(input_ids[0].tolist())
        return forward(input_ids=input_ids, **options)

    monkeypatch.setattr(target.model, "forward", counted)
    stream = CausalLmDrafter(target).start()
    (first, second) = stream.propose([1, 5, 9], 3, 2).ids
    stream.propose([1, 5, 9, first, 7, 8], 5, 1)
    assert fed == [[1, 5, 9], [first], [7, 8]]
    assert second != 7


def test_streams_do_not_meet() -> None:
    """Two sessions share the weights and nothing else."""
    target = tiny_target()
    drafter = CausalLmDrafter(target)
    one, other = drafter.start(), drafter.start()
    assert one is not other
    ids, others = [1, 5, 9], [1, 200, 17, 4]
    for _ in range(6):
        ids += one.propose(ids, 3, 1).ids
        others += other.propose(others, 4, 1).ids
    assert ids[3:] == plain_greedy(target, [1, 5, 9], 6)
    assert others[4:] == plain_greedy(target, [1, 200, 17, 4], 6)


def test_padding_of_the_embedding_is_never_proposed() -> None:
    """Though the model itself would choose it each time."""
    target = favouring(tiny_target(), list(range(300, 320)))
    ids = [1, 5, 9]
    for _ in range(8):
        assert raw_choice(target, ids) >= 300
        (token,) = CausalLmDrafter(target).start().propose(ids, len(ids), 1).ids
        assert token == best_but(target, ids, set())
        ids.append(token)


def test_a_hole_is_never_proposed() -> None:
    """An id that stands for nothing, below the vocabulary's size (see `Vocabulary.holes`)."""
    spec = json.loads(tiny_bundle().tokenizer_json)
    spec["model"]["merges"] = [m for m in spec["model"]["merges"] if "".join(m) not in ("et", "te", "ea", "ta")]
    holes = [spec["model"]["vocab"].pop(token) for token in ("et", "te", "ea", "ta")]
    target = favouring(tiny_target(), holes, TokenizerBundle(json.dumps(spec)))
    assert list(target.vocabulary.holes) == sorted(holes)
    ids = next([1, first] for first in range(3, 300) if raw_choice(target, [1, first]) in holes)
    assert CausalLmDrafter(target).start().propose(ids, 2, 1).ids == [best_but(target, ids, set(holes))]


@pytest.mark.parametrize(("length", "num_proposed"), [(10, 8), (20, 4), (23, 1), (24, 0), (30, 0)])
def test_it_stops_at_its_own_context_limit(length: int, num_proposed: int) -> None:
    """Its context may be shorter than the target's: then there is nothing more to say."""
    drafter = tiny_target(context_limit=24)
    ids = [1, *range(10, 9 + length)]
    assert len(CausalLmDrafter(drafter).start().propose(ids, length, 8).ids) == num_proposed


def test_what_it_says_of_itself() -> None:
    drafter = CausalLmDrafter(tiny_target())
    assert (drafter.family, drafter.tokens_per_call, drafter.blocking) == ("causal_lm", 1, True)
    assert drafter.vocabulary == tiny_target().vocabulary
    assert isinstance(drafter.start(), CausalLmStream)


def test_it_is_loaded_by_its_path(tmp_path: Any) -> None:
    """`causal_lm:PATH` is the drafter of the model there; a path without one is an error that names it."""
    save(tiny_target(), tmp_path / "model")
    drafter = load_drafter(f"causal_lm:{tmp_path / 'model'}")
    assert isinstance(drafter, CausalLmDrafter)
    assert drafter.vocabulary.digest == tiny_target().vocabulary.digest
    with pytest.raises(ModelFileError, match="nowhere"):
        load_drafter(f"causal_lm:{tmp_path / 'nowhere'}")


# -- where it is unsure


def confidences(loaded: LoadedModel, prompt: list[int], proposed: Sequence[int]) -> list[float]:
    """Its own probability of its likeliest id, at each proposed position and the one after."""
    with torch.inference_mode():
        logits = loaded.model(input_ids=torch.tensor([[*prompt, *proposed]])).logits[0, len(prompt) - 1 :]
    sure: list[float] = logits[:, : loaded.vocabulary.size].softmax(-1).max(-1).values.tolist()
    return sure


def survival(sure: Sequence[float]) -> list[float]:
    return list(itertools.accumulate(sure, operator.mul))


def test_a_chain_ends_where_it_is_unsure() -> None:
    """Of the whole chain, not of its last id alone; block by block, or id by id."""
    target, prompt = tiny_target(), [1, 5, 9]
    whole = CausalLmDrafter(target).start(endless(target)).propose(prompt, 3, 8).ids
    likely = survival(confidences(target, prompt, whole))
    assert min(confidences(target, prompt, whole)[:4]) > likely[3] > likely[4]  # no single id is so unsure
    drafter = CausalLmDrafter(target, min_confidence=(likely[3] + likely[4]) / 2)
    assert drafter.start(endless(target)).propose(prompt, 3, 8).ids == whole[:4]
    stream, ids = drafter.start(endless(target)), list(prompt)
    while proposed := stream.propose(ids, 3, 1).ids:
        ids += proposed
    assert ids == [*prompt, *whole[:4]]
    assert not stream.propose(ids, 3, 8).ids


def test_what_is_committed_is_certain() -> None:
    """Committed ids take nothing from the confidence in what follows; nor do refused ones."""
    target, prompt = tiny_target(), [1, 5, 9]
    whole = CausalLmDrafter(target).start(endless(target)).propose(prompt, 3, 8).ids
    likely = survival(confidences(target, prompt, whole))
    drafter = CausalLmDrafter(target, min_confidence=(likely[3] + likely[4]) / 2)
    for committed in (
        [*prompt, *whole[:2]],
        [*prompt, *whole[:4]],
        [*prompt, *whole[:5]],
        [*prompt, whole[0], (whole[1] + 1) % 300],
        prompt,
    ):
        stream = drafter.start(endless(target))
        stream.propose(prompt, 3, 8)
        fresh = drafter.start(endless(target)).propose(committed, len(committed), 8).ids
        assert stream.propose(committed, len(committed), 8).ids == fresh
        likely_here = survival(confidences(target, committed, fresh))
        assert all(p >= drafter.min_confidence for p in likely_here[: len(fresh)])
        assert len(fresh) == 8 or likely_here[-1] < drafter.min_confidence


def test_what_others_drafted_is_taken_as_it_is() -> None:
    """Their ids at the places of refused ones inherit no doubt."""
    target, prompt = tiny_target(), [1, 5, 9]
    drafter = CausalLmDrafter(target, min_confidence=confidences(target, [*prompt, 40, 41], [])[0] * 0.9)
    stream = drafter.start(endless(target))
    assert stream.propose(prompt, 3, 4).ids
    assert len(stream.propose([*prompt, 40, 41], 3, 1).ids) == 1


@pytest.mark.parametrize("mode", list(SamplingMode))
def test_an_id_is_not_withheld_for_what_it_is(mode: SamplingMode) -> None:
    """Whether anything is drafted is the same for every seed: the distribution decides, not the draw."""
    target, prompt = tiny_target(), [1, 5, 9]
    (sure, *_) = confidences(target, prompt, [])
    for factor, num_proposed in ((0.9, 1), (1.1, 0)):
        drafter = CausalLmDrafter(target, min_confidence=sure * factor)
        for seed in range(12):
            sampling = context(3, vocabulary=target.vocabulary, sampling_mode=mode, temperature=1.0, seed=seed)
            assert len(drafter.start(sampling).propose(prompt, 3, 1).ids) == num_proposed
