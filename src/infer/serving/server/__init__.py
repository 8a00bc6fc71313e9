"""`infer serve`: an HTTP server over `AsyncLLM` that speaks OpenAI's API.

Only `cli.commands` and `serving.distributed` import it.
"""
