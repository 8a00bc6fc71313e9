"""`infer serve`: an HTTP server over `AsyncLLM` that speaks OpenAI's API. Nothing else imports it but `cli/serve`."""
