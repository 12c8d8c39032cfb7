"""Lynx's programs (arXiv 2406.08756): recomputation overlapped with communication."""
