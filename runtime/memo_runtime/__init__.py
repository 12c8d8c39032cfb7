"""Runs a planned step: arena, leases, streams, executor. Imports torch only."""
