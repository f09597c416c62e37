"""Batches: samples, tokens, collation, transfer to the device."""
