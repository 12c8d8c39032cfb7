"""PlacementProblem -> Placement: offsets of buffers in an arena."""
