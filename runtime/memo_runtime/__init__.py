"""Arena, leases, streams and the executor of step programs. Imports torch only."""
