"""``python -m outeffhop``: the command line if the script is not on the path."""

import sys

from outeffhop.cli.main import main

sys.exit(main())
