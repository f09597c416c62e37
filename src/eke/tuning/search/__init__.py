"""Search for the fastest configuration that fits: candidates, search and report, without torch."""
