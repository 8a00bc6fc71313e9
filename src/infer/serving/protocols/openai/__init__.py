"""OpenAI's completions of conversations and of texts."""
