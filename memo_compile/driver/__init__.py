"""From a captured step to a running one: cut, lower, decide, place, check, bind."""
