"""Results of audits, good and bad."""

from tierkv.insight.audit.result import AuditResult, Finding, LogitsDifference, PlaneDifference

PLANE = PlaneDifference(3, "K", 12, 0.5, 0.01, 0.25, (100, 3, 1))
LOGITS = LogitsDifference(0.5, 1.0, 0.001, None, True, False)
AUDIT = AuditResult(
    engine="transformers",
    namespace="ab" * 32,
    verdict="ok",
    basis="envelope",
    reason="",
    dtype="bfloat16",
    lossy="",
    tokens=128,
    block_tokens=16,
    planes=(PLANE,),
    logits=LOGITS,
    finding=None,
    answer_token=None,
    computed=2,
    seconds=0.75,
    at=1767225600.0,
)
CORRUPT = AuditResult(
    engine="transformers",
    namespace="ab" * 32,
    verdict="corrupt",
    basis="exact",
    reason="bits",
    dtype="float32",
    lossy="",
    tokens=128,
    block_tokens=16,
    planes=(PlaneDifference(0, "V", 9, float("inf"), float("inf"), 0.0, (0, 9)),),
    logits=None,
    finding=Finding(2, "cd" * 32, 0, "V", 33, float("inf"), 0.0, 4),
    answer_token=None,
    computed=2,
    seconds=0.5,
    at=1767225601.0,
)
