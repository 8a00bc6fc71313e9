"""OpenAI's Responses API: how older turns and bodies become requests."""
