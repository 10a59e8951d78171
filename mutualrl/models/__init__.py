"""Flax decoders of Hugging Face model families: one decoder, one table of families, weights in and out."""
