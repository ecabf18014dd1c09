"""`python -m coppice` is the `coppice` command."""

import sys

from coppice.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
