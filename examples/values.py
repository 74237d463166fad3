"""Variables go in, a typed value comes out: the last expression, or the variable `result`."""

import datetime

import belljar

measured = {
    "readings": [20.5, 21.0, 19.5],
    "since": datetime.date(2024, 2, 29),
}

result = belljar.run(
    """
import statistics

{
    "mean": statistics.mean(readings),
    "until": since.replace(year=since.year + 4),
    "raw": bytes(len(readings)),
}
""",
    context=measured,
)

for name, value in result.value.items():
    print(f"{name}: {value!r}")
