"""One model in several processes.

Rank 0 has the engine and samples. The other ranks run the same steps with their shares.
"""
