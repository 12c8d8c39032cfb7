"""Reads a graph: lifetimes, layers that repeat, the token dimension, what may be recomputed."""
