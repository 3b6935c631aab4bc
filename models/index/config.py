"""Configuration of the retrieval model, its index and its training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

NUM_FEATURES = 3
"""Features of co-visits: each channel, and their mix, which is the counting floor itself."""
LEARNERS = ("joint", "em", "separate", "random", "natural")
"""How ads get their paths (`models/index/learners.py`); all but the first are what the joint index is compared with."""


@dataclass(frozen=True)
class RetrievalTraining:
    """How the retrieval model and its index are trained. Shares are of all steps."""

    batch_size: int = 512
    epochs: int = 1
    min_steps: int = 0
    """Small logs are gone through more often, until this many steps are taken."""
    learning_rate: float = 8e-3
    table_learning_rate: float = 0.1
    dense_decay: float = 1e-5
    final_rate: float = 1.0
    """Learning rates at the last step, as a share of those at the first; they fall linearly."""
    impression_weight: float = 1.0
    """Weight of the log-loss of impressions; 0 for positives-only logs, whose steps then take positives only."""
    sampled_ads: int = 0
    """Ads drawn uniformly a step as further candidates of the softmax (log-q corrected); what nobody was shown."""
    softmax_weight: float = 0.3
    """Weight of the in-batch softmax on clicks beside the log-loss of impressions."""
    engagement_weight: float = 0.3
    """Weight of the softmax on each user's next organic engagement."""
    engagement_rows: int = 512
    distillation_weight: float = 0.5
    """Weight of the teacher's logits on unlabelled pairs."""
    pair_rows: int = 64
    """Rows with unlabelled pairs a step."""
    index_start: float = 0.3
    """Share of training after which codebooks are initialised and the index loss begins to warm up."""
    index_warm_up: float = 0.2
    index_weight: float = 0.5
    """Weight of the supervised losses of all levels together."""
    level_gradient: float = 0.0
    """Part of the levels' gradient that reaches the ad tower (0: the index follows the scorer and never bends it)."""
    gradient_start: float = 0.6
    """Share of training before which that part is 0."""
    trunk_gradient: float = 0.0
    """Part of the levels' gradient that reaches the user's trunk and the weights of events; on KuaiRand it cost the
    scorer a third."""
    reconstruction_weight: float = 0.5
    balance_weight: float = 0.05
    alignment_weight: float = 0.1
    level_rows: int = 0
    """Clicked rows of a step that the levels learn from; 0 takes all, which positives-only steps have many of."""
    beam_weight: float = 0.5
    """Weight of the listwise loss on the nodes of the best ads among those a beam would see."""
    beam_rows: int = 32
    beam_every: int = 4
    beam_width: int = 8
    """Nodes of an upper level whose children that loss compares."""
    beam_scan: int = 1
    """Of so many ads, leaf by leaf, one is scanned for the listwise targets."""
    beam_best: int = 30
    """Ads of the full scan whose nodes are the listwise targets; of a sample, as large a share."""
    em_rounds: int = 4
    """Times that learner `em` builds its index again, evenly over the index's part of training."""
    codebook_rate: float = 0.1
    """Learning rate of the codebooks relative to that of the towers."""
    follow_rate: float = 0.5
    """How far nodes move towards the mean of their ads at each refresh."""
    ads_per_step: int = 1024
    """Live ads, drawn uniformly, on which reconstruction and balance are taken."""
    queue_length: int = 32
    min_alpha: float = 5.0
    """Codebooks start from k-means; an alpha near 1 would pull all nodes into the middle again."""
    max_alpha: float = 20.0
    alpha_exponent: float = 1.5
    refresh_every: int = 20
    """Steps between snapshots of paths and node features."""
    reseed_below: float = 0.1
    """A node with less than this part of a fair share is moved at a refresh."""


@dataclass(frozen=True)
class RetrievalConfig:
    """Sizes of the towers, the levels and the index. Levels come first, ads last, in the per-level tuples."""

    level_sizes: tuple[int, ...] = (32, 32)
    learner: str = "joint"
    width: int = 32
    num_ad_vectors: int = 2
    num_user_vectors: tuple[int, ...] = (4, 4, 4)
    hidden: tuple[int, ...] = (16, 16, 16)
    interaction_width: int = 8
    table_width: int = 16
    trunk_width: int = 128
    recent_length: int = 32
    history_length: int = 200
    """Newest events that enter the interaction features."""
    num_attention_queries: int = 4
    half_lives_s: tuple[float, ...] = (86_400.0, 1_209_600.0)
    ages_by_order: bool = False
    """Ages count events instead of seconds, one minute an event: for logs whose times say little but the order."""
    covisit_neighbours: int = 0
    """Co-visited ads kept of each ad (`models/index/covisits.py`); 0 leaves the features out."""
    covisit_decay: float = 0.8
    """Weight of an event's neighbours relative to those of the next newer event."""
    exclude_seen: bool = False
    """Never answer an ad of the history: for logs in which nobody takes an ad twice."""
    node_values: int = 4
    """Values a node keeps of each group (its virtual features)."""
    sketch_width: int = 16
    """Width of the vectors that pre-rank ads (`models/index/prerank.py`)."""
    training: RetrievalTraining = field(default_factory=RetrievalTraining)

    def __post_init__(self) -> None:
        """Raise ValueError where the per-level tuples don't fit the number of levels."""
        for name in ("num_user_vectors", "hidden"):
            value = getattr(self, name)
            if len(value) != len(self.level_sizes) + 1:
                raise ValueError(
                    f"{name}: {value} needs one value a level and one for ads, {len(self.level_sizes) + 1}"
                )
        if self.learner not in LEARNERS:
            raise ValueError(f"learner: {self.learner!r} is unknown; known learners: {', '.join(LEARNERS)}")
        if not self.level_sizes or min(self.level_sizes) < 1:
            raise ValueError(f"level_sizes: {self.level_sizes} needs at least one level of at least one node")

    @property
    def num_levels(self) -> int:
        """L, the levels of nodes; ads are one more."""
        return len(self.level_sizes)

    def num_features(self, num_groups: int) -> int:
        """F, interaction features of a pair: groups and the ad itself by half-life, and co-visits."""
        return (num_groups + 1) * len(self.half_lives_s) + (NUM_FEATURES if self.covisit_neighbours else 0)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RetrievalConfig:
        """Inverse of `to_dict`, also after a trip through JSON."""
        plain: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k != "training"
        }
        return cls(**plain, training=RetrievalTraining(**values["training"]))
