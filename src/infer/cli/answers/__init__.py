"""Commands that answer: generate, batch, embed, rerank, classify, sample-trace and replay."""
