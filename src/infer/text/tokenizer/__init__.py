"""Text ↔ token ids: tokenizers, the streaming detokenizer and stop strings."""

from infer.text.tokenizer.detokenizer import Detokenizer
from infer.text.tokenizer.stop_strings import StopResult, StopStrings
from infer.text.tokenizer.tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopResult", "StopStrings", "Tokenizer"]
