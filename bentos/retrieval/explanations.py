"""From the engine's explanation of an answer to what clients get."""

from __future__ import annotations

from bentos.retrieval.runtime import Explanation
from bentos.retrieval.schemas import ExplainedAd, ExplainResponse, ValueShare, VisitedNode
from models.index.explain import Visit


def to_response(explanation: Explanation, release_source: str) -> ExplainResponse:
    """The explanation as the body of an answer."""
    answer = explanation.answer
    return ExplainResponse(
        release=answer.release,
        release_source=release_source,
        tier=answer.tier,
        cost=answer.cost,
        nodes_scored=answer.nodes_scored,
        ads_scored=answer.ads_scored,
        cold=answer.cold,
        ads=[
            ExplainedAd(ad_id=ad.ad_id, score=ad.score, source=ad.source, path=list(ad.path)) for ad in explanation.ads
        ],
        levels=[[_node(visit) for visit in level] for level in explanation.levels],
    )


def _node(visit: Visit) -> VisitedNode:
    node = visit.node
    values = {
        group: [ValueShare(code=code, share=share) for code, share in shares] for group, shares in node.values.items()
    }
    return VisitedNode(
        place=visit.place,
        node=node.node,
        score=visit.score,
        num_ads=node.num_ads,
        values=values,
        representative_ad_id=node.representative,
    )
