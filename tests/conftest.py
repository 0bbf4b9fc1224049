"""Puts this directory on the path, so that the tests share `oracle` and `batches`."""

import os
import sys
from pathlib import Path

# Before torch is loaded: threads that spin while they wait crawl on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

sys.path.insert(0, str(Path(__file__).parent))
