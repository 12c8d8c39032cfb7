"""Plan -> table, HTML, Chrome trace, memory snapshot."""
