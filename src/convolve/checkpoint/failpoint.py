"""A place at each stage of a save where a test can kill the process.

With the environment variable `CONVOLVE_FAILPOINT=<stage>` the process sends itself SIGKILL the first time that stage is
reached, so that nothing can be tidied up, as with a power cut or an out-of-memory kill. Without it nothing happens. The
stages, in the order in which a save meets them:

    temp-made                   the private folder exists, it is empty
    wrote:<file>                a file has its bytes, not yet fsynced; once for each file, manifest.json last
    synced:<file>               the same file after fsync
    temp-synced                 the private folder is complete and fsynced, not yet renamed
    set-aside                   only when a step is replaced: the old folder has moved away
    renamed                     the new folder has its final name, the parent is not yet fsynced
    parent-synced               the rename will last
    verified                    the new checkpoint was read back and is whole, nothing is pruned yet
    withdrawn                   a folder to be removed has lost its name
    half-removed                some of its files are gone
    removed                     all of it is gone
    best-renamed                the mark of the best checkpoint is in place (wrote: and synced:best.txt come before)
"""

import os
import signal

VARIABLE = "CONVOLVE_FAILPOINT"


def failpoint(stage: str) -> None:
    """Kill this process if the environment asks for it at this stage."""
    if os.environ.get(VARIABLE) == stage:
        os.kill(os.getpid(), signal.SIGKILL)
