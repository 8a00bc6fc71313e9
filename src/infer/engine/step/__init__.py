"""The engine's step: sequences, their slots, and the plan, the masks and the end of each step."""
