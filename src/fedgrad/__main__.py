"""`python -m fedgrad`: the command `fedgrad`."""

import sys

from fedgrad.cli.dispatch import main

if __name__ == "__main__":
    sys.exit(main())
