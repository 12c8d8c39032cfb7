"""MEMO (arXiv 2407.12117) in closed form: alpha."""
