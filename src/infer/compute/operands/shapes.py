"""The type of the shapes of a network's tensors, by the tensors' names."""

Shapes = dict[str, tuple[int, ...]]  # tensor name → shape
