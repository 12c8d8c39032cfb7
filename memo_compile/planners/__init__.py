"""Decides what is kept, offloaded or recomputed, and places every buffer. No torch."""
