"""The command line: verbs and flags, tables, progress, one-line errors. No logic."""
