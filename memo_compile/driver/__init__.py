"""Turns a captured step into one that runs: cut, lower, decide, place, check, bind."""
