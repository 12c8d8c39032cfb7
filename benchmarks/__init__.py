"""Scripts that measure memo beside its peers and print the ratio."""
