"""The only code that touches verl.

- `plugin`: what verl loads; installs everything below
- `selection`: which of our methods a launch selects, with which parameters
- `checks`: refuses an impossible selection in the driver, before Ray starts
- `advantage`: hands the whole batch to a method inside verl's V1 trainer
- `loss`: makes what a method froze available to the loss in the workers
- `memory`: saves and restores what a method remembers, with verl's checkpoint
- `agent_loops`, `demonstration`: a verified demonstration as one of a group's responses
- `hydra_path`: makes +method=NAME work on the stock command
"""

from __future__ import annotations

LOAD_ERROR: BaseException | None = None
"""Why the plugin could not be loaded, if it could not: verl itself only logs that at DEBUG."""
