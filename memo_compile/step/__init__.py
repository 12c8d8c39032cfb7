"""The step as data: problem, plan, moves, residency, simulated time, text, JSON. No torch here."""
