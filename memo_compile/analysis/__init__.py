"""Joint graph -> facts: lifetimes, repeating layers, token dimension."""
