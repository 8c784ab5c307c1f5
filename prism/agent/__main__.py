"""Entry point of `python -m prism.agent`."""

import sys

from prism.agent.main import main

sys.exit(main())
