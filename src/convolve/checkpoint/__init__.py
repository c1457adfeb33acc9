"""Checkpoints: crash-safe snapshots of a run, to resume, validate and use it.

`snapshot` has the content, `manifest` detects damage, `store` saves and prunes the checkpoints of a run. `averaging`
averages checkpoints, `pretrained` loads weights of other runs and libraries, `convert` turns pickles into safetensors.
"""
