"""Tokenizers fetched from hubs, kept by digest."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from baru_common.errors import TokenizerMismatch
from baru_common.folders import cache_folder
from baru_common.tokens import TokenizerBundle
from baru_common.whole_files import write_atomically

_log = logging.getLogger(__name__)


async def cached_bundle(digest: bytes, fetch: Callable[[bytes], Awaitable[TokenizerBundle]]) -> TokenizerBundle:
    """Return the bundle with this digest from the cache, or fetch and keep it.

    A damaged file is fetched again; a cache that cannot be written is no error.
    """
    path = cache_folder() / "tokenizers" / f"{digest.hex()}.json"
    try:
        return TokenizerBundle.from_bytes(path.read_bytes(), digest)
    except (OSError, TokenizerMismatch):
        bundle = await fetch(digest)
    try:
        write_atomically(path, bundle.data)
    except OSError as error:
        _log.warning("the tokenizer cannot be kept in %s: %s", path.parent, error)
    return bundle
