"""Record a step once and replay it many times: `cpu` as a dispatch table."""
