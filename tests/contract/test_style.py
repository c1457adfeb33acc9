"""The shape and the vocabulary of the tree: size limits, and a short list of words that the field does not use."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "convolve").rglob("*.py"))
TEXTS = [
    *SOURCES,
    *sorted((ROOT / "src" / "convolve").rglob("*.[ch]")),
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")),
]
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_ARGUMENTS = 400, 50, 7

# Words of an earlier private dialect, and the spelling that is not used here.
BANNED = {
    "somebody": r"\b(?:some|no|every|any)body\b|\bwhoever\b",
    "told, tells": r"\b(?:told|tells)\b",
    "settle": r"\bsettle[sd]?\b|_settle\b|\bsettle_",
    "verdict": r"(?<!\")[Vv]erdict",  # a key of `align --json` keeps the name
    "rhythm": r"[Rr]hythm",
    "tally": r"\b[Tt]all(?:y|ies)\b",
    "knob": r"\bknobs?\b",
    "mend": r"\bmend(?:s|ed)?\b",
    "goes on": r"\b(?:goes|go|went) on\b",
    "the own": r"\bthe own\b",
    "of its own": r"\bof (?:its|their) own\b",
    "left out": r"\b(?:left|leaves?) out\b",
    "adds up": r"\badd(?:s|ed)? up\b",
    "came to": r"\bcame to\b",
    "rooms and floors": r"\b(?:rooms|floors)\b",
    "British spelling": (
        r"(?:optimis|normalis|initialis|synchronis|quantis|recognis)(?:e|er|ing|ation)\b"
        r"|\bcolours?\b|\bgrey\b|\bcentred?\b|neighbour|behaviour"
    ),
}
# British names are aliases of options, and keys that `--json` printed before.
SPELLING_EXAMPLES = {
    "config/spelling.py",
    "config/loading.py",
    "data/check.py",
    "planning/memory.py",
    "cli/plan.py",
    "docs/migrating.md",
}


def function_lengths(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            count = len([argument for argument in named if argument.arg not in ("self", "cls")])
            yield node.name, node.end_lineno - node.lineno + 1, count


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_files_and_functions_stay_within_their_limits(file):
    text = file.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_FILE_LINES
    for name, lines, arguments in function_lengths(ast.parse(text)):
        assert lines <= MAX_FUNCTION_LINES, name
        assert arguments <= MAX_ARGUMENTS, name


@pytest.mark.parametrize("file", TEXTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_tree_uses_the_words_of_the_field(file):
    lines = file.read_text(encoding="utf-8").splitlines()
    found = [
        f"{number}: {word}: {line.strip()[:100]}"
        for number, line in enumerate(lines, 1)
        for word, pattern in BANNED.items()
        if re.search(pattern, line) and not (word == "British spelling" and is_example(file))
    ]
    assert not found


def is_example(file: Path) -> bool:
    return any(file.as_posix().endswith(name) for name in SPELLING_EXAMPLES)


def test_the_patterns_match_forbidden_text():
    examples = (
        "nobody whoever told tells settle settled verdict rhythm tally knob mend goes on the own of its own left out "
        "adds up came to rooms optimiser grey"
    )
    assert all(re.search(pattern, examples) for pattern in BANNED.values())
