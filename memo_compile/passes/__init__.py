"""Rewrites of graphs, a file each; runner.py runs them."""
