"""Runs in several processes: topology, collectives, gradient sync, pipeline and launchers."""
