"""The league: what campaigns have found, over all their clusters and tasks; a table and a page.

found = league.load([Path("benchmarks/results/league.jsonl")])
league.figures.overall(found)          every algorithm over all races
league.page.write(found, "league.html")
"""

from offbeat.lab.league import figures, page
from offbeat.lab.league.load import Cell, League, load

__all__ = ["Cell", "League", "figures", "load", "page"]
