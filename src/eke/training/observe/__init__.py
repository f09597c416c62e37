"""Observation: what is read from the running objects into the record."""
