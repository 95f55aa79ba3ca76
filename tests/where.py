"""Where things are in a checkout, for tests and for the processes that they start."""

from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
# What tests share is in `tests`; some share what is in another test file, too.
ROOMS = [str(ROOT), str(TESTS), *(str(path) for path in sorted(TESTS.iterdir()) if path.is_dir())]
