"""Methods against forgetting, compared: what `offbeat federated` runs.

comparison = Comparison.of(["fedcbdr,uniform"], task="digits", tasks=5, clients=5)
results = comparison.run()
print(table(rows(results)))
"""

from offbeat.lab.federation import page
from offbeat.lab.federation.comparison import Comparison
from offbeat.lab.federation.results import Result
from offbeat.lab.federation.summary import Row, rows, sentence, table

__all__ = ["Comparison", "Result", "Row", "page", "rows", "sentence", "table"]
