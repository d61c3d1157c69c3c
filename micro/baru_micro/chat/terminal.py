"""The conversation at a terminal: reading lines, showing replies."""

from __future__ import annotations

import asyncio
import signal
from contextlib import aclosing
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from baru_common.cli_support import harmless
from baru_common.errors import BaruError, ConfigError
from baru_common.sampling import SamplingParams
from baru_micro.client import MicroNode
from baru_micro.decoding import Reconcile
from baru_micro.reader import summary

from .conversation import HELP, KEYS, Conversation, command
from .reply import Reply

_PROVISIONAL = "italic dim yellow"
_REFRESH_PER_S = 12


class Chat:
    """One conversation with one node."""

    def __init__(
        self,
        node: MicroNode,
        params: SamplingParams,
        conversation: Conversation,
        *,
        reconcile: Reconcile,
        history: Path | None,
        console: Console | None = None,
    ) -> None:
        """`history`: file to keep what was written in, for the arrow keys; None: none."""
        self._node, self._params, self._conversation = node, params, conversation
        self._reconcile = reconcile
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._last = Reply()
        self._stop = asyncio.Event()
        self._session: PromptSession[str] = PromptSession(
            history=kept_history(history), multiline=True, key_bindings=_keys(), bottom_toolbar=self._toolbar
        )

    async def run(self) -> None:
        """Talk until the person leaves."""
        self._say(f"{self._node.hub.target_name}. /help for help, Ctrl-D leaves.")
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._stop.set)  # at no moment does Ctrl-C end the conversation
        try:
            while await self._turn():
                pass
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    async def _turn(self) -> bool:
        """Read a line and do what it says; False: leave."""
        try:
            line = await self._session.prompt_async("> ", handle_sigint=False)
        except KeyboardInterrupt:  # the key: the line is given up, not the conversation
            return True
        except EOFError:
            return False
        if not line.strip():
            return True
        if asked := command(line):
            return self._obey(*asked)
        await self._answer(line.removeprefix("/") if line.startswith("//") else line)
        return True

    def _toolbar(self) -> FormattedText:
        link = self._node.link
        round_trip = "" if link.round_trip_s is None else f", {1e3 * link.round_trip_s:.0f} ms"
        last = f" | last reply: {self._last.status}" if self._last.num_tokens else ""
        return FormattedText([("", harmless(f" link {link.state.value}{round_trip}{last}"))])

    # -- replies

    async def _answer(self, text: str) -> None:
        conversation, reply = self._conversation, Reply(keeps=self._reconcile is Reconcile.KEEP)
        self._stop.clear()
        conversation.ask(text)
        try:
            self._make_room()
            stopped = await self._show(reply)
        except BaruError as error:
            self._say(f"error: {error.message}" + (f"; {error.hint}" if error.hint else ""), "red")
            if not reply.whole:
                conversation.take_back()
                return
            stopped = True
        if stopped:
            rest = "; what was provisional is withdrawn" if reply.provisional else ""
            self._say(f"stopped; what was said so far is remembered as such{rest}")
        self._last = reply
        conversation.answer(reply.whole, stopped=stopped)

    def _make_room(self) -> None:
        """Half of the context at least is for what was said."""
        limit = self._node.hub.context_limit
        reserved = min(self._params.max_tokens or limit // 2, limit // 2)
        room = min(limit - reserved, self._node.hub.limits.max_prompt_tokens)
        encode = self._node.tokenizer.encode_chat
        if num_dropped := self._conversation.fit(lambda messages: len(encode(messages)), room):
            self._say(f"the oldest {num_dropped} turns do not fit any more and were left out")

    async def _show(self, reply: Reply) -> bool:
        """Stream one reply; return whether the person stopped it."""
        task = asyncio.ensure_future(self._follow(reply))
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
                return False
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return True
        finally:
            for each in (task, stopping):
                each.cancel()

    async def _follow(self, reply: Reply) -> None:
        events = self._node.generate(self._conversation.messages, self._params, reconcile=self._reconcile)
        live = Live(console=self._console, refresh_per_second=_REFRESH_PER_S, transient=True)
        try:
            with live:
                async with aclosing(events):
                    async for event in events:
                        reply.take(event)
                        for line in reply.take_lines():
                            live.console.print(Text(harmless(line)))
                        live.update(self._growing(reply))
        finally:
            self._show_rest(reply)

    def _show_rest(self, reply: Reply) -> None:
        """The last line; and what no hub has confirmed, if the reply ended without one."""
        unconfirmed = reply.provisional if reply.finish else ""
        if reply.settled or unconfirmed:
            self._console.print(Text.assemble(harmless(reply.settled), (harmless(unconfirmed), _PROVISIONAL)))
        if unconfirmed:
            self._say("no hub answered to the end: this node's own text, unconfirmed, is in italics")

    def _growing(self, reply: Reply) -> Group:
        """The line that is being written, what is provisional, and the status; never taller than the screen."""
        body = Text.assemble(harmless(reply.settled), (harmless(reply.provisional), _PROVISIONAL))
        width, height = self._console.width, max(self._console.height - 3, 1)
        lines = body.wrap(self._console, width)
        shown = [Text("..."), *lines[len(lines) - height + 1 :]] if len(lines) > height else list(lines)
        return Group(*shown, Text(harmless(reply.status), "reverse"))

    # -- commands

    def _obey(self, name: str, rest: str) -> bool:
        """Do what a command says; False: leave."""
        if name in ("/quit", "/exit"):
            return False
        if name == "/clear":
            self._conversation.clear()
            self._say("forgotten")
        elif name == "/system":
            self._conversation.system = rest or None
            self._say("the system message is set" if rest else "there is no system message")
        elif name == "/save":
            self._save(rest)
        elif name == "/stats":
            self._show_stats()
        else:
            known = "" if name == "/help" else f"{name} is no command\n"
            self._say(known + "\n".join(f"{each:14} {what}" for each, what in HELP.items()) + f"\n{KEYS}")
        return True

    def _save(self, name: str) -> None:
        if not name:
            self._say("say where: /save FILE", "red")
            return
        try:
            with Path(name).expanduser().open("x", encoding="utf-8") as file:
                file.write(self._conversation.to_json())
            self._say(f"saved to {name}")
        except OSError as error:
            self._say(f"not saved: {error.strerror}", "red")

    def _show_stats(self) -> None:
        if self._last.finish is None:
            ran = self._last.num_tokens
            self._say(f"the last reply did not end: {self._last.status}" if ran else "there is no reply yet")
            return
        shown = ("tokens_per_s", "mean_accepted_length", "acceptance_rate", "round_trip_ms", "time_to_first_token_s")
        figures = summary(self._last.finish)
        self._say("\n".join(f"{name:24} {figures[name]}" for name in (*shown, "verified")))

    def _say(self, text: str, style: str = "dim") -> None:
        self._console.print(Text(harmless(text), style))


def kept_history(path: Path | None) -> History:
    """Return what was written before, in a file for its owner only; ConfigError if there can be none."""
    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.chmod(0o600)
    except OSError as error:
        raise ConfigError(f"what you write cannot be kept: {error}", hint="use --no-history") from error
    return FileHistory(path)


def _keys() -> KeyBindings:
    """Enter sends; Alt-Enter, or Ctrl-J, begins a new line."""
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
