"""The step as data: problem, plan, program, simulated time, JSON. No torch."""
