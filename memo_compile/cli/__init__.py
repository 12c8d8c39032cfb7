"""The `memo` command."""
