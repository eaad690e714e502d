"""The auditor: attacks on the data of a provider or a mask source, and the claims that they try to refute."""

from typing import TYPE_CHECKING

from symbiosis_executor import NAME, check_package, published

DISTRIBUTION = NAME

check_package("shared")

if TYPE_CHECKING:
    from security.deployment import TranscriptAudit
    from security.recordings.transcript import Transcript, read_transcript
    from security.verdicts.claims import Claim
    from security.verdicts.findings import Finding
    from security.verdicts.judges import at_chance, succeeds
    from security.verdicts.statistics import rate
    from security.views.adversaries import View, collusion_view, provider_view, requests_of
    from security.views.public_model import PublicModel

__all__ = [
    "Claim",
    "Finding",
    "PublicModel",
    "Transcript",
    "TranscriptAudit",
    "View",
    "at_chance",
    "collusion_view",
    "provider_view",
    "rate",
    "read_transcript",
    "requests_of",
    "succeeds",
]

__getattr__, __dir__ = published(
    __name__,
    {
        "Claim": "security.verdicts.claims",
        "Finding": "security.verdicts.findings",
        "PublicModel": "security.views.public_model",
        "Transcript": "security.recordings.transcript",
        "TranscriptAudit": "security.deployment",
        "View": "security.views.adversaries",
        "at_chance": "security.verdicts.judges",
        "collusion_view": "security.views.adversaries",
        "provider_view": "security.views.adversaries",
        "rate": "security.verdicts.statistics",
        "read_transcript": "security.recordings.transcript",
        "requests_of": "security.views.adversaries",
        "succeeds": "security.verdicts.judges",
    },
)
