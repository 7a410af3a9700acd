"""`python -m multigrad`."""

import sys

from multigrad.cli.main import main

sys.exit(main())
