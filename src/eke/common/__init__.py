"""Common helpers: errors, files, paths, text, environment of processes."""
