"""A parser of the queries of dashboards and alert rules: the metrics and labels that they need, and the labels of their
results.
"""

from __future__ import annotations

from collections.abc import Iterator

import promql_parser
from promql_parser import (
    AggModifierType,
    AggregateExpr,
    BinaryExpr,
    Call,
    MatrixSelector,
    ParenExpr,
    SubqueryExpr,
    UnaryExpr,
    VectorSelector,
)

_COMPARISONS = {"==", "!=", ">", "<", ">=", "<="}


def prepared(query: str) -> str:
    """Return a dashboard's query with values for its variables: everything, and a minute."""
    for name in ("cluster", "node", "topic", "group"):
        query = query.replace(f'"${name}"', '".*"')
    query = query.replace("$__rate_interval", "1m")
    assert "$" not in query, query
    return query


def wanted(query: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each metric of a query, with the labels that the query names, including those of a ``by`` around it."""
    yield from _wanted(promql_parser.parse(query), set())


def _wanted(node: object, by: set[str]) -> Iterator[tuple[str, set[str]]]:
    match node:
        case VectorSelector():
            yield node.name, {matcher.name for matcher in node.matchers.matchers} | by
            return
        case AggregateExpr() if node.modifier is not None:
            assert node.modifier.type == AggModifierType.By, f"{node}: by says what comes out, without does not"
            by = by | set(node.modifier.labels)
    for one in _under(node):
        yield from _wanted(one, by)


def _under(node: object) -> list[object]:
    match node:
        case BinaryExpr():
            return [node.lhs, node.rhs]
        case Call():
            return list(node.args)
        case AggregateExpr() | ParenExpr() | SubqueryExpr() | UnaryExpr():
            return [node.expr]
        case MatrixSelector():
            return [node.vector_selector]
    return []


def labels_out(query: str) -> set[str] | None:
    """Return the labels of a query's results, or None for all labels of its metric."""
    return _labels_out(promql_parser.parse(query))


def _labels_out(node: object) -> set[str] | None:
    match node:
        case AggregateExpr() if str(node.op) not in ("topk", "bottomk"):
            return set() if node.modifier is None else set(node.modifier.labels)
        case Call() if node.func.name == "histogram_quantile":
            return (_labels_out(node.args[1]) or set()) - {"le"}
        case BinaryExpr():
            return _labels_out(node.lhs)
        case VectorSelector():
            return None
    return _labels_out(_under(node)[0])


def without_limit(query: str) -> str:
    """Return an alert's query without its comparison with the limit."""
    parsed = promql_parser.parse(query)
    return str(parsed.lhs) if isinstance(parsed, BinaryExpr) and str(parsed.op) in _COMPARISONS else query
