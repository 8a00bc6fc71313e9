"""Text and its forms: tokenizers, chat templates, stop strings, grammars and tool calls."""
