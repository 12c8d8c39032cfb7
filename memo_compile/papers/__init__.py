"""Planners as the papers print them. No compile uses what is here."""
