"""Child processes that run convolve's own modules, and never code from the current folder.

`python -m` puts the current folder first on the import path, so a file `json.py` next to a downloaded `model.pth` would
be executed. Isolated mode (`-I`) does not, but it also ignores PYTHONPATH and the user's site-packages. The command
here starts in isolated mode and then adds exactly the folders that this process may import from.
"""

import os
import site
import sys
from pathlib import Path


def import_roots() -> list[str]:
    """Return the folders a child may import from besides the interpreter's own: convolve, PYTHONPATH, user packages.

    Relative entries mean the current folder at best, so they are dropped.
    """
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    roots = [str(Path(__file__).parents[1]), *(entry for entry in named if os.path.isabs(entry)), *user]
    return list(dict.fromkeys(roots))


def code_arguments(code: str, *arguments: str) -> list[str]:
    """Return interpreter arguments that run a piece of code as `python -c` would, without the current folder."""
    return ["-I", "-c", f"import sys; sys.path[:0] = {import_roots()!r}\n{code}", *arguments]


def module_arguments(module: str, *arguments: str) -> list[str]:
    """Return interpreter arguments that run a module as `python -m` would, without the current folder."""
    code = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return code_arguments(code, *arguments)


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with this interpreter."""
    return [sys.executable, *module_arguments(module, *arguments)]
