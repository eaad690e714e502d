"""The attacks, one class each."""

from security.attacks.active import CanaryRows, CoTenantTiming, Poison, WeightExtraction
from security.attacks.batches import (
    AdapterOfRows,
    AdaptersInStep,
    ByteSearch,
    CachedPrefix,
    SequenceBoundary,
    StepCounts,
)
from security.attacks.extraction import AdapterExtraction
from security.attacks.gradients import LabelRecovery, SpanCheck
from security.attacks.hostile_files import Filler, MemoryBomb, ServedSpeculation, VocabularyPath
from security.attacks.hostile_parties import MaskServedTwice, SubstitutedSource
from security.attacks.hostile_provider import AbortOracle, ImprintedEmbeddings, ImprintedHead
from security.attacks.logs import LogScan
from security.attacks.masking import DistinguishingGame, Uniformity
from security.attacks.routing import Routing
from security.attacks.seeds import SeedPrediction
from security.attacks.streams import SpeculationWatch, TopicFromTraffic
from security.attacks.tokens import (
    Averaging,
    DeepMatching,
    KnownMaskSubtraction,
    MaskReuse,
    NoiseAware,
    SubspaceProjection,
    VocabularyMatching,
)
from security.attacks.traffic import TrafficAnalysis, TrafficAnalysisOutside

ATTACKS = (
    KnownMaskSubtraction,
    MaskReuse,
    SubspaceProjection,
    Averaging,
    VocabularyMatching,
    DeepMatching,
    NoiseAware,
    LabelRecovery,
    SpanCheck,
    AdapterExtraction,
    DistinguishingGame,
    Uniformity,
    SeedPrediction,
    TrafficAnalysis,
    TrafficAnalysisOutside,
    TopicFromTraffic,
    Routing,
    AdapterOfRows,
    AdaptersInStep,
    SequenceBoundary,
    StepCounts,
    CachedPrefix,
    ByteSearch,
    Poison,
    AbortOracle,
    ImprintedEmbeddings,
    ImprintedHead,
    SpeculationWatch,
    VocabularyPath,
    Filler,
    ServedSpeculation,
    MemoryBomb,
    SubstitutedSource,
    MaskServedTwice,
    WeightExtraction,
    CanaryRows,
    CoTenantTiming,
    LogScan,
)
__all__ = [attack.__name__ for attack in ATTACKS]
