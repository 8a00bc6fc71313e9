"""The protocols of other programs: bodies that they send, and answers and events that they read."""
