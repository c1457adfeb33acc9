"""One file per verb: each takes what the user asked for and returns a report. No argument parsing, no printing."""
