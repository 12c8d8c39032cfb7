"""The ``memo`` command."""
