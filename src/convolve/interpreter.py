"""Child interpreters that never execute code from the current folder.

`python -m` and `python -c` put the current folder first on the import path, so a file `json.py` next to a downloaded
`model.pth` would be executed. The arguments here drop every relative entry of the path before anything is imported;
PYTHONPATH and installed packages stay. They hold no path of this machine, so they also work on other hosts.
"""

import os
import site
import sys
from pathlib import Path

# Both modules are loaded before the interpreter looks at its arguments, so this imports nothing from the path.
_PRELUDE = "import os, sys; sys.path[:] = filter(os.path.isabs, sys.path)"


def code_arguments(code: str, *arguments: str) -> list[str]:
    """Return interpreter arguments that run a piece of code as `python -c` would, without the current folder."""
    return ["-c", f"{_PRELUDE}\n{code}", *arguments]


def module_arguments(module: str, *arguments: str) -> list[str]:
    """Return interpreter arguments that run a module as `python -m` would, without the current folder."""
    code = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return code_arguments(code, *arguments)


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with this interpreter."""
    return [sys.executable, *module_arguments(module, *arguments)]


def import_roots() -> list[str]:
    """Return where a child with an empty environment finds convolve, PYTHONPATH and the user's packages."""
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    roots = [str(Path(__file__).parents[1]), *(entry for entry in named if os.path.isabs(entry)), *user]
    return list(dict.fromkeys(roots))
