"""`python -m multigrad`."""

import sys

from multigrad.cli import main

sys.exit(main())
