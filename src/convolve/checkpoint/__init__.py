"""Checkpoints: what a run writes down so that it can go on, be validated and be used, and how that survives any damage.

`snapshot` holds the content, `manifest` proves that files are whole, `disk` makes writes last, `store` keeps one run's
checkpoints in order, and `failpoint` lets a test kill the process at each stage of a save.
"""
