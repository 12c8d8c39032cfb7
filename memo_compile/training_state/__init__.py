"""Optimizer state on the host: ``memo_compile.offload``."""
