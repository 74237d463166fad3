"""Files go in, files come out: the program sees a private directory and nothing else of yours."""

import belljar

CODE = """
import csv, json

with open("data/sales.csv") as file:
    rows = list(csv.DictReader(file))
with open("summary.json", "w") as file:
    json.dump({"rows": len(rows), "total": sum(int(row["amount"]) for row in rows)}, file)
with open("debug.log", "w") as file:
    file.write("not asked for, so only its name comes back")
"""

result = belljar.run(
    CODE,
    files={"data/sales.csv": "region,amount\nnorth,30\nsouth,12\n"},
    outputs=["*.json"],
)

for path, file in sorted(result.files.items()):
    print(f"{path}: {file.size} bytes, {file.text or 'content not collected'}")
