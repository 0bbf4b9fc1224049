"""Puts this directory on the path, so that the tests share `oracle` and `batches`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
