"""`baru-micro corpus` as a user and as a script sees it, and a generation that drafts from what was added."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from baru_common.corpus import Corpus
from baru_common.errors import ConfigError
from baru_common.sampling import SamplingParams
from baru_common.tokens import Tokenizer
from baru_micro.cli import app
from support.hubs import generate, hub_of
from support.tiny import plain_greedy, tiny_target


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BARU_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of two texts and a picture."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "a.txt").write_text("one")
    (folder / "b.md").write_text("three")
    (folder / "c.png").write_text("no text")
    return folder


def corpus(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["corpus", *map(str, arguments)])


def test_texts_are_added_and_what_is_left_out_is_named(source: Path) -> None:
    result = corpus("add", source)
    assert result.exit_code == 0
    assert result.stdout == "2 texts added to corpus default, 0 were there already\n"
    assert result.stderr == f"left out {source / 'c.png'}: not a kind of text file\n"
    assert corpus("add", source / "a.txt").stdout == "0 texts added to corpus default, 1 were there already\n"


def test_adding_tells_a_script(source: Path) -> None:
    result = corpus("add", source, "--name", "reports", "--json")
    expected = {"num_texts": 2, "num_known": 0, "skipped": [[str(source / "c.png"), "not a kind of text file"]]}
    assert json.loads(result.stdout) == expected
    assert result.stderr == ""
    assert sorted(Corpus("reports").texts()) == ["one", "three"]


def test_every_corpus_is_listed(source: Path) -> None:
    assert corpus("list").stdout == ""
    corpus("add", source, "--name", "b")
    corpus("add", source / "a.txt", "--name", "a")
    assert corpus("list").stdout == "a: 1 texts, 3 bytes\nb: 2 texts, 8 bytes\n"
    listed = {"corpora": [{"name": "a", "num_texts": 1, "num_bytes": 3}, {"name": "b", "num_texts": 2, "num_bytes": 8}]}
    assert json.loads(corpus("list", "--json").stdout) == listed


def test_a_corpus_is_removed(source: Path) -> None:
    corpus("add", source, "--name", "a")
    assert corpus("remove", "a").stdout == "corpus a removed\n"
    assert corpus("list").stdout == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("remove", "gone"), "no corpus gone"),
        (("add", "/nowhere/at/all"), "nothing at /nowhere/at/all"),
        (("add", ".", "--name", "../x"), "'../x' is no name"),
        (("remove", "../x"), "'../x' is no name"),
    ],
)
def test_what_cannot_be_done_is_an_error_that_names_it(arguments: tuple[str, ...], said: str, data: Path) -> None:
    result = corpus(*arguments)
    assert result.exit_code != 0
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)
    assert not data.exists()


def test_a_file_name_drives_no_terminal(source: Path) -> None:
    (source / "d\x07\x9b.png").write_text("a bell")
    said = corpus("add", source).stderr
    assert "d" in said
    assert not {"\x07", "\x9b"} & set(said)


async def test_an_answer_that_is_in_the_corpus_is_drafted_and_stays_the_targets_own(tmp_path: Path) -> None:
    """Through a hub: greedily what the target says alone, most of it accepted drafts, which a session alone has not."""
    target = tiny_target()
    tokenizer = Tokenizer(target.bundle)
    prompt = tokenizer.encode_text("tell me")
    expected = plain_greedy(target, prompt, 48)
    (tmp_path / "known.txt").write_text(tokenizer.decode(expected), encoding="utf-8")
    (tmp_path / "other.txt").write_text("the road is closed", encoding="utf-8")
    assert corpus("add", tmp_path, "--name", "known").exit_code == 0
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    async with hub_of(target) as hub:
        with_corpus, _ = await generate(hub.address, prompt, params, "suffix:known")
        alone, _ = await generate(hub.address, prompt, params, "suffix")
    assert list(with_corpus.ids) == list(alone.ids) == expected
    assert with_corpus.usage.num_accepted > alone.usage.num_accepted


async def test_sampling_from_a_corpus_changes_nothing(source: Path) -> None:
    """The same seed, with a drafter and without: the same ids."""
    target = tiny_target()
    corpus("add", source)
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, seed=3)
    async with hub_of(target) as hub:
        drafted, _ = await generate(hub.address, "one three one", params, "suffix:default")
        plain, _ = await generate(hub.address, "one three one", params, None)
    assert drafted.usage.num_verified > 0
    assert drafted.ids == plain.ids
