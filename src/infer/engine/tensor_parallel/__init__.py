"""One model in several processes, of which each computes a part of every layer.

Rank 0 has the engine and samples. The other ranks run the same steps with their shares.
"""
