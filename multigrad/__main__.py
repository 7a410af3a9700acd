"""`python -m multigrad`: the command line."""

import sys

from multigrad.cli.main import main

sys.exit(main())
