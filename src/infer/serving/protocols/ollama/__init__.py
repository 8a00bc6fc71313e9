"""Ollama's API: its bodies, and how they become bodies of OpenAI's routes."""
