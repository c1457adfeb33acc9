"""Models as ordered lists of named blocks, the registry that finds them by name, and their summaries and timings.

Layers and initialization are in `layers`; loading weights, devices, number formats and distribution are elsewhere.
"""
