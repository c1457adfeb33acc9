"""Launchers: processes of this host, other hosts through ssh, and Slurm."""
