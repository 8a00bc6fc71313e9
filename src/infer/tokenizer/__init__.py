"""Text ↔ token ids: the tokenizer, the streaming detokenizer, chat templates and stop strings."""

from infer.tokenizer.detokenizer import Detokenizer
from infer.tokenizer.stop_strings import StopResult, StopStrings
from infer.tokenizer.tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopResult", "StopStrings", "Tokenizer"]
