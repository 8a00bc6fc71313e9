"""Experts on the CPU: `commands` appends what a layer of experts needs, `kernels` has the compiled functions."""
