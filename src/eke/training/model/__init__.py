"""Model: construction, attention, adapters, loss, precision, compilation."""
