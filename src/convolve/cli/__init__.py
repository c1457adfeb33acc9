"""Command line: one module per command, with options, tables and progress. No logic."""
