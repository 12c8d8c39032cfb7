"""GraphModule + Plan -> GraphModule; runner.py is the one runner."""
