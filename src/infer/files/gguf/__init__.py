"""GGUF files: read, written, and described under the names of Hugging Face's config."""
