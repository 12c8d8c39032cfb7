"""Away from the training run: plans of steps that never run, records of those that do."""
