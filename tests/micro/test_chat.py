"""The chat: what is remembered, what is shown, and a real conversation in a real terminal."""

from __future__ import annotations

import asyncio
import json
import re
import stat
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from baru_common.errors import ConfigError, InvalidRequest
from baru_common.frames import FinishReason, Usage
from baru_micro.chat.conversation import STOPPED, Conversation, command
from baru_micro.chat.reply import Reply
from baru_micro.chat.terminal import kept_history
from baru_micro.events import Confirmed, Finish, Kind, LinkChanged, Piece, Provenance, Retracted, Step, StepStats
from baru_micro.link import LinkState
from support.fault_proxy import FaultProxy
from support.faults import Fault
from support.hubs import hub_of
from support.link import scripted_engine
from support.lockstep import free_running
from support.terminal import Terminal, in_terminal


def step(text: str, provenance: Provenance = Provenance.VERIFIED, verified: int = 0, accepted: int = 0) -> Step:
    kind = Kind.PLAIN if provenance is Provenance.VERIFIED else Kind.LOCAL
    pieces = tuple(Piece(number, letter, kind) for number, letter in enumerate(text))
    return Step(0, pieces, provenance, StepStats(verified, accepted, None))


def finish(tail: str) -> Finish:
    return Finish(FinishReason.LENGTH, "", (), (), Usage(*[0] * 9), 1.0, 0.0, None, tail=tail)


# -- what is remembered


def words(messages: Sequence[Mapping[str, object]]) -> int:
    """A count that is easy to check: a token a character."""
    return sum(len(str(message["content"])) for message in messages)


def test_the_oldest_turns_go_first_and_the_system_message_stays() -> None:
    talk = Conversation("sys")
    for number in range(4):
        talk.ask(f"question {number}")
        talk.answer(f"answer {number}")
    talk.ask("last")
    assert talk.fit(words, 1000) == 0
    assert talk.fit(words, 60) == 4
    assert [message["content"] for message in talk.messages] == [
        *("sys", "question 2", "answer 2", "question 3", "answer 3", "last")
    ]
    assert talk.fit(words, 7) == 4


def test_a_question_that_does_not_fit_alone_is_refused_and_costs_nothing_else() -> None:
    talk = Conversation("sys", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    before = talk.messages
    talk.ask("x" * 100)
    with pytest.raises(InvalidRequest, match="at most 50 tokens fit"):
        talk.fit(words, 50)
    assert talk.messages == before


def test_commands_and_lines_that_look_like_them() -> None:
    assert command("/save  a b ") == ("/save", "a b")
    assert command("/help") == ("/help", "")
    assert command("//etc") is None
    assert command("what?") is None


# -- what is shown


def test_a_reply_tells_what_stands_from_what_may_be_withdrawn() -> None:
    reply = Reply()
    reply.take(step("one\ntw", verified=4, accepted=3))
    assert (reply.take_lines(), reply.settled, reply.provisional) == (["one"], "tw", "")
    reply.take(LinkChanged(LinkState.DOWN, "h:1"))
    reply.take(step("o thr", Provenance.PROVISIONAL))
    assert (reply.settled, reply.provisional) == ("tw", "o thr")
    assert reply.status == "no hub, this node alone, provisional | 11 tokens | 75% of drafts accepted"
    reply.take(LinkChanged(LinkState.UP, "h:1"))
    reply.take(Confirmed(6, 8))
    assert (reply.settled, reply.provisional) == ("two ", "thr")
    reply.take(Retracted(8, (2, 3, 4), "thr"))
    reply.take(step("four"))
    assert (reply.whole, reply.provisional, reply.num_retracted) == ("one\ntwo four", "", 3)
    assert reply.status == "hub | 15 tokens, 3 withdrawn | 75% of drafts accepted"


def test_with_keep_all_of_it_stands() -> None:
    reply = Reply(keeps=True)
    reply.take(step("abc", Provenance.PROVISIONAL))
    assert (reply.whole, reply.provisional) == ("abc", "")


def test_what_no_hub_has_confirmed_to_the_end_stays_provisional() -> None:
    reply = Reply()
    reply.take(step("ab"))
    reply.take(step("cd", Provenance.PROVISIONAL))
    reply.take(finish("e"))
    assert (reply.settled, reply.provisional, reply.whole) == ("ab", "cde", "abcde")
    assert "this node alone, provisional" in reply.status


def test_a_history_that_cannot_be_kept_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="what you write cannot be kept") as told:
        kept_history(tmp_path / "file" / "chat_history")
    assert "--no-history" in str(told.value.hint)


