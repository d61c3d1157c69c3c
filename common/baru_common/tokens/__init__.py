"""Text to ids and back: the tokenizer bundle, the id -> bytes map, chat prompts, streamed text."""

from .bundle import TokenizerBundle
from .stops import StopScanner
from .stream import TextStream
from .tokenizer import Message, Tokenizer
from .vocabulary import Vocabulary

__all__ = ["Message", "StopScanner", "TextStream", "Tokenizer", "TokenizerBundle", "Vocabulary"]
