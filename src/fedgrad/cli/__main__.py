"""`python -m fedgrad.cli`."""

import sys

from fedgrad.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
