"""GraphModule + Plan -> GraphModule; pipeline.py is the one runner."""
