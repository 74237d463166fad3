# needs: duckdb, pandas
import duckdb, pandas as pd

sales = pd.DataFrame({"day": [1, 1, 2], "amount": [5, 6, 7]})
print(duckdb.sql("select day, sum(amount) from sales group by day order by day").fetchall())
