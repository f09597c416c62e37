"""JSON schemas of the option files, so that editors complete, check and explain them."""
