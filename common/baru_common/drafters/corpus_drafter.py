"""Suffix decoding from a corpus of the node, which may change while the node runs."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from baru_common.corpus import Corpus
from baru_common.errors import ConfigError
from baru_common.sampling import SamplingContext
from baru_common.tokens import Tokenizer

from .suffix import SuffixDrafter, SuffixStream
from .suffix_index import SuffixIndex

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CorpusDrafter:
    """A corpus, to be bound to a target's tokenizer."""

    corpus: Corpus
    shortest: int = 1
    """As in `SuffixDrafter`."""

    def __post_init__(self) -> None:
        if not self.corpus.version:
            raise ConfigError(
                f"corpus {self.corpus.name} is empty", hint=f"baru-micro corpus add DIR --name {self.corpus.name}"
            )

    def bound(self, tokenizer: Tokenizer) -> BoundCorpusDrafter:
        """See `TextDrafter`; ConfigError for a text that cannot be read."""
        try:
            return BoundCorpusDrafter(self.corpus, tokenizer, self.shortest)
        except (OSError, UnicodeDecodeError) as error:
            message = f"corpus {self.corpus.name} cannot be read: {error}"
            raise ConfigError(message, hint="add its texts anew") from error


class BoundCorpusDrafter:
    """Drafts from the corpus as it was when a session began.

    A session that finds it changed sets off its reading in a thread; those that begin after that use what was read.
    """

    family = SuffixDrafter.family
    vocabulary = None
    tokens_per_call = SuffixDrafter.tokens_per_call
    blocking = SuffixDrafter.blocking

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, shortest: int = 1) -> None:
        self._corpus = corpus
        self._tokenizer = tokenizer
        self._shortest = shortest
        self._reading = threading.Lock()
        self._version = corpus.version
        self._drafter = self._read()

    def start(self, sampling: SamplingContext | None = None) -> SuffixStream:
        """See `Drafter.start`."""
        if self._has_changed and self._reading.acquire(blocking=False):
            threading.Thread(target=self._read_again, name="baru-corpus", daemon=True).start()
        return self._drafter.start(sampling)

    @property
    def _has_changed(self) -> bool:
        try:
            return self._corpus.version != self._version
        except OSError:  # it is being removed: what was read serves on
            return False

    def _read(self) -> SuffixDrafter:
        start_s = time.monotonic()
        index = SuffixIndex(self._tokenizer.encode_inside(text) for text in self._corpus.texts())
        elapsed_s = time.monotonic() - start_s
        _log.info("corpus %s: %d ids read in %.1f s", self._corpus.name, index.num_ids, elapsed_s)
        return SuffixDrafter(index, shortest=self._shortest)

    def _read_again(self) -> None:
        try:
            version = self._corpus.version
            self._drafter = self._read()  # one assignment: sessions see the old index or the new one
            self._version = version
        except (OSError, UnicodeDecodeError) as error:  # a text went while it was read: the next session tries again
            _log.warning("corpus %s could not be read again: %s", self._corpus.name, error)
        finally:
            self._reading.release()
