"""From a captured step to a running one: lower, decide, place, check, bind."""
