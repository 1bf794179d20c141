"""Live insight: why was it not cached? Asked of a running cache, request by request, beside its data path.

`Insight` observes an engine. It tells blocks that were not served apart by cause, finds the templates that prompts are
made from and where prompts leave them, counts what was evicted too early, and estimates other capacities. It keeps
hashes, not prompts, and its memory is bounded.
"""

from tierkv.insight.live.causes import CAUSES
from tierkv.insight.live.collector import Insight
from tierkv.insight.live.report import NOTHING
from tierkv.insight.live.windows import LONGEST_S

__all__ = ["CAUSES", "LONGEST_S", "NOTHING", "Insight"]
