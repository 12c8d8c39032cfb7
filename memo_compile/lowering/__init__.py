"""Makes code of a region of the step: through Inductor, or operator by operator."""
