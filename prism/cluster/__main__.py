"""Entry point of `python -m prism.cluster`."""

import sys

from prism.cluster.main import main

sys.exit(main())
