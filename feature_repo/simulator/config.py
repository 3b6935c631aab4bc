"""Sizes and parameters of the simulated ads world, each with the public log it was read from.

Measured on KuaiRand-Pure (Gao et al., CIKM 2022, two weeks of the standard log) and on the iPinYou samples
(arXiv 1407.7073); docs/simulator.md holds the comparison. Weights of the preference function are design
choices: they were scaled until the oracle's normalised entropy lay between 0.80 and 0.90, before any model was
trained, and were never tuned against one.
"""

from __future__ import annotations

from dataclasses import dataclass

SURFACES = ("feed", "stories", "search")
FORMATS = ("image", "video", "carousel", "collection")
KINDS = ("view", "like", "share", "purchase")
LABEL_WINDOWS = {"click": 1800, "conversion": 6 * 3600}

HOUR_SHARE = (
    0.037, 0.023, 0.015, 0.009, 0.008, 0.010, 0.018, 0.027, 0.034, 0.040, 0.046, 0.052,
    0.059, 0.056, 0.051, 0.052, 0.056, 0.060, 0.056, 0.055, 0.056, 0.061, 0.064, 0.058,
)  # fmt: skip
"""Share of impressions by local hour, KuaiRand-Pure."""


@dataclass(frozen=True)
class SimulatorConfig:
    """Parameters of a world; with a seed they determine every row."""

    num_users: int
    num_ads: int
    """Ads that exist when the first day starts; new ones come on top."""
    num_impressions: int
    """Expected impressions over all days."""
    topics: tuple[int, int, int] = (12, 8, 6)
    """Top topics, parents per top, leaves per parent."""
    num_days: int = 14
    first_day: str = "2026-01-05"
    organic_ratio: float = 5.0
    """Organic engagements per impression (histories are mostly organic)."""
    history_length: int = 1000
    max_user_events: int = 1500
    """Activity is cut so that the most active users expect about this many organic events in 14 days; by chance a
    few reach 2,000."""
    new_ad_share: float = 0.025
    """New ads a day, as a share of the live ones; as many retire."""
    bid_change_share: float = 0.03
    new_user_share: float = 0.08
    """Share of users who join after the first day."""
    user_change_share: float = 0.004
    """Users a day whose observed attributes change."""
    activity_sigma: float = 0.95
    """Log-normal activity. KuaiRand: standard deviation of log counts 0.94 (impressions), 1.15 (histories)."""
    popularity_exponent: float = 1.4
    popularity_offset: float = 0.02
    """Zipf-Mandelbrot weights (rank + offset * N) ** -exponent. KuaiRand: the top 1 % of videos get 17 % of the
    impressions, the top 10 % get 60 %: a flatter head than plain Zipf."""
    session_events: float = 8.0
    gap_median_s: float = 4.6
    gap_sigma: float = 1.75
    """Log-normal seconds between events of a session: KuaiRand play times (median 4.6 s, mean 21 s)."""
    surface_share: tuple[float, float, float] = (0.60, 0.25, 0.15)
    slots: tuple[int, int, int] = (2, 1, 3)
    """Ads shown per request, by surface."""
    surface_ctr: tuple[float, float, float] = (0.016, 0.011, 0.036)
    """Mean click rate of the logged traffic, by surface. The iPinYou samples span 0.04 % to 3.2 %; KuaiRand's
    44 % is auto-played video and no ad. Intercepts are solved for on a fixed sample of first-day traffic."""
    conversion_rate: float = 0.12
    """Conversions per click within the window."""
    num_interests: int = 4
    drift: float = 0.06
    """Chance a day that one interest of a user moves (0.7 to a sibling leaf, else anywhere)."""
    parent_similarity: float = 0.5
    top_similarity: float = 0.18
    embedding_dim: int = 16
    explore: float = 0.12
    """Share of slots that the logging policy fills uniformly from the eligible ads."""
    target: float = 0.55
    """Share of slots filled by popularity within a coarse interest of the user; the rest by popularity alone."""
    click_delay_s: float = 45.0
    conversion_delay_s: float = 7200.0
    late_share: float = 0.02
    """Engagements that become known late (exponential, mean 40 minutes, at most 6 hours)."""

    @property
    def num_leaves(self) -> int:
        """Leaf topics."""
        return self.topics[0] * self.topics[1] * self.topics[2]


def preset(name: str) -> SimulatorConfig:
    """Configuration of a named size: `tiny` (tests, seconds) or `laptop` (the default run).

    Raises:
        ValueError: the name is unknown.
    """
    presets = {
        "tiny": SimulatorConfig(num_users=600, num_ads=500, num_impressions=20_000, topics=(6, 4, 3)),
        "laptop": SimulatorConfig(num_users=22_000, num_ads=20_500, num_impressions=1_040_000),
    }
    if name not in presets:
        raise ValueError(f"preset: {name!r} is unknown; known presets: {', '.join(presets)}")
    return presets[name]
