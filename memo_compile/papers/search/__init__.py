"""Configuration search: enumerate, evaluate with numpy, rank; and calibrate the cost model."""
