"""``python -m tools.pages``: renews every page that is written from the code."""

import sys

from tools.pages.files import main

sys.exit(main(sys.argv[1:]))
