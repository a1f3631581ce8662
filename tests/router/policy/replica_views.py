"""Views of replicas as a policy sees them."""

from replica.contract.messages import EngineLimits, LoadReport, StepTimeCoefficients, Welcome
from router.policy.incarnation import Incarnation
from router.policy.load import ReplicaView

K = StepTimeCoefficients(a=0.01, b=1e-4, c=1e-4, d=1e-7)


def view(name: str, *, waiting: int = 0, queued: int = 0, context: int = 0, free: int = 1000) -> ReplicaView:
    """Of 1,000 blocks of 16 tokens; `queued` tokens to prefill, `context` tokens of running requests."""
    load = LoadReport(1, 0, waiting, queued, context, free, 0, K, 0.01)
    limits = EngineLimits(8192, 64, 512, 1000, 16, 1024, 50_000)
    return ReplicaView(Incarnation(name, 1), Welcome(1, name, 1, "m", "r", "f", limits, load), 0.0)
