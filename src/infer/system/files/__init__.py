"""Files and JSON from others and of our own: limits, checks, whole writes, trust."""
