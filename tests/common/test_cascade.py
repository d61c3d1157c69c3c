"""The first drafter with anything to say says it; what it says is what it would have said alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from baru_common.corpus import Corpus
from baru_common.drafters import CascadeDrafter, NgramDrafter, load_drafter
from baru_common.drafters.cascade import UnboundCascade
from baru_common.drafters.causal_lm import CausalLmDrafter
from baru_common.drafters.corpus_drafter import CorpusDrafter
from baru_common.drafters.suffix import SuffixDrafter
from baru_common.errors import ConfigError
from baru_common.sampling import Grammar, SamplingMode
from baru_common.sampling.guide import Guide
from baru_common.tokens import Tokenizer
from support.drafters import FunctionDrafter
from support.sampling import context
from support.tiny import save, tiny_bundle, tiny_target

REPEATS = [5, 6, 7, 8, 5, 6]


def saying(*ids: int, most: int = 64, blocking: bool = False) -> FunctionDrafter:
    def propose(_ids: Sequence[int], _num_committed: int, max_tokens: int) -> list[int]:
        return list(ids)[:max_tokens]

    return FunctionDrafter(propose, family="saying", tokens_per_call=most, blocking=blocking)


def test_the_first_that_has_anything_to_say_says_it() -> None:
    stream = CascadeDrafter((NgramDrafter(shortest=2), saying(90, 91))).start()
    assert stream.propose(REPEATS, 6, 2).ids == [7, 8]
    assert stream.propose([*REPEATS, 50], 7, 2).ids == [90, 91]
    assert CascadeDrafter((NgramDrafter(),)).start().propose([1, 2, 3], 3, 2).ids == ()


def test_each_is_asked_for_what_it_can_do_at_once() -> None:
    """A model streams id by id, even behind a drafter of whole blocks."""
    stream = CascadeDrafter((saying(), saying(1, 2, 3, 4, most=1))).start()
    assert stream.propose([9], 1, 8).ids == [1]
    assert CascadeDrafter((saying(1, 2, 3), saying(9))).start().propose([9], 1, 2).ids == [1, 2]


def test_what_it_says_of_itself() -> None:
    cascade = CascadeDrafter((NgramDrafter(), CausalLmDrafter(tiny_target())))
    assert cascade.family == "ngram+causal_lm"
    assert cascade.vocabulary is tiny_target().vocabulary
    assert cascade.tokens_per_call == NgramDrafter.tokens_per_call
    assert cascade.blocking
    assert not CascadeDrafter((NgramDrafter(), saying())).blocking
    assert CascadeDrafter((NgramDrafter(),)).vocabulary is None


def test_a_models_drafts_behind_repeated_ids_are_as_if_it_had_drafted_alone() -> None:
    """Its cache goes past ids that it did not draft."""
    model = CausalLmDrafter(tiny_target())
    stream = CascadeDrafter((NgramDrafter(shortest=2), model)).start()
    ids = list(REPEATS)
    for _ in range(12):
        proposed = stream.propose(ids, 6, 4).ids
        alone = list(NgramDrafter(shortest=2).start().propose(ids, 6, 4).ids) or model.start().propose(ids, 6, 1).ids
        assert proposed == alone
        ids += proposed


def test_every_id_of_a_chain_is_drawn_under_rejection_sampling() -> None:
    """What was repeated was drawn from a distribution of one; a hub takes no chain that is drawn in part."""
    sampling = context(6, sampling_mode=SamplingMode.REJECTION, temperature=1.0, seed=3)
    stream = CascadeDrafter((NgramDrafter(shortest=2), saying(90))).start(sampling)
    for ids, proposed in ((REPEATS, [7, 8]), ([*REPEATS, 50], [90])):
        proposal = stream.propose(ids, len(ids), 2)
        assert proposal.ids == proposed
        assert [(probs.ids, probs.probs) for probs in proposal.draft_probs] == [((i,), (1.0,)) for i in proposed]
    model = CascadeDrafter((NgramDrafter(shortest=2), CausalLmDrafter(tiny_target()))).start(sampling)
    drawn = model.propose([*REPEATS, 50], 7, 2)
    assert drawn.draft_probs[0].prob(drawn.ids[0]) < 1
    assert not CascadeDrafter((NgramDrafter(),)).start(context(6)).propose(REPEATS, 6, 2).draft_probs


def test_each_part_is_kept_to_the_grammar() -> None:
    bundle = tiny_bundle()
    tokenizer = Tokenizer(bundle)
    guide = Guide.compile(Grammar.regex("[0-9]+"), bundle, (2,))
    digits, letters = (tokenizer.encode_inside(text) for text in ("12", "ab"))
    sampling = replace(context(3, vocabulary=tokenizer.vocabulary, eos_ids=(2,)), guide=guide)
    stream = CascadeDrafter((saying(*letters), saying(*digits))).start(sampling)
    assert list(stream.propose([9, 9, 9], 3, 4).ids) == list(digits)


# -- by name


def test_several_are_named_with_a_plus_between(tmp_path: Path) -> None:
    """Those before the last repeat on firmer ground only: two ids must match."""
    folder = save(tiny_target(), tmp_path / "a+b")
    found = load_drafter(f"suffix+ngram+causal_lm:{folder}")
    assert isinstance(found, CascadeDrafter)
    suffix, ngram, model = found.parts
    assert isinstance(suffix, SuffixDrafter)
    assert isinstance(ngram, NgramDrafter)
    assert isinstance(model, CausalLmDrafter)
    assert (suffix.shortest, ngram.shortest, model.loaded.files.path) == (2, 2, folder)
    last = load_drafter("suffix+ngram")
    assert isinstance(last, CascadeDrafter)
    assert [getattr(part, "shortest", None) for part in last.parts] == [2, 1]


@pytest.mark.parametrize("spec", ["ngram+none", "none+ngram", "ngram+", "+ngram", "ngram+nonsense", "ngram++suffix"])
def test_what_is_no_drafter_is_refused_in_a_cascade(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"drafter"):
        load_drafter(spec)


def test_a_part_that_reads_texts_is_bound_with_the_cascade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BARU_DATA_DIR", str(tmp_path))
    (tmp_path / "note.txt").write_text("the relay at the north gate is down")
    Corpus("notes").add(tmp_path / "note.txt")
    found = load_drafter("suffix:notes+ngram")
    assert isinstance(found, UnboundCascade)
    corpus = found.parts[0]
    assert isinstance(corpus, CorpusDrafter)
    tokenizer = Tokenizer(tiny_bundle())
    drafter = found.bound(tokenizer)
    assert drafter.family == "suffix+ngram"
    asked = tokenizer.encode_inside("the relay at the north")
    proposed = drafter.start().propose(asked, len(asked), 5).ids
    assert tokenizer.decode(proposed).startswith(" gate")
    assert not drafter.start().propose([9, asked[-1]], 2, 5).ids  # one id is not enough where another could draft
