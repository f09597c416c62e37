"""Observation: settings and measurements read from the running objects into the record."""
