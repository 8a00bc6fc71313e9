"""`infer serve`: an HTTP server over `AsyncLLM` that speaks OpenAI's API.

Only `cli.servers` and `serving.distributed` import it.
"""
