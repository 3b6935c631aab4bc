"""The explain page of an index: purity of its levels, its largest nodes, and the nodes that some requests visited.

One HTML file below `<home>/reports/index/`, without scripts, users' names or anything from a network. Imports torch.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from dagster_project.lib.index_stages import AUDIT_K, audit_data, open_index, open_model, standard_beams
from dagster_project.lib.resources import Home
from models.index.audit import draw_requests
from models.index.explain import NodeView, Visit, purity, view, visits
from models.index.publish import Index
from models.staging import write_atomically

NUM_REQUESTS, NUM_NODES, NUM_PLACES = 5, 20, 5
STYLE = (
    "body{font:15px system-ui;margin:2em auto;max-width:70em;color:#222}table{border-collapse:collapse;margin:1em 0}"
    "td,th{padding:.25em .8em;border-bottom:1px solid #ddd;text-align:left}h2{margin-top:2em}"
)


def explain(home: Home, as_of: str) -> tuple[Path, list[dict[str, Any]]]:
    """Write the page of a day's index; its path and the purity of every level."""
    model, index, data = open_model(home, as_of), open_index(home, as_of), audit_data(home, as_of)
    groups = [group.name for group in data.schema.groups]
    levels = purity(index, groups, seed=home.seed)
    (requests,) = draw_requests(data, (min(NUM_REQUESTS, data.num_rows),), seed=home.seed)
    rows = torch.from_numpy(requests.row_B)
    with torch.no_grad():
        state = model.user_state(data.user_batch(rows), data.ads)
    walked = visits(model, index, state, beams=standard_beams(home, as_of), k=AUDIT_K)
    surfaces = [data.schema.surfaces[int(code)] for code in requests.surface_B]
    facts = zip(surfaces, requests.activity_B.tolist(), walked, strict=True)
    body = [
        f"<h1>Index of {html.escape(home.source)} as of {as_of}</h1>",
        "<p>Purity is the share of a node's ads that have its most frequent value. The random tree has nodes of the "
        "same sizes. Values are feature codes.</p>",
        _purity_table([level.to_dict() for level in levels]),
        *(_nodes(index, number, groups) for number in range(1, len(index.levels) + 1)),
        *(_request(number, *fact) for number, fact in enumerate(facts, 1)),
    ]
    page = f"<!doctype html><meta charset=utf-8><title>Index {as_of}</title><style>{STYLE}</style>{''.join(body)}"
    path = home.reports / "index" / f"explain-{as_of}.html"
    write_atomically(path, page.encode())
    return path, [level.to_dict() for level in levels]


def purity_rows(levels: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a level and group."""
    return [
        {"level": level["level"], "nodes": level["num_nodes"], "group": group, "learned": round(share, 4),
         "random": round(level["random"][group], 4)}
        for level in levels for group, share in level["learned"].items()
    ]  # fmt: skip


def _purity_table(levels: Sequence[dict[str, Any]]) -> str:
    rows = [[str(v) for v in row.values()] for row in purity_rows(levels)]
    return f"<h2>Purity</h2>{_table(['level', 'nodes', 'group', 'learned tree', 'random tree'], rows)}"


def _nodes(index: Index, level: int, groups: Sequence[str]) -> str:
    published = index.levels[level - 1]
    size_K = torch.bincount(published.node_S, minlength=published.num_nodes)
    largest = size_K.argsort(descending=True, stable=True)[:NUM_NODES].tolist()
    rows = [_node_row(view(index, level, node, groups)) for node in largest]
    title = f"<h2>Level {level}: the largest of {published.num_nodes} nodes</h2>"
    return title + _table(["node", "ads", *groups, "nearest ad"], rows)


def _node_row(node: NodeView) -> list[str]:
    values = [", ".join(f"{code} ({share:.0%})" for code, share in found) or "-" for found in node.values.values()]
    return [str(node.node), str(node.num_ads), *values, str(node.representative)]


def _request(number: int, surface: str, events: int, levels: Sequence[Sequence[Visit]]) -> str:
    parts = [f"<h2>Request {number}: {html.escape(surface)}, a history of {events} events</h2>"]
    for level, found in enumerate(levels, 1):
        rows = [[str(v.place + 1), f"{v.score:.2f}", *_node_row(v.node)] for v in found[:NUM_PLACES]]
        names = list(found[0].node.values) if found else []
        parts.append(f"<p>Level {level}: the first {len(rows)} of {len(found)} nodes visited</p>")
        parts.append(_table(["place", "score", "node", "ads", *names, "nearest ad"], rows))
    return "".join(parts)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = "".join(f"<tr>{''.join(f'<td>{html.escape(v)}' for v in row)}" for row in rows)
    return f"<table><tr>{''.join(f'<th>{html.escape(name)}' for name in head)}{cells}</table>"
