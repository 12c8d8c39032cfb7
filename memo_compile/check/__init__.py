"""The independent checker: it shares the step's data with the planners, and nothing else."""
