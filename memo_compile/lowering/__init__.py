"""A region of the step as code: through Inductor, or operator by operator."""
