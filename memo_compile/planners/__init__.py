"""Problem -> Plan. No torch here."""
