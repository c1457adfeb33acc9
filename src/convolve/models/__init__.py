"""Networks as ordered lists of named blocks, their initial weights, and the randomness inside them.

What lives here: architectures, the registry that finds them by name, keyed initialization and keyed dropout. What does
not: loading weights from files, moving a network to a device, number formats and the splitting over devices.
"""