# -- a real terminal


def chat(hub: str, data: Path, *options: str) -> AbstractAsyncContextManager[Terminal]:
    program = (sys.executable, "-m", "baru_micro.cli", "chat", "--hub", hub)
    return in_terminal(*program, *options, env={"BARU_DATA_DIR": str(data)})


async def test_a_conversation(tmp_path: Path) -> None:
    """A question and its answer; Ctrl-C in the middle of the next; the link cut, provisional text shown and replaced;
    saved, left."""
    engine = scripted_engine(0.03)
    async with hub_of(engine, scheduler=free_running()) as hub, FaultProxy.open(hub.address) as link:
        options = (
            "--drafter",
            "simulated:0.6",
            "--fallback",
            "local",
            "--max-tokens",
            "150",
            "--set",
            "ignore_eos=true",
        )
        async with chat(link.address, tmp_path, *options) as here:
            await here.until("(?m)^>$")
            here.type("first\r")
            await here.until("last reply: hub . 150 tokens")
            here.type("second\r")
            await here.until(r"(?m)^hub \| [1-9]\d* tokens")
            here.type("\x03")
            await here.until("stopped; what was said so far")
            here.type("third\r")
            await here.until(r"(?m)^hub \| [1-9]\d* tokens")
            await link.apply(Fault.BLACK_HOLE)
            await here.until("this node alone, provisional")
            await asyncio.sleep(0.4)
            await link.heal()
            await here.until(r"last reply: hub \| \d+ tokens, \d+ withdrawn")
            assert re.search(rb"\x1b\[[0-9;]*2;3;33m", here.written)  # shown as provisional
            assert "provisional" not in here.text
            saved = tmp_path / "talk.json"
            here.type(f"/save {saved}\r")
            await here.until("saved to")
            here.type("/quit\r")
            assert await asyncio.wait_for(here.process.wait(), 20) == 0
    turns = json.loads(saved.read_text())["messages"]
    assert [turn["content"] for turn in turns[::2]] == ["first", "second", "third"]
    first, second, third = (turn["content"] for turn in turns[1::2])
    assert len(first) == len(third) == 150
    assert second.endswith(STOPPED)
    assert 0 < len(second) < 150
    history = tmp_path / "chat_history"
    assert "second" in history.read_text()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert not hub.verifier.num_sessions


async def test_what_goes_wrong_costs_no_more_than_it_must(tmp_path: Path) -> None:
    """Ctrl-C while a question is still being made ready; a hub that takes short prompts only; one that is lost."""
    options = ("--drafter", "simulated:0.6", "--fallback", "fail", "--max-tokens", "40", "--set", "ignore_eos=true")
    engine = scripted_engine(0.03)
    async with (
        hub_of(engine, scheduler=free_running(), max_prompt_tokens=65) as hub,
        FaultProxy.open(hub.address) as link,
        chat(link.address, tmp_path, *options) as here,
    ):
        await here.until("(?m)^>$")
        here.type("first\r")
        await here.until_cooked()
        while "stopped; what was said so far" not in here.text:
            here.type("\x03")
            await asyncio.sleep(0.02)
            assert here.process.returncode is None
        for question in ("second", "third"):
            here.type(f"{question}\r")
            await here.until(rf"{question}[^>]*>\n[^>]*last reply: hub . 40 tokens")
        assert re.search(r"the oldest [24] turns do not fit any more", here.text)
        here.type("fourth\r")
        await here.until(r"(?m)^hub \| [1-9]\d* tokens")
        await link.apply(Fault.RST)
        await here.until("(?s)error: .*what was said so far is remembered")
        here.type("/stats\r")
        await here.until("the last reply did not end")
        here.type(f"/save {tmp_path / 'talk.json'}\r")
        await here.until("saved to")
    *_, fourth, partial = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert fourth["content"] == "fourth"
    assert len(STOPPED) < len(partial["content"]) < 40 + len(STOPPED)
    assert partial["content"].endswith(STOPPED)


async def test_into_a_pipe_it_does_not_talk(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "baru_micro.cli", "chat"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert (process.returncode, out) == (1, b"")
    assert b"chat needs a terminal" in err
