"""What hub and node share: words, numbers, tokens, frames and drafters."""

__version__ = "0.1.0"
