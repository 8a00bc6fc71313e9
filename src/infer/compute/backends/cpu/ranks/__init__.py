"""Exchange of activations between the ranks of one machine, through shared memory."""
