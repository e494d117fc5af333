"""A metric of your own: what a routed ticket is worth."""

QUEUES = ("payment", "delivery", "return", "device")
NEIGHBOURS = ({"delivery", "return"},)
"""Queues that hand tickets over to each other within the hour."""


def score(doc, results):
    """1 for the right queue, 0.5 for its neighbour, else 0.

    Args:
        doc: A line of tickets.jsonl.
        results: (log-probability, is greedy) of each choice.
    """
    chosen = max(range(len(results)), key=lambda index: results[index][0])
    if chosen == doc["queue"]:
        return {"routing": 1.0}
    return {"routing": 0.5 if {QUEUES[chosen], QUEUES[doc["queue"]]} in NEIGHBOURS else 0.0}
