"""Plans steps that never run, for devices that are not here."""
