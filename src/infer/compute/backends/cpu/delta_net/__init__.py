"""Gated delta nets: the convolution and the recurrence over pages."""
