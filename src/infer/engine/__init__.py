"""The engine of a loaded model and what feeds it: requests, sessions, whole texts, steps, drafts and ranks."""
