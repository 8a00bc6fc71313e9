"""OpenAI's Responses API: how its bodies become requests."""
