"""`python -m ferrule` is `ferrule`."""

import sys

from ferrule.launch.cli import main

sys.exit(main())
