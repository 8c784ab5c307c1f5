"""Health check of the image: exits with 1 unless GET /health answers 200.

PRISM_HEALTH_URL names another address, if the YAML has another port or a certificate.
"""

from __future__ import annotations

import os
import ssl
import sys
from urllib.request import urlopen

DEFAULT_URL = "http://127.0.0.1:8000/health"
_TIMEOUT_S = 4.0


def main() -> int:
    url = os.environ.get("PRISM_HEALTH_URL", DEFAULT_URL)
    # The certificate is for the name that clients use, not for the loopback address.
    context = ssl._create_unverified_context() if url.startswith("https:") else None
    try:
        with urlopen(url, timeout=_TIMEOUT_S, context=context) as answer:
            return 0 if answer.status == 200 else 1
    except OSError as error:
        print(f"{url}: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
