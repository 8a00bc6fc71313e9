"""Arithmetic and its memory: operations, operands, caches, sampling, quantisation, and backends."""
