"""Tokenizers: exact bytes of every id, plain text encoding, prompts. No JAX here."""
