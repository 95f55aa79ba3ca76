"""Count the code: `make size` prints lines per room, the longest files and functions, and what
changed since another commit. tests/house/test_house.py holds the budgets below.

A code line is a line that is not blank, a comment or part of a docstring.
"""

import argparse
import ast
import io
import pathlib
import subprocess
import tokenize

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = "src/fedgrad"
LONGEST_FILE, LONGEST_FUNCTION = 350, 70  # lines of a file, code lines of a function

# Code lines that each room may have. Raise a row in the commit that needs it, and say there why;
# lower it when a room shrinks. "." is what stands beside the rooms.
BUDGETS: dict[str, int] = {
    ".": 207,
    "ad": 1303,
    "aggregate": 129,
    "algorithms": 1934,
    "cli": 912,
    "clients": 1277,
    "core": 2029,
    "execution": 1115,
    "federation": 4600,
    "planning": 615,
    "pytorch": 2217,
    "reports": 1433,
    "show": 1444,
    "tasks": 1990,
    "training": 3046,
    "tuning": 1666,
}

SKIPPED = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def code_lines(text):
    """Return the numbers of the lines that are code."""
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and body:
            first = body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                if isinstance(first.value.value, str):
                    docstrings |= {*range(first.lineno, first.end_lineno + 1)}
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SKIPPED:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    return lines - docstrings


def function_lengths(text):
    """Yield the name and the number of code lines of each function, nested ones included."""
    code = code_lines(text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            yield node.name, len(code & {*range(node.lineno, node.end_lineno + 1)})


def sources(folder=PACKAGE):
    """Return the text of every Python file below a folder of the working tree, by path."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


def sources_at(commit, folder=PACKAGE):
    """Return the same, as they are in a commit."""
    listed = _git("ls-tree", "-r", "--name-only", commit, folder).splitlines()
    return {path: _git("show", f"{commit}:{path}") for path in listed if path.endswith(".py")}


def room_of(path, folder=PACKAGE):
    """Return the first folder below the package, or "." for a file beside the rooms."""
    parts = pathlib.PurePath(path).relative_to(folder).parts
    return parts[0] if len(parts) > 1 else "."


def room_sizes(texts):
    """Return the number of code lines of each room."""
    sizes: dict[str, int] = {}
    for path, text in texts.items():
        sizes[room_of(path)] = sizes.get(room_of(path), 0) + len(code_lines(text))
    return sizes


def _git(*command):
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def main():
    parser = argparse.ArgumentParser(description="Count the code of the package and of the tests.")
    parser.add_argument("--since", default="main", help="a commit to compare with (main)")
    parser.add_argument("--most", type=int, default=10, help="how many files and functions (10)")
    options = parser.parse_args()

    now = sources()
    try:
        before = room_sizes(sources_at(options.since))
    except subprocess.CalledProcessError:  # a clone without that branch, or no checkout at all
        before = {}
    sizes = room_sizes(now)
    print(f"{'room':<14}{'code lines':>10}{'budget':>9}{'since ' + options.since:>14}")
    for room in sorted({*sizes, *before}, key=lambda room: -sizes.get(room, 0)):
        change = f"{sizes.get(room, 0) - before.get(room, 0):+}" if before else "-"
        print(f"{room:<14}{sizes.get(room, 0):>10,}{BUDGETS.get(room, 0):>9,}{change:>14}")
    total, then = sum(sizes.values()), sum(before.values())
    change = f"{total - then:+}" if before else "-"
    print(f"{'all':<14}{total:>10,}{sum(BUDGETS.values()):>9,}{change:>14}")
    tests = sum(len(code_lines(text)) for text in sources("tests").values())
    print(f"{'tests':<14}{tests:>10,}")

    print(f"\nlongest files (lines; at most {LONGEST_FILE})")
    files = sorted(((text.count("\n"), path) for path, text in now.items()), reverse=True)
    for lines, path in files[: options.most]:
        print(f"{lines:>6}  {path}")
    print(f"\nlongest functions (code lines; at most {LONGEST_FUNCTION})")
    functions = [(n, f"{path}: {name}") for path in now for name, n in function_lengths(now[path])]
    for lines, name in sorted(functions, reverse=True)[: options.most]:
        print(f"{lines:>6}  {name}")


if __name__ == "__main__":
    main()
