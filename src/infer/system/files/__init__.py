"""Files of others and of our own: read within limits, written as a whole, trusted or not."""
