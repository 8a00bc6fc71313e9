"""A model's folder as a GGUF file: metadata, tokenizer and tensors, under the names that llama.cpp reads."""
