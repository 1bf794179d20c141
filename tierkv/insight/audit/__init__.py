"""The determinism audit: does the cache serve what would have been computed?

A share of the hits is computed again without the cache, and compared: K and V of every layer to the bit, and the logits
that followed from them. `AuditResult` is what one audit found, `AuditLog` what many did.

    tierkv.insight.audit.transformers   `Auditor`, for ``tierkv.engines.transformers.generate(..., audit=)``
    tierkv.insight.audit.vllm           the same question asked of a running vLLM, from outside
"""

from tierkv.insight.audit.log import AuditLog
from tierkv.insight.audit.result import (
    AuditResult,
    Finding,
    LogitsDifference,
    PlaneDifference,
)
from tierkv.insight.audit.sampling import Sampler

__all__ = ["AuditLog", "AuditResult", "Finding", "LogitsDifference", "PlaneDifference", "Sampler"]
