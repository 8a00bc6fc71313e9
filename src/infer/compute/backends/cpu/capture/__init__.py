"""Record a step once and replay it many times: `forward` as a table of commands, `sampled` with the sampler."""
