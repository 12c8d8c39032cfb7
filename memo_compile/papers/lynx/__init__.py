"""Lynx's programs (arXiv 2406.08756): recomputation overlapped with communication.

``heu`` plans one layer of a pipeline stage, ``opt`` a whole small graph; ``replay`` executes each
solution again without knowing the programs; ``partition`` splits layers over stages.
"""
