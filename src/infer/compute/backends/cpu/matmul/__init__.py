"""A packed weight times activations, as compiled commands, and the vector instructions of each instruction set."""
