"""Helpers without knowledge of runs: errors, files, paths, output, text, process environments.

Begin with `errors` (problems and their fixes), `files` (atomic writes) and `paths` (run folders).
"""
