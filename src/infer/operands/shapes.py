"""The shapes of a network's tensors."""

Shapes = dict[str, tuple[int, ...]]  # tensor name → shape
