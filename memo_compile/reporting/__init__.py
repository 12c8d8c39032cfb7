"""Shows a plan: table, HTML page, Chrome trace, memory snapshot."""
