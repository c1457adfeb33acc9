"""American spelling of option names: the British form of every option is a permanent alias."""

import re

_AMERICAN = (
    (re.compile(r"(?<=[a-z]{2}[lmnrtd])is(?=(?:e|ed|er|ing|ation)s?(?:[-_]|$))"), "iz"),
    (re.compile(r"analys(?=e)"), "analyz"),
    (re.compile(r"colour"), "color"),
    (re.compile(r"grey"), "gray"),
    (re.compile(r"centre"), "center"),
    (re.compile(r"licence"), "license"),
    (re.compile(r"catalogue"), "catalog"),
)


def canonical(name: str) -> str:
    """Return an option name in American spelling."""
    for british, american in _AMERICAN:
        name = british.sub(american, name)
    return name
