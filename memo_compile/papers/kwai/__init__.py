"""Kwai (USENIX ATC 24): pipeline schedules, memory of each rank, balanced checkpointing."""
