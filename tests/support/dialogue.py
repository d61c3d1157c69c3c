"""A node and a hub talking without a network: the real chain, mailbox and session, and frames that wait in two queues.

Who gets when to act is up to the test, so drafts can be late, overtaken, or void before they are sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from baru_common.drafters import DraftStream
from baru_common.frames import Draft, Verdict
from baru_common.sampling import SamplingContext
from baru_hub.acceptance import Decision
from baru_hub.mailbox import Mailbox
from baru_hub.session import Block, Session
from baru_micro.chain import DraftChain, Outcome

Act = Callable[[], object]


class Dialogue:
    """One generation. `window` is how far ahead the node drafts."""

    def __init__(
        self,
        sampling: SamplingContext,
        prompt: Sequence[int],
        max_tokens: int,
        stream: DraftStream | None = None,
        window: int = 16,
    ) -> None:
        self.chain = DraftChain.start(prompt, epoch=1)
        self.stream = stream
        self.window = window
        self.session = Session(
            session_id="dialogue",
            epoch=1,
            sampling=sampling,
            max_length=len(prompt) + max_tokens,
            mailbox=Mailbox(sampling.vocabulary.size, window),
            has_drafter=stream is not None,
            committed=list(prompt),
        )
        self.to_hub: deque[Draft] = deque()
        self.to_node: deque[Verdict] = deque()
        self.blocks: list[Block] = []
        self.verdicts: list[Verdict] = []
        self.outcomes: list[Outcome] = []

    @property
    def output(self) -> list[int]:
        return self.session.committed[self.session.num_prompt :]

    @property
    def done(self) -> bool:
        return self.session.finish is not None

    # -- the node

    def draft(self, max_tokens: int, meanwhile: Act = lambda: None) -> None:
        """Propose once and send it, unless what happens `meanwhile` makes it void; see `Generation._next_draft`."""
        chain = self.chain
        room = min(self.window - chain.ahead, self.session.max_length - 1 - len(chain.ids), max_tokens)
        if self.stream is None or room <= 0:
            meanwhile()
            return
        version = chain.version
        proposed = self.stream.propose(list(chain.ids), chain.num_committed, room)
        assert len(proposed.ids) <= room
        meanwhile()
        if chain.version == version and (proposed.ids or chain.wants_answer):
            self.to_hub.append(chain.extend(proposed.ids, proposed.draft_probs))

    def read_verdict(self) -> None:
        """The node takes in the oldest verdict that is under way, if there is one."""
        if self.to_node:
            self.outcomes.append(self.chain.apply(self.to_node.popleft()))

    # -- the hub

    def read_draft(self) -> None:
        """The hub takes in the oldest draft that is under way, if there is one."""
        if self.to_hub:
            self.session.mailbox.put(self.to_hub.popleft(), len(self.session.committed))

    def step(self, decide: Callable[[Block], Decision], depth: int, meanwhile: Act = lambda: None) -> None:
        """Check at most `depth` draft ids. What happens `meanwhile`, happens while the target is at it."""
        block = self.session.next_block(depth, 1 << 20)
        meanwhile()
        self.take(block, decide(block))

    def take(self, block: Block, decision: Decision) -> None:
        """Commit what was decided and send the verdict."""
        if verdict := self.session.take(block, decision):
            self.to_node.append(verdict)
            self.blocks.append(block)
            self.verdicts.append(verdict)
