"""What a run writes for people and tools: records, log files, the run folder, figures with their units, and curves.

`records` names what is measured, `writers` and `services` put it where it is read, `lines` keeps text files whole,
`tables` makes the files of a restored run read like those of an unbroken one, `folder` claims the run folder,
`throughput` and `summary` make the figures, `curves` draws them. Nothing here knows how training works.
"""
