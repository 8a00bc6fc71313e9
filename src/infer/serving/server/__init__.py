"""`infer serve`: an HTTP server over `AsyncLLM` that speaks OpenAI's API. Only `cli` and `distributed` import it."""
