"""`python -m rankd.collector` is the command `rankd`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
