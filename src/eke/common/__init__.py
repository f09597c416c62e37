"""Common helpers: errors, files, paths, text and process environments."""
